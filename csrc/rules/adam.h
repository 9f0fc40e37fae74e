/* Adam: weight decay is coupled, the gradient of an L2 penalty.
 *
 * Kingma & Ba, "Adam: A Method for Stochastic Optimization", ICLR 2015, algorithm 1, as torch.optim.Adam has it:
 *
 *     grad  <- grad + weight_decay * param
 *     the moments and the quotient of rules/moments.h
 *     param <- param - quotient
 */
#ifndef BWD_ADAM_H
#define BWD_ADAM_H

#include "rules/moments.h"

#define BWD_ADAM_HYPERS(X) BWD_MOMENTS_HYPERS(X, 0.0)

typedef struct bwd_adam_scalars {
    bwd_moments moments;
    bwd_real weight_decay;
} bwd_adam_scalars;
typedef bwd_adam_scalars bwd_adam_amsgrad_scalars;

BWD_HOST bwd_adam_scalars
bwd_adam_prepare(const double *hyper, double step)
{
    bwd_adam_scalars s;
    s.moments = bwd_moments_prepare(hyper, step);
    s.weight_decay = (bwd_real)hyper[BWD_WEIGHT_DECAY];
    return s;
}

/* maximize turns the sign of the gradient but not of the penalty. The factor is rounded, as the one of exp_avg is:
 * torch rounds both, their errors often cancel, and a better one of the two alone made the mean error a quarter larger.
 */
BWD_INLINE bwd_real
bwd_adam_penalised(bwd_real param, bwd_real grad, const bwd_adam_scalars *s)
{
    return bwd_fma(s->weight_decay, param, bwd_negate_if(s->moments.ascend, grad));
}

BWD_INLINE void
bwd_adam_update(bwd_real *param, bwd_real grad, bwd_real *state, const bwd_adam_scalars *s)
{
    bwd_moments_update(bwd_adam_penalised(*param, grad, s), &state[0], &state[1], &s->moments);
    *param -= bwd_moments_quotient(state[0], state[1], &s->moments);
}

BWD_HOST bwd_adam_amsgrad_scalars
bwd_adam_amsgrad_prepare(const double *hyper, double step)
{
    return bwd_adam_prepare(hyper, step);
}

BWD_INLINE void
bwd_adam_amsgrad_update(bwd_real *param, bwd_real grad, bwd_real *state, const bwd_adam_amsgrad_scalars *s)
{
    bwd_moments_update(bwd_adam_penalised(*param, grad, s), &state[0], &state[1], &s->moments);
    state[2] = bwd_max(state[1], state[2]);
    *param -= bwd_moments_quotient(state[0], state[2], &s->moments);
}

#endif
