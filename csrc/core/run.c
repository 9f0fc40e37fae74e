/* Drives one pass: chunks to threads, their sums in order. */
#include "core/run.h"

/* A thread is called only when each has at least this many elements: waking one takes as long as stepping some
 * thousands (docs/design.md, section 6). */
enum { PER_THREAD = 1 << 17 };
/* Chunks whose sums are kept at a time, on the stack. */
enum { WINDOW = 512 };

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
    return BWD_OK;
}

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

void
bwd_run_span(const bwd_run *run, size_t n, void *param, const void *grad, void *const *state, bwd_seen *seen)
{
    if (run->update) {
        run->update(&run->scalars, n, param, grad, state, seen->lanes);
    }
    else {
        run->scan(n, grad, seen->lanes);
    }
    if (!lanes_finite(seen->lanes)) {
        seen->nonfinite += bwd_count_nonfinite(run->grad, n, grad);
    }
}

/* The chunks of one window. */
typedef struct window {
    const bwd_run *run;
    bwd_walk_fn walk;
    const void *arrays;
    size_t first, n;
    struct {
        double sq_sum;
        uint64_t nonfinite;
    } chunk[WINDOW];
} window;

static void
run_chunk(void *work, size_t part)
{
    window *w = work;
    bwd_seen seen = {{0.0}, 0};
    const size_t at = part * BWD_CHUNK, left = w->n - at;
    w->walk(w->run, w->arrays, w->first + at, left < BWD_CHUNK ? left : BWD_CHUNK, &seen);
    for (int half = BWD_LANES / 2; half > 0; half /= 2) {
        for (int k = 0; k < half; k++) {
            seen.lanes[k] += seen.lanes[k + half];
        }
    }
    w->chunk[part].sq_sum = seen.lanes[0];
    w->chunk[part].nonfinite = seen.nonfinite;
}

void
bwd_run_pass(const bwd_run *run, bwd_pool *pool, size_t n, bwd_walk_fn walk, const void *arrays, double *sq_sum,
             uint64_t *nonfinite)
{
    window w;
    w.run = run;
    w.walk = walk;
    w.arrays = arrays;
    *sq_sum = 0.0;
    *nonfinite = 0;
    for (w.first = 0; w.first < n; w.first += w.n) {
        const size_t left = n - w.first, most = (size_t)WINDOW * BWD_CHUNK;
        w.n = left < most ? left : most;
        const size_t chunks = (w.n + BWD_CHUNK - 1) / BWD_CHUNK;
        bwd_pool_run(pool, w.n / PER_THREAD, chunks, run_chunk, &w);
        for (size_t k = 0; k < chunks; k++) {
            *sq_sum += w.chunk[k].sq_sum;
            *nonfinite += w.chunk[k].nonfinite;
        }
    }
}

static void
walk_flat(const bwd_run *run, const void *arrays, size_t first, size_t n, bwd_seen *seen)
{
    const bwd_job *job = arrays;
    void *state[BWD_MAX_STATES] = {NULL};
    for (int k = 0; k < run->state_count; k++) {
        state[k] = (char *)job->state[k] + first * bwd_dtype_size(run->state);
    }
    char *param = run->update ? (char *)job->param + first * bwd_dtype_size(run->param) : NULL;
    bwd_run_span(run, n, param, (const char *)job->grad + first * bwd_dtype_size(run->grad), state, seen);
}

void
bwd_run_flat(const bwd_run *run, bwd_pool *pool, const bwd_job *job, double *sq_sum, uint64_t *nonfinite)
{
    bwd_run_pass(run, pool, job->n, walk_flat, job, sq_sum, nonfinite);
}

bwd_status
bwd_step(const bwd_isa *isa, bwd_pool *pool, bwd_job *job)
{
    bwd_run run;
    const bwd_status status = bwd_run_step(&run, isa, job);
    if (status == BWD_OK) {
        bwd_run_flat(&run, pool, job, &job->grad_sq_sum, &job->nonfinite);
    }
    return status;
}

bwd_status
bwd_scan(const bwd_isa *isa, bwd_pool *pool, enum bwd_dtype dtype, const void *grad, size_t n, double *sq_sum,
         uint64_t *nonfinite)
{
    bwd_run run;
    const bwd_status status = bwd_run_scan(&run, isa, dtype);
    if (status == BWD_OK) {
        const bwd_job job = {.n = n, .grad = grad};
        bwd_run_flat(&run, pool, &job, sq_sum, nonfinite);
    }
    return status;
}
