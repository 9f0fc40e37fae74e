/* The tables of rules and formats as data, for those who ask by name or number. */
#include <float.h>

#include "core/dispatch.h"

#define STATE_NAME(name)                  #name,
#define HYPER_NAME(name, value, range)    #name,
#define HYPER_DEFAULT(name, value, range) value,
#define HYPER_RANGE(name, value, range)   range,
#define RULE_TABLES(rule, states, hypers)                                                                              \
    static const char *const rule##_states[] = {states(STATE_NAME)};                                                   \
    static const char *const rule##_hypers[] = {hypers(HYPER_NAME)};                                                   \
    static const double rule##_defaults[] = {hypers(HYPER_DEFAULT)};                                                   \
    static const bwd_range rule##_ranges[] = {hypers(HYPER_RANGE)};                                                    \
    _Static_assert(sizeof rule##_states / sizeof *rule##_states <= BWD_MAX_STATES, "raise BWD_MAX_STATES");            \
    _Static_assert(sizeof rule##_hypers / sizeof *rule##_hypers <= BWD_MAX_HYPERS, "raise BWD_MAX_HYPERS");
BWD_RULES(RULE_TABLES)

typedef struct rule_row {
    const char *name;
    const char *const *states, *const *hypers;
    const double *defaults;
    const bwd_range *ranges;
    int state_count, hyper_count;
} rule_row;

#define RULE_ROW(rule, states, hypers)                                                                                 \
    {#rule,                                                                                                            \
     rule##_states,                                                                                                    \
     rule##_hypers,                                                                                                    \
     rule##_defaults,                                                                                                  \
     rule##_ranges,                                                                                                    \
     BWD_##rule##_STATE_COUNT,                                                                                         \
     (int)(sizeof rule##_hypers / sizeof *rule##_hypers)},
static const rule_row rules[BWD_RULE_COUNT] = {BWD_RULES(RULE_ROW)};

static const rule_row *
row_of(int rule)
{
    return rule >= 0 && rule < BWD_RULE_COUNT ? &rules[rule] : NULL;
}

int
bwd_rule_find(const char *name)
{
    for (int i = 0; i < BWD_RULE_COUNT; i++) {
        if (strcmp(rules[i].name, name) == 0) {
            return i;
        }
    }
    return -1;
}

const char *
bwd_rule_name(int rule)
{
    const rule_row *row = row_of(rule);
    return row ? row->name : NULL;
}

const char *const *
bwd_rule_states(int rule, int *count)
{
    const rule_row *row = row_of(rule);
    *count = row ? row->state_count : 0;
    return row ? row->states : NULL;
}

const char *const *
bwd_rule_hypers(int rule, int *count)
{
    const rule_row *row = row_of(rule);
    *count = row ? row->hyper_count : 0;
    return row ? row->hypers : NULL;
}

const double *
bwd_rule_defaults(int rule, int *count)
{
    const rule_row *row = row_of(rule);
    *count = row ? row->hyper_count : 0;
    return row ? row->defaults : NULL;
}

/* Written so that a NaN is outside of every range. */
static int
in_range(bwd_range range, double x)
{
    switch (range) {
        case BWD_NON_NEGATIVE:
            return x >= 0.0 && x <= (double)FLT_MAX;
        case BWD_BELOW_ONE:
            return x >= 0.0 && x < 1.0;
        case BWD_SWITCH:
            return x == 0.0 || x == 1.0;
    }
    return 0;
}

int
bwd_rule_bad_hyper(int rule, const double *hyper)
{
    const rule_row *row = row_of(rule);
    for (int i = 0; row && i < row->hyper_count; i++) {
        if (!in_range(row->ranges[i], hyper[i])) {
            return i;
        }
    }
    return -1;
}

int
bwd_rule_hyper_is_switch(int rule, int index)
{
    const rule_row *row = row_of(rule);
    return row && index >= 0 && index < row->hyper_count && row->ranges[index] == BWD_SWITCH;
}

const char *
bwd_rule_hyper_range(int rule, int index)
{
    static const char *const texts[] = {
        [BWD_NON_NEGATIVE] = "a finite number >= 0 that float32 can hold",
        [BWD_BELOW_ONE] = "a number in [0, 1)",
        [BWD_SWITCH] = "0 or 1",
    };
    const rule_row *row = row_of(rule);
    return row && index >= 0 && index < row->hyper_count ? texts[row->ranges[index]] : NULL;
}

bwd_status
bwd_rule_check(int rule, const double *hyper, double step)
{
    if (!row_of(rule)) {
        return BWD_BAD_RULE;
    }
    if (bwd_rule_bad_hyper(rule, hyper) >= 0) {
        return BWD_BAD_HYPER;
    }
    return step >= 1.0 && isfinite(step) ? BWD_OK : BWD_BAD_STEP;
}

#define DTYPE_SIZE(T, text) [BWD_##T] = sizeof(bwd_##T),
#define DTYPE_NAME(T, text) [BWD_##T] = text,
static const size_t dtype_sizes[BWD_DTYPE_COUNT] = {BWD_DTYPES(DTYPE_SIZE)};
static const char *const dtype_names[BWD_DTYPE_COUNT] = {BWD_DTYPES(DTYPE_NAME)};

#define DTYPE_IS_FLOAT(T, text)  [BWD_##T] = BWD_FLOAT,
#define DTYPE_IS_DOUBLE(T, text) [BWD_##T] = BWD_DOUBLE,
static const enum bwd_real_type dtype_reals[BWD_DTYPE_COUNT] = {BWD_FLOAT_DTYPES(DTYPE_IS_FLOAT)
                                                                    BWD_DOUBLE_DTYPES(DTYPE_IS_DOUBLE)};

#define FORMAT_ROW(prefix, P, G, S, N) {BWD_##P, BWD_##G, BWD_##S},
static const enum bwd_dtype formats[BWD_FORMAT_COUNT][3] = {BWD_FORMATS(FORMAT_ROW, )};

size_t
bwd_dtype_size(enum bwd_dtype dtype)
{
    return dtype_sizes[dtype];
}

enum bwd_real_type
bwd_dtype_real(enum bwd_dtype dtype)
{
    return dtype_reals[dtype];
}

const char *
bwd_dtype_name(enum bwd_dtype dtype)
{
    return dtype_names[dtype];
}

int
bwd_dtype_find(const char *name)
{
    for (int i = 0; i < BWD_DTYPE_COUNT; i++) {
        if (strcmp(dtype_names[i], name) == 0) {
            return i;
        }
    }
    return -1;
}

int
bwd_format_find(enum bwd_dtype param, enum bwd_dtype grad, enum bwd_dtype state)
{
    for (int i = 0; i < BWD_FORMAT_COUNT; i++) {
        if (formats[i][0] == param && formats[i][1] == grad && formats[i][2] == state) {
            return i;
        }
    }
    return -1;
}

void
bwd_format_dtypes(int format, enum bwd_dtype *param, enum bwd_dtype *grad, enum bwd_dtype *state)
{
    *param = formats[format][0];
    *grad = formats[format][1];
    *state = formats[format][2];
}
