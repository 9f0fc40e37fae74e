/* AdamW: Adam with decoupled weight decay.
 *
 * Loshchilov & Hutter, "Decoupled Weight Decay Regularization", ICLR 2019, algorithm 2, as torch.optim.AdamW has it:
 *
 *     the moments and the quotient of rules/moments.h
 *     param <- param - lr * weight_decay * param - quotient
 */
#ifndef BWD_ADAMW_H
#define BWD_ADAMW_H

#include "rules/moments.h"

#define BWD_ADAMW_HYPERS(X) BWD_MOMENTS_HYPERS(X, 1e-2)

typedef struct bwd_adamw_scalars {
    bwd_moments moments;
    bwd_split keep; /* 1 - lr * weight_decay */
} bwd_adamw_scalars;
typedef bwd_adamw_scalars bwd_adamw_amsgrad_scalars;

BWD_HOST bwd_adamw_scalars
bwd_adamw_prepare(const double *hyper, double step)
{
    bwd_adamw_scalars s;
    s.moments = bwd_moments_prepare(hyper, step);
    s.keep = bwd_split_of(1.0 - hyper[BWD_LR] * hyper[BWD_WEIGHT_DECAY]);
    return s;
}

BWD_INLINE void
bwd_adamw_update(bwd_real *param, bwd_real grad, bwd_real *state, const bwd_adamw_scalars *s)
{
    bwd_moments_update(bwd_negate_if(s->moments.ascend, grad), &state[0], &state[1], &s->moments);
    *param = bwd_split_fma(s->keep, *param, -bwd_moments_quotient(state[0], state[1], &s->moments));
}

BWD_HOST bwd_adamw_amsgrad_scalars
bwd_adamw_amsgrad_prepare(const double *hyper, double step)
{
    return bwd_adamw_prepare(hyper, step);
}

BWD_INLINE void
bwd_adamw_amsgrad_update(bwd_real *param, bwd_real grad, bwd_real *state, const bwd_adamw_amsgrad_scalars *s)
{
    bwd_moments_update(bwd_negate_if(s->moments.ascend, grad), &state[0], &state[1], &s->moments);
    state[2] = bwd_max(state[1], state[2]);
    *param = bwd_split_fma(s->keep, *param, -bwd_moments_quotient(state[0], state[2], &s->moments));
}

#endif
