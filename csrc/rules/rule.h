/* What every rule is written in: one real type, a fused multiply-add, a square root, and nothing else.
 * A rule knows no storage format, no instruction set, no thread and no Python. */
#ifndef BWD_RULE_H
#define BWD_RULE_H

/* Read by C11 on the CPU, by C++17 (nvcc, an emulator of the device) and by NVRTC, which has no standard headers and
 * brings the arithmetic itself. What differs between them stands here and nowhere else. */
#ifdef __CUDACC_RTC__
typedef unsigned short bwd_u16;
typedef unsigned int bwd_u32;
typedef unsigned long long bwd_u64;
#define INFINITY __int_as_float(0x7f800000)
#else
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
typedef uint16_t bwd_u16;
typedef uint32_t bwd_u32;
typedef uint64_t bwd_u64;
#endif

/* BWD_INLINE is for the loops, BWD_HOST for what prepares them, once per step. NVRTC knows no host: there it is
 * compiled for the device, where nothing calls it. */
#if defined(__CUDACC_RTC__)
#define BWD_INLINE static __device__ __forceinline__
#define BWD_HOST   BWD_INLINE
#elif defined(__CUDACC__)
#define BWD_INLINE static __host__ __device__ __forceinline__
#define BWD_HOST   static __host__ inline
#else
#define BWD_INLINE static inline
#define BWD_HOST   static inline
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
typedef bwd_u64 bwd_bits;
#define BWD_REAL_MAX      1.79769313486231570815e+308
#define BWD_REAL_FN(name) name
#else
typedef float bwd_real;
typedef bwd_u32 bwd_bits;
#define BWD_REAL_MAX      3.40282346638528859812e+38
#define BWD_REAL_FN(name) name##f
#endif

BWD_INLINE bwd_bits
bwd_bits_of(bwd_real x)
{
    bwd_bits bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

BWD_INLINE bwd_real
bwd_real_of(bwd_bits bits)
{
    bwd_real x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

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
BWD_HOST bwd_split
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

BWD_HOST bwd_mask
bwd_mask_of(int yes)
{
    return yes ? (bwd_mask)-1 : 0;
}

BWD_INLINE bwd_real
bwd_pick(bwd_mask mask, bwd_real yes, bwd_real no)
{
    return bwd_real_of((bwd_bits_of(yes) & mask) | (bwd_bits_of(no) & ~mask));
}

BWD_INLINE bwd_real
bwd_negate_if(bwd_mask mask, bwd_real x)
{
    return bwd_real_of(bwd_bits_of(x) ^ (mask & (bwd_bits)1 << (8 * sizeof mask - 1)));
}

#endif
