/* AdamW: Adam with decoupled weight decay.
 *
 * Loshchilov & Hutter, "Decoupled Weight Decay Regularization", ICLR 2019, algorithm 2, as torch.optim.AdamW has it:
 *
 *     exp_avg    <- beta1 * exp_avg    + (1 - beta1) * grad
 *     exp_avg_sq <- beta2 * exp_avg_sq + (1 - beta2) * grad^2
 *     denom      <- sqrt(exp_avg_sq) / sqrt(1 - beta2^step) + eps
 *     param      <- param - lr * weight_decay * param - lr / (1 - beta1^step) * exp_avg / denom
 *
 * maximize turns the sign of grad. grad^2 does not see it, so it is folded into the factor of grad in exp_avg.
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
    bwd_real beta1, beta1_rest; /* beta1 = the nearest float + what that rounding lost */
    bwd_real grad_weight;       /* 1 - beta1, negative to maximize */
    bwd_real beta2, grad_sq_weight;
    bwd_real denom_scale, eps; /* 1 / sqrt(1 - beta2^step) */
    bwd_real decay, step_size; /* lr * weight_decay, lr / (1 - beta1^step) */
} bwd_adamw_scalars;

/* In double, once per update: 1 - beta and the bias corrections lose most of their digits in float. */
BWD_INLINE bwd_adamw_scalars
bwd_adamw_prepare(const double *hyper, double step)
{
    const double lr = hyper[0], beta1 = hyper[1], beta2 = hyper[2];
    const double eps = hyper[3], weight_decay = hyper[4], maximize = hyper[5];
    bwd_adamw_scalars s;
    s.beta1 = (bwd_real)beta1;
    s.beta1_rest = (bwd_real)(beta1 - (double)s.beta1);
    s.grad_weight = (bwd_real)((1.0 - 2.0 * maximize) * (1.0 - beta1));
    s.beta2 = (bwd_real)beta2;
    s.grad_sq_weight = (bwd_real)(1.0 - beta2);
    s.denom_scale = (bwd_real)(1.0 / sqrt(1.0 - pow(beta2, step)));
    s.eps = (bwd_real)eps;
    s.decay = (bwd_real)(lr * weight_decay);
    s.step_size = (bwd_real)(lr / (1.0 - pow(beta1, step)));
    return s;
}

/* Where one term is much larger than the others it enters last and unrounded, so its own rounding is the only one of
 * that size: beta1 is taken to full precision because float(0.9) alone costs 0.4 ULP of exp_avg, and the decay is
 * subtracted instead of multiplying by 1 - decay, which costs 0.5 ULP of param. */
BWD_INLINE void
bwd_adamw_update(bwd_real *param, bwd_real grad, bwd_real *state, const bwd_adamw_scalars *s)
{
    const bwd_real exp_avg = bwd_fma(s->beta1, state[0], bwd_fma(s->beta1_rest, state[0], s->grad_weight * grad));
    const bwd_real exp_avg_sq = bwd_fma(s->beta2, state[1], s->grad_sq_weight * grad * grad);
    const bwd_real denom = bwd_fma(bwd_sqrt(exp_avg_sq), s->denom_scale, s->eps);
    *param -= bwd_fma(s->decay, *param, s->step_size * (exp_avg / denom));
    state[0] = exp_avg;
    state[1] = exp_avg_sq;
}

#endif
