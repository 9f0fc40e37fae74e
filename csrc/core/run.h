/* One pass over a gradient, chunk by chunk: what the contiguous and the strided walks, with and without an update, have
 * in common. Private to core. */
#ifndef BWD_RUN_H
#define BWD_RUN_H

#include "core/dispatch.h"

/* What is decided before the pass; threads only read it. */
typedef struct bwd_run {
    bwd_update_fn update; /* NULL: scan only */
    bwd_scan_fn scan;
    bwd_scalars scalars;
    enum bwd_dtype param, grad, state;
    int state_count;
} bwd_run;

/* What has been seen of one chunk of the gradient. */
typedef struct bwd_seen {
    double lanes[BWD_LANES];
    uint64_t nonfinite;
} bwd_seen;

/* Walks elements first .. first + n - 1, which lie in one chunk, in spans; `arrays` is what bwd_run_pass was given. */
typedef void (*bwd_walk_fn)(const bwd_run *run, const void *arrays, size_t first, size_t n, bwd_seen *seen);

bwd_status bwd_run_step(bwd_run *run, const bwd_isa *isa, const bwd_job *job);
bwd_status bwd_run_scan(bwd_run *run, const bwd_isa *isa, enum bwd_dtype dtype);
/* Every span of a chunk but the last holds a multiple of BWD_LANES elements. param and state are not read when
 * scanning.
 */
void bwd_run_span(const bwd_run *run, size_t n, void *param, const void *grad, void *const *state, bwd_seen *seen);
/* The pass over n elements, chunks given to the pool's threads where there is enough for them. */
void bwd_run_pass(const bwd_run *run, bwd_pool *pool, size_t n, bwd_walk_fn walk, const void *arrays, double *sq_sum,
                  uint64_t *nonfinite);
/* The same over arrays whose elements lie side by side; the pointers of `job` alone are read. */
void bwd_run_flat(const bwd_run *run, bwd_pool *pool, const bwd_job *job, double *sq_sum, uint64_t *nonfinite);

uint64_t bwd_count_nonfinite(enum bwd_dtype dtype, size_t n, const void *grad);

#endif
