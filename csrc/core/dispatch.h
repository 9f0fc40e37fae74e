/* What the rest of the program calls: the rules by name, the instruction sets of this CPU, and the steps. */
#ifndef BWD_DISPATCH_H
#define BWD_DISPATCH_H

#include "core/job.h"
#include "core/layout.h"
#include "core/pool.h"
#include "core/status.h"
#include "rules/registry.h"

/* The sum of squares runs in 16 lanes of doubles, element i of a chunk in lane i % 16, folded by halves at the end of
 * the chunk; the chunks are added in order. So its bits depend on neither vector width nor tile, and chunks can be
 * given to threads. */
enum { BWD_LANES = 16, BWD_CHUNK = 16384 };

/* Steps n elements and adds the squares of grad to the lanes; n need not be a multiple of anything. */
typedef void (*bwd_update_fn)(const bwd_scalars *scalars, size_t n, void *param, const void *grad, void *const *state,
                              double *lanes);
/* Adds the squares of grad to the lanes and does nothing else. */
typedef void (*bwd_scan_fn)(size_t n, const void *grad, double *lanes);
/* The scalars of one step, from hyper-parameters that are in range. */
typedef void (*bwd_prepare_fn)(const double *hyper, double step, bwd_scalars *scalars);

/* One instruction set's loops in one real type; NULL in the cells of the other. */
typedef struct bwd_loops {
    bwd_prepare_fn prepare[BWD_RULE_COUNT];
    bwd_update_fn update[BWD_RULE_COUNT][BWD_FORMAT_COUNT];
    bwd_scan_fn scan[BWD_DTYPE_COUNT];
} bwd_loops;

typedef struct bwd_isa {
    const char *name;
    const bwd_loops *loops[BWD_REAL_TYPES];
} bwd_isa;

/* The widest that this CPU and its operating system allow. */
const bwd_isa *bwd_isa_best(void);
/* NULL: unknown, not built, or not possible here. */
const bwd_isa *bwd_isa_by_name(const char *name);
/* Every one that was built, widest first; NULL past the end. */
const bwd_isa *bwd_isa_at(int index);
int bwd_isa_possible(const bwd_isa *isa);

/* Metadata of the rules. A rule is named by its index; NULL or -1 says there is none. */
int bwd_rule_find(const char *name);
const char *bwd_rule_name(int rule);
const char *const *bwd_rule_states(int rule, int *count);
const char *const *bwd_rule_hypers(int rule, int *count);
const double *bwd_rule_defaults(int rule, int *count);
/* The first hyper-parameter that is out of its range, or -1 when all are right. */
int bwd_rule_bad_hyper(int rule, const double *hyper);
/* What that hyper-parameter may be, as the end of a sentence: "a finite number >= 0". */
const char *bwd_rule_hyper_range(int rule, int index);
/* Whether it is one of 0 and 1. */
int bwd_rule_hyper_is_switch(int rule, int index);
/* Whether there is such a rule and it can take that step with these hyper-parameters. */
bwd_status bwd_rule_check(int rule, const double *hyper, double step);

/* The storage formats as data. */
/* The row that holds these three, or -1. */
int bwd_format_find(enum bwd_dtype param, enum bwd_dtype grad, enum bwd_dtype state);
/* A row's three dtypes; `format` must be a row. */
void bwd_format_dtypes(int format, enum bwd_dtype *param, enum bwd_dtype *grad, enum bwd_dtype *state);
size_t bwd_dtype_size(enum bwd_dtype dtype);
const char *bwd_dtype_name(enum bwd_dtype dtype);
/* The dtype of that name, or -1. */
int bwd_dtype_find(const char *name);
/* In which real type elements of that dtype are computed with. */
enum bwd_real_type bwd_dtype_real(enum bwd_dtype dtype);

/* Steps one parameter and fills job->grad_sq_sum and job->nonfinite. Nothing is written unless the answer is BWD_OK.
 * `pool` lends its threads where the work is long enough; NULL: this thread alone. The same bits for every isa and
 * every number of threads. Two callers must not step one parameter. */
bwd_status bwd_step(const bwd_isa *isa, bwd_pool *pool, bwd_job *job);
/* The same in the order of the shape's last index, through tiles that are gathered and scattered. */
bwd_status bwd_step_strided(const bwd_isa *isa, bwd_pool *pool, bwd_job *job, const bwd_layout *layout);
/* The sum and the count alone, as bwd_step would give them; nothing is stepped. */
bwd_status bwd_scan(const bwd_isa *isa, bwd_pool *pool, enum bwd_dtype dtype, const void *grad, size_t n,
                    double *sq_sum, uint64_t *nonfinite);
bwd_status bwd_scan_strided(const bwd_isa *isa, bwd_pool *pool, enum bwd_dtype dtype, const void *grad, int ndim,
                            const int64_t *shape, const int64_t *strides, double *sq_sum, uint64_t *nonfinite);

#endif
