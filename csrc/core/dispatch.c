/* Chooses the loops for this CPU and drives one pass over contiguous arrays. */
#include "core/dispatch.h"

#include "core/run.h"

/* Widest first; baseline is always there. */
#ifdef BWD_BUILT_AVX2
#define AVX2(X) X(avx2)
#else
#define AVX2(X)
#endif
#ifdef BWD_BUILT_AVX512
#define AVX512(X) X(avx512)
#else
#define AVX512(X)
#endif
#define BUILT_ISAS(X)      AVX512(X) AVX2(X) X(baseline)

#define DECLARE_LOOPS(isa) extern const bwd_loops bwd_loops_##isa##_float, bwd_loops_##isa##_double;
BUILT_ISAS(DECLARE_LOOPS)

#define ISA_ID(isa) ISA_##isa,
enum { BUILT_ISAS(ISA_ID) ISA_COUNT };
#define ISA_ROW(isa) {#isa, {[BWD_FLOAT] = &bwd_loops_##isa##_float, [BWD_DOUBLE] = &bwd_loops_##isa##_double}},
static const bwd_isa isas[ISA_COUNT] = {BUILT_ISAS(ISA_ROW)};

/* __builtin_cpu_supports also asks the operating system whether it saves the wide registers. */
int
bwd_isa_possible(const bwd_isa *isa)
{
#ifdef BWD_BUILT_AVX512
    if (isa == &isas[ISA_avx512]) {
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
               __builtin_cpu_supports("fma");
    }
#endif
#ifdef BWD_BUILT_AVX2
    if (isa == &isas[ISA_avx2]) {
        return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    }
#endif
    return isa == &isas[ISA_baseline];
}

const bwd_isa *
bwd_isa_at(int index)
{
    return index >= 0 && index < ISA_COUNT ? &isas[index] : NULL;
}

const bwd_isa *
bwd_isa_best(void)
{
    int i = 0;
    while (!bwd_isa_possible(&isas[i])) {
        i++;
    }
    return &isas[i];
}

const bwd_isa *
bwd_isa_by_name(const char *name)
{
    for (int i = 0; i < ISA_COUNT; i++) {
        if (strcmp(isas[i].name, name) == 0 && bwd_isa_possible(&isas[i])) {
            return &isas[i];
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
    const bwd_status status = bwd_rule_check(job->rule, job->hyper, job->step);
    if (status != BWD_OK) {
        return status;
    }
    if (job->format < 0 || job->format >= BWD_FORMAT_COUNT) {
        return BWD_BAD_FORMAT;
    }
    bwd_format_dtypes(job->format, &run->param, &run->grad, &run->state);
    const bwd_loops *loops = isa->loops[bwd_dtype_real(run->param)];
    loops->prepare[job->rule](job->hyper, job->step, &run->scalars);
    run->update = loops->update[job->rule][job->format];
    run->scan = NULL;
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
    run->scan = isa->loops[bwd_dtype_real(dtype)]->scan[dtype];
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

static uint64_t
count_nonfinite_f16(size_t n, const void *grad)
{
    uint64_t count = 0;
    for (size_t i = 0; i < n; i++) {
        count += (((const bwd_f16 *)grad)[i] & 0x7c00u) == 0x7c00u;
    }
    return count;
}

static uint64_t
count_nonfinite_f64(size_t n, const void *grad)
{
    uint64_t count = 0;
    for (size_t i = 0; i < n; i++) {
        count += !isfinite(((const bwd_f64 *)grad)[i]);
    }
    return count;
}

#define NONFINITE_CELL(T, text) [BWD_##T] = count_nonfinite_##T,
static uint64_t (*const count_nonfinite[BWD_DTYPE_COUNT])(size_t n, const void *grad) = {BWD_DTYPES(NONFINITE_CELL)};
#undef NONFINITE_CELL

/* An inf or NaN never leaves the lane that it entered, so finite lanes say that there is nothing to count, and counting
 * costs nothing until there is. Of doubles alone, finite ones can make a lane overflow: then the count is still right,
 * and the sum is inf. */
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
