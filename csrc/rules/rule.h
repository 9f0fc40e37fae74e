/* What every rule is written in: one real type, a fused multiply-add, a square root, and nothing else.
 * A rule knows no storage format, no instruction set, no thread and no Python. */
#ifndef BWD_RULE_H
#define BWD_RULE_H

#include <math.h>
#include <stdint.h>
#include <string.h>

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

/* float, or double where the storage is double: each loop file chooses before its first include. */
#ifdef BWD_REAL_IS_DOUBLE
typedef double bwd_real;
typedef uint64_t bwd_bits;
#define BWD_REAL_MAX      1.79769313486231570815e+308
#define BWD_REAL_FN(name) name
#else
typedef float bwd_real;
typedef uint32_t bwd_bits;
#define BWD_REAL_MAX      3.40282346638528859812e+38
#define BWD_REAL_FN(name) name##f
#endif

/* One rounding. Written where accuracy wants it; the compiler contracts nothing on its own, so that the bits do not
 * depend on what the machine has: without the instruction the C library computes the same value. */
BWD_INLINE bwd_real
bwd_fma(bwd_real a, bwd_real b, bwd_real c)
{
    return BWD_REAL_FN(fma)(a, b, c);
}

BWD_INLINE bwd_real
bwd_sqrt(bwd_real x)
{
    return BWD_REAL_FN(sqrt)(x);
}

/* The larger; NaN where either is, as torch.maximum. */
BWD_INLINE bwd_real
bwd_max(bwd_real a, bwd_real b)
{
    return a > b || a != a ? a : b;
}

/* A factor in twice the precision. */
typedef struct bwd_split {
    bwd_real high, low;
} bwd_split;

/* Both parts have the sign of x, so that an infinite operand stays infinite: a low part of zero or of the other sign
 * would make it NaN. Where x fits high alone, low is too small to change any result but that one. */
BWD_INLINE bwd_split
bwd_split_of(double x)
{
    bwd_split s = {(bwd_real)x, 0};
    if (fabs((double)s.high) > fabs(x)) {
        s.high = BWD_REAL_FN(nextafter)(s.high, 0);
    }
    s.low = (double)s.high == x ? s.high * (bwd_real)0x1p-60 : (bwd_real)(x - (double)s.high);
    return s;
}

/* a * x */
BWD_INLINE bwd_real
bwd_split_scale(bwd_split a, bwd_real x)
{
    return bwd_fma(a.high, x, a.low * x);
}

/* a * x + y */
BWD_INLINE bwd_real
bwd_split_fma(bwd_split a, bwd_real x, bwd_real y)
{
    return bwd_fma(a.high, x, bwd_fma(a.low, x, y));
}

/* A choice that is the same for every element, as a mask: all bits or none. No branch, and a wide machine does it
 * beside its arithmetic. */
typedef bwd_bits bwd_mask;

BWD_INLINE bwd_mask
bwd_mask_of(int yes)
{
    return yes ? (bwd_mask)-1 : 0;
}

BWD_INLINE bwd_real
bwd_pick(bwd_mask mask, bwd_real yes, bwd_real no)
{
    bwd_bits a, b;
    memcpy(&a, &yes, sizeof a);
    memcpy(&b, &no, sizeof b);
    a = (a & mask) | (b & ~mask);
    memcpy(&yes, &a, sizeof a);
    return yes;
}

BWD_INLINE bwd_real
bwd_negate_if(bwd_mask mask, bwd_real x)
{
    bwd_bits a;
    memcpy(&a, &x, sizeof a);
    a ^= mask & (bwd_bits)1 << (8 * sizeof a - 1);
    memcpy(&x, &a, sizeof a);
    return x;
}

#endif
