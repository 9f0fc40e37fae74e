/* Chooses the loops for this CPU and drives one pass over contiguous arrays. */
#include "core/dispatch.h"

#include "core/run.h"

extern const bwd_isa bwd_isa_baseline;
#ifdef BWD_BUILT_AVX2
extern const bwd_isa bwd_isa_avx2;
#endif
#ifdef BWD_BUILT_AVX512
extern const bwd_isa bwd_isa_avx512;
#endif

/* Widest first. */
static const bwd_isa *const isas[] = {
#ifdef BWD_BUILT_AVX512
    &bwd_isa_avx512,
#endif
#ifdef BWD_BUILT_AVX2
    &bwd_isa_avx2,
#endif
    &bwd_isa_baseline,
};
enum { ISA_COUNT = sizeof isas / sizeof *isas };

/* __builtin_cpu_supports also asks the operating system whether it saves the wide registers. */
int
bwd_isa_possible(const bwd_isa *isa)
{
#ifdef BWD_BUILT_AVX512
    if (isa == &bwd_isa_avx512) {
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
               __builtin_cpu_supports("fma");
    }
#endif
#ifdef BWD_BUILT_AVX2
    if (isa == &bwd_isa_avx2) {
        return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    }
#endif
    return isa == &bwd_isa_baseline;
}

const bwd_isa *
bwd_isa_at(int index)
{
    return index >= 0 && index < ISA_COUNT ? isas[index] : NULL;
}

const bwd_isa *
bwd_isa_best(void)
{
    int i = 0;
    while (!bwd_isa_possible(isas[i])) {
        i++;
    }
    return isas[i];
}

const bwd_isa *
bwd_isa_by_name(const char *name)
{
    for (int i = 0; i < ISA_COUNT; i++) {
        if (strcmp(isas[i]->name, name) == 0 && bwd_isa_possible(isas[i])) {
            return isas[i];
        }
    }
    return NULL;
}

static void
run_clear(bwd_run *run)
{
    run->in_chunk = 0;
    memset(run->lanes, 0, sizeof run->lanes);
    run->sq_sum = 0.0;
    run->nonfinite = 0;
}

bwd_status
bwd_run_step(bwd_run *run, const bwd_isa *isa, const bwd_job *job)
{
    const bwd_status status = bwd_rule_prepare(job->rule, job->hyper, job->step, &run->scalars);
    if (status != BWD_OK) {
        return status;
    }
    if (job->format < 0 || job->format >= BWD_FORMAT_COUNT) {
        return BWD_BAD_FORMAT;
    }
    run->update = isa->update[job->rule][job->format];
    run->scan = NULL;
    bwd_format_dtypes(job->format, &run->param, &run->grad, &run->state);
    (void)bwd_rule_states(job->rule, &run->state_count);
    run_clear(run);
    return BWD_OK;
}

bwd_status
bwd_run_scan(bwd_run *run, const bwd_isa *isa, enum bwd_dtype dtype)
{
    if ((unsigned)dtype >= BWD_DTYPE_COUNT) {
        return BWD_BAD_FORMAT;
    }
    run->update = NULL;
    run->scan = isa->scan[dtype];
    run->param = run->grad = run->state = dtype;
    run->state_count = 0;
    run_clear(run);
    return BWD_OK;
}

static uint64_t
count_nonfinite_f32(size_t n, const void *grad)
{
    uint64_t count = 0;
    for (size_t i = 0; i < n; i++) {
        count += !isfinite(((const bwd_f32 *)grad)[i]);
    }
    return count;
}

static uint64_t
count_nonfinite_bf16(size_t n, const void *grad)
{
    uint64_t count = 0;
    for (size_t i = 0; i < n; i++) {
        count += (((const bwd_bf16 *)grad)[i] & 0x7f80u) == 0x7f80u;
    }
    return count;
}

#define NONFINITE_CELL(T, text) [BWD_##T] = count_nonfinite_##T,
static uint64_t (*const count_nonfinite[BWD_DTYPE_COUNT])(size_t n, const void *grad) = {BWD_DTYPES(NONFINITE_CELL)};
#undef NONFINITE_CELL

/* The square of a finite float or bfloat16 is finite in double, and no sum of them overflows. So the lanes are finite
 * exactly when every element so far is, and counting costs nothing until there is something to count. */
static int
lanes_finite(const double *lanes)
{
    int finite = 1;
    for (int k = 0; k < BWD_LANES; k++) {
        finite &= isfinite(lanes[k]) != 0;
    }
    return finite;
}

static void
close_chunk(bwd_run *run)
{
    for (int half = BWD_LANES / 2; half > 0; half /= 2) {
        for (int k = 0; k < half; k++) {
            run->lanes[k] += run->lanes[k + half];
        }
    }
    run->sq_sum += run->lanes[0];
    memset(run->lanes, 0, sizeof run->lanes);
    run->in_chunk = 0;
}

void
bwd_run_span(bwd_run *run, size_t n, void *param, const void *grad, void *const *state)
{
    char *p = param;
    const char *g = grad;
    void *st[BWD_MAX_STATES] = {NULL};
    for (int k = 0; k < run->state_count; k++) {
        st[k] = state[k];
    }
    while (n > 0) {
        const size_t room = BWD_CHUNK - run->in_chunk, m = n < room ? n : room;
        if (run->update) {
            run->update(&run->scalars, m, p, g, st, run->lanes);
            p += m * bwd_dtype_size(run->param);
        }
        else {
            run->scan(m, g, run->lanes);
        }
        if (!lanes_finite(run->lanes)) {
            run->nonfinite += count_nonfinite[run->grad](m, g);
        }
        g += m * bwd_dtype_size(run->grad);
        for (int k = 0; k < run->state_count; k++) {
            st[k] = (char *)st[k] + m * bwd_dtype_size(run->state);
        }
        n -= m;
        run->in_chunk += m;
        if (run->in_chunk == BWD_CHUNK) {
            close_chunk(run);
        }
    }
}

void
bwd_run_finish(bwd_run *run, double *sq_sum, uint64_t *nonfinite)
{
    close_chunk(run);
    *sq_sum = run->sq_sum;
    *nonfinite = run->nonfinite;
}

bwd_status
bwd_step(const bwd_isa *isa, bwd_job *job)
{
    bwd_run run;
    const bwd_status status = bwd_run_step(&run, isa, job);
    if (status == BWD_OK) {
        bwd_run_span(&run, job->n, job->param, job->grad, job->state);
        bwd_run_finish(&run, &job->grad_sq_sum, &job->nonfinite);
    }
    return status;
}

bwd_status
bwd_scan(const bwd_isa *isa, enum bwd_dtype dtype, const void *grad, size_t n, double *sq_sum, uint64_t *nonfinite)
{
    bwd_run run;
    const bwd_status status = bwd_run_scan(&run, isa, dtype);
    if (status == BWD_OK) {
        bwd_run_span(&run, n, NULL, grad, NULL);
        bwd_run_finish(&run, sq_sum, nonfinite);
    }
    return status;
}
