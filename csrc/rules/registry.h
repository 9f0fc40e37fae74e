/* The one table of rules. A new optimizer is its header, an include and a row here. */
#ifndef BWD_REGISTRY_H
#define BWD_REGISTRY_H

#include "rules/adam.h"
#include "rules/adamw.h"

/* name, states, hyper-parameters: X(name) of each state in order; X(name, default, range) of each hyper-parameter. */
/* clang-format off */
#define BWD_RULES(X)                                            \
    X(adamw,         BWD_MOMENTS_STATES,     BWD_ADAMW_HYPERS)  \
    X(adamw_amsgrad, BWD_MOMENTS_MAX_STATES, BWD_ADAMW_HYPERS)  \
    X(adam,          BWD_MOMENTS_STATES,     BWD_ADAM_HYPERS)   \
    X(adam_amsgrad,  BWD_MOMENTS_MAX_STATES, BWD_ADAM_HYPERS)
/* clang-format on */

#define BWD_RULE_ID(rule, states, hypers) BWD_RULE_##rule,
enum bwd_rule { BWD_RULES(BWD_RULE_ID) BWD_RULE_COUNT };
#undef BWD_RULE_ID

#define BWD_COUNT_STATE(name)                 +1
#define BWD_STATE_COUNT(rule, states, hypers) BWD_##rule##_STATE_COUNT = 0 states(BWD_COUNT_STATE),
enum { BWD_RULES(BWD_STATE_COUNT) };
#undef BWD_STATE_COUNT

/* Room for the prepared scalars of any rule, in either real type. Only the loops of that type look inside. */
typedef struct bwd_scalars {
    double room[16];
} bwd_scalars;

#endif
