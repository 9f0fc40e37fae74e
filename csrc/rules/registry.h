/* The one table of rules. A new optimizer is its header, an include and a row here. */
#ifndef BWD_REGISTRY_H
#define BWD_REGISTRY_H

#include "rules/adamw.h"

/* name, states, hyper-parameters: X(name) of each state in order; X(name, default, range) of each hyper-parameter. */
#define BWD_RULES(X)                      X(adamw, BWD_ADAMW_STATES, BWD_ADAMW_HYPERS)

#define BWD_RULE_ID(rule, states, hypers) BWD_RULE_##rule,
enum bwd_rule { BWD_RULES(BWD_RULE_ID) BWD_RULE_COUNT };
#undef BWD_RULE_ID

#define BWD_COUNT_STATE(name)                 +1
#define BWD_STATE_COUNT(rule, states, hypers) BWD_##rule##_STATE_COUNT = 0 states(BWD_COUNT_STATE),
enum { BWD_RULES(BWD_STATE_COUNT) };
#undef BWD_STATE_COUNT

/* Whatever rule it is for, one object holds its prepared scalars. */
#define BWD_SCALARS_OF(rule, states, hypers) bwd_##rule##_scalars rule;
typedef union bwd_scalars {
    BWD_RULES(BWD_SCALARS_OF)
} bwd_scalars;
#undef BWD_SCALARS_OF

#endif
