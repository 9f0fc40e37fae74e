/* One pass over a gradient, fed span by span: what the contiguous and the strided walks, with and without an update,
 * have in common. Private to core. */
#ifndef BWD_RUN_H
#define BWD_RUN_H

#include "core/dispatch.h"

typedef struct bwd_run {
    bwd_update_fn update; /* NULL: scan only */
    bwd_scan_fn scan;
    bwd_scalars scalars;
    enum bwd_dtype param, grad, state;
    int state_count;
    size_t in_chunk; /* elements that the lanes hold */
    double lanes[BWD_LANES];
    double sq_sum;
    uint64_t nonfinite;
} bwd_run;

bwd_status bwd_run_step(bwd_run *run, const bwd_isa *isa, const bwd_job *job);
bwd_status bwd_run_scan(bwd_run *run, const bwd_isa *isa, enum bwd_dtype dtype);
/* Every span but the last holds a multiple of BWD_LANES elements. param and state are not read when scanning. */
void bwd_run_span(bwd_run *run, size_t n, void *param, const void *grad, void *const *state);
void bwd_run_finish(bwd_run *run, double *sq_sum, uint64_t *nonfinite);

#endif
