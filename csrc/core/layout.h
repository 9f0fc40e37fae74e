/* Storage formats: what the arrays are made of, and how an element is read and rounded.
 *
 * Arithmetic is always done in bwd_real. A store rounds to nearest, ties to even. A NaN stays a NaN, but neither its
 * sign nor its payload is part of the interface: compare NaN as NaN. */
#ifndef BWD_LAYOUT_H
#define BWD_LAYOUT_H

#include <stdint.h>
#include <string.h>

#include "rules/rule.h"

typedef float bwd_f32;
typedef uint16_t bwd_bf16;

/* clang-format off */
/* name here and the name that NumPy, ml_dtypes and torch give it */
#define BWD_DTYPES(X)     \
    X(f32,  "float32")    \
    X(bf16, "bfloat16")

/* param, grad, states; `...` is handed to each row first */
#define BWD_FORMATS(X, ...)             \
    X(__VA_ARGS__, f32,  f32,  f32)     \
    X(__VA_ARGS__, bf16, bf16, f32)     \
    X(__VA_ARGS__, bf16, bf16, bf16)
/* clang-format on */

#define BWD_DTYPE_ID(T, text) BWD_##T,
enum bwd_dtype { BWD_DTYPES(BWD_DTYPE_ID) BWD_DTYPE_COUNT };
#undef BWD_DTYPE_ID

#define BWD_FORMAT_ID(prefix, P, G, S) prefix##_##P##_##G##_##S,
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

BWD_INLINE bwd_real
bwd_load_f32(const bwd_f32 *from)
{
    return *from;
}

BWD_INLINE void
bwd_store_f32(bwd_f32 *to, bwd_real x)
{
    *to = x;
}

BWD_INLINE bwd_real
bwd_load_bf16(const bwd_bf16 *from)
{
    const uint32_t bits = (uint32_t)*from << 16;
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* In integers, since the machine's own conversion (vcvtneps2bf16) flushes denormals. Adding half a unit, less one where
 * the kept part is even, carries into the kept part exactly when nearest-even rounds up; overflow carries to inf. */
BWD_INLINE void
bwd_store_bf16(bwd_bf16 *to, bwd_real x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    const uint32_t quiet_nan = (bits >> 16) | 0x40u;
    *to = (bwd_bf16)((bits & 0x7fffffffu) > 0x7f800000u ? quiet_nan : rounded);
}

#endif
