/* What every rule is written in: one real type, a fused multiply-add, a square root, and nothing else.
 * A rule knows no storage format, no instruction set, no thread and no Python. */
#ifndef BWD_RULE_H
#define BWD_RULE_H

#include <math.h>

#ifdef __CUDACC__
#define BWD_INLINE static __host__ __device__ __forceinline__
#else
#define BWD_INLINE static inline
#endif

/* The largest rule decides; a job carries arrays of these sizes. */
enum { BWD_MAX_STATES = 3, BWD_MAX_HYPERS = 8 };

/* What a hyper-parameter may be. Every one is finite and fits a float. */
typedef enum bwd_range {
    BWD_NON_NEGATIVE, /* x >= 0 */
    BWD_BELOW_ONE,    /* 0 <= x < 1 */
    BWD_SWITCH        /* 0 or 1 */
} bwd_range;

typedef float bwd_real;

/* One rounding. Written where accuracy wants it; the compiler contracts nothing on its own, so that the bits do not
 * depend on what the machine has: without the instruction the C library computes the same value. */
BWD_INLINE bwd_real
bwd_fma(bwd_real a, bwd_real b, bwd_real c)
{
    return fmaf(a, b, c);
}

BWD_INLINE bwd_real
bwd_sqrt(bwd_real x)
{
    return sqrtf(x);
}

#endif
