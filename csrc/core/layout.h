/* Storage formats: what the arrays are made of, and how an element is read and rounded.
 *
 * Arithmetic is always done in bwd_real, a float except where storage is double. A store rounds to nearest, ties to
 * even. A NaN stays a NaN, but neither its sign nor its payload is part of the interface: compare NaN as NaN. */
#ifndef BWD_LAYOUT_H
#define BWD_LAYOUT_H

#include "rules/rule.h"

typedef float bwd_f32;
typedef bwd_u16 bwd_bf16;
typedef bwd_u16 bwd_f16;
typedef double bwd_f64;

/* clang-format off */
/* name here, the name that NumPy, ml_dtypes and torch give it; by the real type in which it is computed with */
#define BWD_FLOAT_DTYPES(X) \
    X(f32,  "float32")      \
    X(bf16, "bfloat16")     \
    X(f16,  "float16")
#define BWD_DOUBLE_DTYPES(X) \
    X(f64,  "float64")
#define BWD_DTYPES(X) BWD_FLOAT_DTYPES(X) BWD_DOUBLE_DTYPES(X)

/* param, grad, states, elements that are loaded at a time; `...` is handed to each row first. In a tiled format param and
 * grad pass through a tile of floats: a conversion of many operations the compiler vectorises in a loop of its own alone. */
#define BWD_DIRECT_FORMATS(X, ...)         \
    X(__VA_ARGS__, f32,  f32,  f32,  1)    \
    X(__VA_ARGS__, bf16, bf16, f32,  2)    \
    X(__VA_ARGS__, bf16, bf16, bf16, 2)    \
    X(__VA_ARGS__, f32,  f32,  bf16, 2)    \
    X(__VA_ARGS__, f32,  bf16, f32,  2)    \
    X(__VA_ARGS__, f32,  bf16, bf16, 2)    \
    X(__VA_ARGS__, bf16, f32,  f32,  2)    \
    X(__VA_ARGS__, bf16, f32,  bf16, 2)
#define BWD_TILED_FORMATS(X, ...)          \
    X(__VA_ARGS__, f16,  f16,  f32,  1)    \
    X(__VA_ARGS__, f16,  f32,  f32,  1)
#define BWD_FLOAT_FORMATS(X, ...) BWD_DIRECT_FORMATS(X, __VA_ARGS__) BWD_TILED_FORMATS(X, __VA_ARGS__)
#define BWD_DOUBLE_FORMATS(X, ...)         \
    X(__VA_ARGS__, f64,  f64,  f64,  1)
#define BWD_FORMATS(X, ...) BWD_FLOAT_FORMATS(X, __VA_ARGS__) BWD_DOUBLE_FORMATS(X, __VA_ARGS__)
/* clang-format on */

/* The two real types that rules are computed in. */
enum bwd_real_type { BWD_FLOAT, BWD_DOUBLE, BWD_REAL_TYPES };

#define BWD_DTYPE_ID(T, text) BWD_##T,
enum bwd_dtype { BWD_DTYPES(BWD_DTYPE_ID) BWD_DTYPE_COUNT };
#undef BWD_DTYPE_ID

#define BWD_FORMAT_ID(prefix, P, G, S, at_a_time) prefix##_##P##_##G##_##S,
enum bwd_format { BWD_FORMATS(BWD_FORMAT_ID, BWD_FORMAT) BWD_FORMAT_COUNT };
#undef BWD_FORMAT_ID

/* bwd_load<N>_<T> and bwd_store<N>_<T> move N elements between memory and registers; bwd_reals_<T> gives n elements as
 * reals: the array itself where it is made of them, else a copy in `tile`. bwd_pack_<T> stores n reals. */

#ifdef BWD_REAL_IS_DOUBLE

BWD_INLINE void
bwd_load1_f64(const bwd_f64 *from, bwd_real *x)
{
    x[0] = from[0];
}

BWD_INLINE void
bwd_store1_f64(bwd_f64 *to, const bwd_real *x)
{
    to[0] = x[0];
}

BWD_INLINE const bwd_real *
bwd_reals_f64(const bwd_f64 *from, int n, bwd_real *tile)
{
    (void)n, (void)tile;
    return from;
}

#else

BWD_INLINE void
bwd_load1_f32(const bwd_f32 *from, bwd_real *x)
{
    x[0] = from[0];
}

BWD_INLINE void
bwd_store1_f32(bwd_f32 *to, const bwd_real *x)
{
    to[0] = x[0];
}

BWD_INLINE void
bwd_load2_f32(const bwd_f32 *from, bwd_real *x)
{
    x[0] = from[0];
    x[1] = from[1];
}

