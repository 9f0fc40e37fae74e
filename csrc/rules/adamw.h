/* AdamW: Adam with decoupled weight decay.
 *
 * Loshchilov & Hutter, "Decoupled Weight Decay Regularization", ICLR 2019, algorithm 2, as torch.optim.AdamW has it:
 *
 *     exp_avg    <- beta1 * exp_avg    + (1 - beta1) * grad
 *     exp_avg_sq <- beta2 * exp_avg_sq + (1 - beta2) * grad^2
 *     denom      <- sqrt(exp_avg_sq) / sqrt(1 - beta2^step) + eps
 *     param      <- param - lr * weight_decay * param - lr / (1 - beta1^step) * exp_avg / denom
 *
 * maximize turns the sign of grad.
 */
#ifndef BWD_ADAMW_H
#define BWD_ADAMW_H

#include "rules/rule.h"

/* clang-format off */
#define BWD_ADAMW_STATES(X) \
    X(exp_avg)              \
    X(exp_avg_sq)

#define BWD_ADAMW_HYPERS(X)                   \
    X(lr,           1e-3,  BWD_NON_NEGATIVE)  \
    X(beta1,        0.9,   BWD_BELOW_ONE)     \
    X(beta2,        0.999, BWD_BELOW_ONE)     \
    X(eps,          1e-8,  BWD_NON_NEGATIVE)  \
    X(weight_decay, 1e-2,  BWD_NON_NEGATIVE)  \
    X(maximize,     0.0,   BWD_SWITCH)
/* clang-format on */

typedef struct bwd_adamw_scalars {
    bwd_mask ascend, near_grad;
    bwd_real grad_weight; /* of grad - exp_avg, to be added to the nearer of the two */
    bwd_split beta2, grad_sq_weight;
    bwd_split denom_scale; /* 1 / sqrt(1 - beta2^step), over the step size lr / (1 - beta1^step) */
    bwd_split eps;         /* over the step size */
    bwd_split keep;        /* 1 - lr * weight_decay */
} bwd_adamw_scalars;

BWD_INLINE bwd_adamw_scalars
bwd_adamw_prepare(const double *hyper, double step)
{
    const double lr = hyper[0], beta1 = hyper[1], beta2 = hyper[2];
    const double eps = hyper[3], weight_decay = hyper[4], maximize = hyper[5];
    const double step_size = lr / (1.0 - pow(beta1, step)), bias_correction2 = sqrt(1.0 - pow(beta2, step));
    const int near_grad = 1.0 - beta1 >= 0.5;
    bwd_adamw_scalars s;
    s.ascend = bwd_mask_of(maximize != 0.0);
    s.near_grad = bwd_mask_of(near_grad);
    s.grad_weight = (bwd_real)(near_grad ? -beta1 : 1.0 - beta1);
    s.beta2 = bwd_split_of(beta2);
    s.grad_sq_weight = bwd_split_of(1.0 - beta2);
    if (step_size > 0.0) {
        s.denom_scale = bwd_split_of(fmin(1.0 / bias_correction2 / step_size, BWD_REAL_MAX));
        s.eps = bwd_split_of(fmin(eps / step_size, BWD_REAL_MAX));
    }
    else { /* lr = 0: the states move, and exp_avg / inf leaves param alone */
        s.denom_scale = bwd_split_of(1.0);
        s.eps = bwd_split_of(INFINITY);
    }
    s.keep = bwd_split_of(1.0 - lr * weight_decay);
    return s;
}

/* exp_avg moves towards grad by interpolation, from the nearer of the two as torch's lerp does: a product with
 * float(0.9) would cost 0.4 ULP at every step, always in one direction. Elsewhere no factor is rounded to bwd_real
 * alone, the larger term enters each sum last, and what is left are the roundings of the sums and of the quotient.
 * grad_sq_weight * grad * grad is taken from the left: grad * grad overflows first. */
BWD_INLINE void
bwd_adamw_update(bwd_real *param, bwd_real grad, bwd_real *state, const bwd_adamw_scalars *s)
{
    const bwd_real g = bwd_negate_if(s->ascend, grad);
    const bwd_real exp_avg = bwd_fma(s->grad_weight, g - state[0], bwd_pick(s->near_grad, g, state[0]));
    const bwd_real weighted = bwd_split_scale(s->grad_sq_weight, g);
    const bwd_real exp_avg_sq = bwd_fma(s->beta2.high, state[1], bwd_fma(weighted, g, s->beta2.low * state[1]));
    const bwd_real denom = s->eps.high + bwd_split_fma(s->denom_scale, bwd_sqrt(exp_avg_sq), s->eps.low);
    *param = bwd_split_fma(s->keep, *param, -(exp_avg / denom));
    state[0] = exp_avg;
    state[1] = exp_avg_sq;
}

#endif
