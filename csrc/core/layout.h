/* Storage formats: what the arrays are made of, and how an element is read and rounded.
 *
 * Arithmetic is always done in bwd_real. A store rounds to nearest, ties to even. A NaN stays a NaN, but neither its
 * sign nor its payload is part of the interface: compare NaN as NaN. */
#ifndef BWD_LAYOUT_H
#define BWD_LAYOUT_H

#include <stddef.h>

#include "rules/rule.h"

typedef float bwd_f32;
typedef uint16_t bwd_bf16;

/* clang-format off */
/* name here, the name that NumPy, ml_dtypes and torch give it */
#define BWD_DTYPES(X)     \
    X(f32,  "float32")    \
    X(bf16, "bfloat16")

/* param, grad, states, elements that are loaded at a time; `...` is handed to each row first */
#define BWD_FORMATS(X, ...)                \
    X(__VA_ARGS__, f32,  f32,  f32,  1)    \
    X(__VA_ARGS__, bf16, bf16, f32,  2)    \
    X(__VA_ARGS__, bf16, bf16, bf16, 2)
/* clang-format on */

#define BWD_DTYPE_ID(T, text) BWD_##T,
enum bwd_dtype { BWD_DTYPES(BWD_DTYPE_ID) BWD_DTYPE_COUNT };
#undef BWD_DTYPE_ID

#define BWD_FORMAT_ID(prefix, P, G, S, at_a_time) prefix##_##P##_##G##_##S,
enum bwd_format { BWD_FORMATS(BWD_FORMAT_ID, BWD_FORMAT) BWD_FORMAT_COUNT };
#undef BWD_FORMAT_ID

/* The row that holds these three, or -1. */
int bwd_format_find(enum bwd_dtype param, enum bwd_dtype grad, enum bwd_dtype state);
/* A row's three dtypes; `format` must be a row. */
void bwd_format_dtypes(int format, enum bwd_dtype *param, enum bwd_dtype *grad, enum bwd_dtype *state);
size_t bwd_dtype_size(enum bwd_dtype dtype);
const char *bwd_dtype_name(enum bwd_dtype dtype);
/* The dtype of that name, or -1. */
int bwd_dtype_find(const char *name);

/* bwd_load<N>_<T> and bwd_store<N>_<T> move N elements between memory and registers. */

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
    uint32_t word;
    memcpy(&word, from, sizeof word);
    const uint32_t low = word << 16, high = word & 0xffff0000u;
    memcpy(&x[BWD_LOW_HALF], &low, sizeof low);
    memcpy(&x[1 - BWD_LOW_HALF], &high, sizeof high);
}

/* The bits of x, rounded to the upper half, in integers since the machine's own conversion (vcvtneps2bf16) flushes
 * denormals. Adding half a unit, less one where the kept part is even, carries into the kept part exactly when
 * nearest-even rounds up; overflow carries to inf. The plain NaN is one that the addition cannot carry out of. */
BWD_INLINE uint32_t
bwd_round_bf16(bwd_real x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    bits = x == x ? bits : 0x7fc00000u;
    return bits + 0x7fffu + ((bits >> 16) & 1u);
}

BWD_INLINE void
bwd_store2_bf16(bwd_bf16 *to, const bwd_real *x)
{
    const uint32_t low = bwd_round_bf16(x[BWD_LOW_HALF]), high = bwd_round_bf16(x[1 - BWD_LOW_HALF]);
    const uint32_t word = (low >> 16) | (high & 0xffff0000u);
    memcpy(to, &word, sizeof word);
}

/* n elements as reals: the array itself where it is made of them, else a copy in `tile`. */
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

#endif
