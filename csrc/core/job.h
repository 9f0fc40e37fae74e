/* The work order that crosses from whoever holds the arrays to whoever steps them.
 * Plain C: no Python, no CUDA, no ownership. */
#ifndef BWD_JOB_H
#define BWD_JOB_H

#include <stddef.h>
#include <stdint.h>

#include "rules/rule.h"

/* One parameter's update. The caller owns every pointer, and the arrays must not overlap. */
typedef struct bwd_job {
    size_t n; /* elements; 0 is fine */
    void *param;
    const void *grad;
    void *state[BWD_MAX_STATES];  /* in the rule's order, for adamw exp_avg, exp_avg_sq */
    double hyper[BWD_MAX_HYPERS]; /* in the rule's order, for adamw lr, beta1, beta2, eps, weight_decay, maximize */
    double step;                  /* the step being taken: 1 for the first */
    int rule;                     /* enum bwd_rule */
    int format;                   /* enum bwd_format */
    double grad_sq_sum;           /* out: sum of grad * grad; its bits depend on neither ISA nor thread count */
    uint64_t nonfinite;           /* out: how many elements of grad are inf or nan */
} bwd_job;

/* For arrays of one shape whose memory layouts differ. Strides are in elements and may be 0 (grad) or negative. */
typedef struct bwd_layout {
    int ndim;
    const int64_t *shape;
    const int64_t *param_strides, *grad_strides, *state_strides[BWD_MAX_STATES];
} bwd_layout;

#endif