BWD_INLINE void
bwd_store2_f32(bwd_f32 *to, const bwd_real *x)
{
    to[0] = x[0];
    to[1] = x[1];
}

/* bfloat16 is the upper half of a float. Two of them share a 32-bit word, so a vector of words is two vectors of floats
 * by one shift and one mask, and back: nothing moves between the lanes of a vector, which is what widening one by one
 * would cost. Which of the two is first in memory is the machine's byte order. */
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
enum { BWD_LOW_HALF = 1 };
#else
enum { BWD_LOW_HALF = 0 };
#endif

BWD_INLINE void
bwd_load2_bf16(const bwd_bf16 *from, bwd_real *x)
{
    bwd_u32 word;
    memcpy(&word, from, sizeof word);
    x[BWD_LOW_HALF] = bwd_real_of(word << 16);
    x[1 - BWD_LOW_HALF] = bwd_real_of(word & 0xffff0000u);
}

/* The bits of x, rounded to the upper half, in integers since the machine's own conversion (vcvtneps2bf16) flushes
 * denormals. Adding half a unit, less one where the kept part is even, carries into the kept part exactly when
 * nearest-even rounds up; overflow carries to inf. The plain NaN is one that the addition cannot carry out of. */
BWD_INLINE bwd_u32
bwd_round_bf16(bwd_real x)
{
    const bwd_u32 bits = x == x ? bwd_bits_of(x) : 0x7fc00000u;
    return bits + 0x7fffu + ((bits >> 16) & 1u);
}

BWD_INLINE void
bwd_store2_bf16(bwd_bf16 *to, const bwd_real *x)
{
    const bwd_u32 low = bwd_round_bf16(x[BWD_LOW_HALF]), high = bwd_round_bf16(x[1 - BWD_LOW_HALF]);
    const bwd_u32 word = (low >> 16) | (high & 0xffff0000u);
    memcpy(to, &word, sizeof word);
}

/* float16 has five bits of exponent. All in integers but one exact subtraction: the machine's own conversions (F16C)
 * are not on every instruction set, and a product with 2^112 would lose the smallest numbers where denormals are
 * flushed. */
BWD_INLINE bwd_u32
bwd_widen_f16(bwd_u32 half)
{
    const bwd_u32 sign = (half & 0x8000u) << 16, magnitude = half & 0x7fffu;
    const bwd_u32 small = bwd_bits_of(bwd_real_of(0x3f000000u + magnitude) - 0.5f); /* 0.5 + magnitude * 2^-24 */
    bwd_u32 wide = (magnitude << 13) + 0x38000000u;  /* the exponent's bias grows by 112 */
    wide += magnitude >= 0x7c00u ? 0x38000000u : 0u; /* inf and NaN: once more, to all ones */
    return sign | (magnitude < 0x400u ? small : wide);
}

/* Nearest, ties to even: below 2^-14 by an addition that leaves the last kept bit in the last place, above it as
 * bfloat16 does. What rounds to 2^16 carries to inf. */
BWD_INLINE bwd_u32
bwd_round_f16(bwd_real x)
{
    const bwd_u32 bits = bwd_bits_of(x), sign = bits & 0x80000000u, magnitude = bits ^ sign;
    const bwd_u32 small = bwd_bits_of(bwd_real_of(magnitude) + 0.5f) - 0x3f000000u;
    const bwd_u32 normal = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
    const bwd_u32 special = magnitude > 0x7f800000u ? 0x7e00u : 0x7c00u;
    const bwd_u32 finite = magnitude < 0x38800000u ? small : normal;
    return (sign >> 16) | (magnitude >= 0x47800000u ? special : finite);
}

BWD_INLINE void
bwd_pack_f16(bwd_f16 *to, int n, const bwd_real *x)
{
    for (int i = 0; i < n; i++) {
        to[i] = (bwd_f16)bwd_round_f16(x[i]);
    }
}

BWD_INLINE const bwd_real *
bwd_reals_f32(const bwd_f32 *from, int n, bwd_real *tile)
{
    (void)n, (void)tile;
    return from;
}

BWD_INLINE const bwd_real *
bwd_reals_bf16(const bwd_bf16 *from, int n, bwd_real *tile)
{
    for (int i = 0; i < n; i += 2) {
        bwd_load2_bf16(from + i, tile + i);
    }
    return tile;
}

BWD_INLINE const bwd_real *
bwd_reals_f16(const bwd_f16 *from, int n, bwd_real *tile)
{
    for (int i = 0; i < n; i++) {
        tile[i] = bwd_real_of(bwd_widen_f16(from[i]));
    }
    return tile;
}

#endif

#endif
