/* What the rules of the Adam family share: the two moments, their bias corrections, and the quotient that is the step.
 *
 * Kingma & Ba, "Adam: A Method for Stochastic Optimization", ICLR 2015, algorithm 1, with eps outside the root as torch
 * has it:
 *
 *     exp_avg    <- beta1 * exp_avg    + (1 - beta1) * grad
 *     exp_avg_sq <- beta2 * exp_avg_sq + (1 - beta2) * grad^2
 *     denom      <- sqrt(exp_avg_sq) / sqrt(1 - beta2^step) + eps
 *     quotient   <- lr / (1 - beta1^step) * exp_avg / denom
 *
 * maximize turns the sign of grad. With amsgrad (Reddi, Kale & Kumar, "On the Convergence of Adam and Beyond", ICLR
 * 2018) the denominator is taken from the largest exp_avg_sq so far.
 */
#ifndef BWD_MOMENTS_H
#define BWD_MOMENTS_H

#include "rules/rule.h"

/* clang-format off */
#define BWD_MOMENTS_STATES(X) \
    X(exp_avg)                \
    X(exp_avg_sq)

#define BWD_MOMENTS_MAX_STATES(X) \
    BWD_MOMENTS_STATES(X)         \
    X(max_exp_avg_sq)

#define BWD_MOMENTS_HYPERS(X, weight_decay_default)       \
    X(lr,           1e-3,  BWD_NON_NEGATIVE)              \
    X(beta1,        0.9,   BWD_BELOW_ONE)                 \
    X(beta2,        0.999, BWD_BELOW_ONE)                 \
    X(eps,          1e-8,  BWD_NON_NEGATIVE)              \
    X(weight_decay, weight_decay_default, BWD_NON_NEGATIVE) \
    X(maximize,     0.0,   BWD_SWITCH)
/* clang-format on */
enum { BWD_LR, BWD_BETA1, BWD_BETA2, BWD_EPS, BWD_WEIGHT_DECAY, BWD_MAXIMIZE };

typedef struct bwd_moments {
    bwd_mask ascend, near_grad;
    bwd_real grad_weight; /* of grad - exp_avg, to be added to the nearer of the two */
    bwd_split beta2, grad_sq_weight;
    bwd_split denom_scale; /* 1 / sqrt(1 - beta2^step), over the step size lr / (1 - beta1^step) */
    bwd_split eps;         /* over the step size */
} bwd_moments;

BWD_HOST bwd_moments
bwd_moments_prepare(const double *hyper, double step)
{
    const double lr = hyper[BWD_LR], beta1 = hyper[BWD_BETA1], beta2 = hyper[BWD_BETA2], eps = hyper[BWD_EPS];
    const double step_size = lr / (1.0 - pow(beta1, step)), bias_correction2 = sqrt(1.0 - pow(beta2, step));
    const int near_grad = 1.0 - beta1 >= 0.5;
    bwd_moments s;
    s.ascend = bwd_mask_of(hyper[BWD_MAXIMIZE] != 0.0);
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
    return s;
}

/* exp_avg moves towards grad by interpolation, from the nearer of the two as torch's lerp does: a product with
 * float(0.9) would cost 0.4 ULP at every step, always in one direction. Elsewhere no factor is rounded to bwd_real
 * alone, the larger term enters each sum last, and what is left are the roundings of the sums and of the quotient.
 * grad_sq_weight * grad * grad is taken from the left: grad * grad overflows first. */
BWD_INLINE void
bwd_moments_update(bwd_real g, bwd_real *exp_avg, bwd_real *exp_avg_sq, const bwd_moments *s)
{
    const bwd_real weighted = bwd_split_scale(s->grad_sq_weight, g);
    *exp_avg = bwd_fma(s->grad_weight, g - *exp_avg, bwd_pick(s->near_grad, g, *exp_avg));
    *exp_avg_sq = bwd_fma(s->beta2.high, *exp_avg_sq, bwd_fma(weighted, g, s->beta2.low * *exp_avg_sq));
}

BWD_INLINE bwd_real
bwd_moments_quotient(bwd_real exp_avg, bwd_real exp_avg_sq, const bwd_moments *s)
{
    const bwd_real denom = s->eps.high + bwd_split_fma(s->denom_scale, bwd_sqrt(exp_avg_sq), s->eps.low);
    return exp_avg / denom;
}

#endif
