// clang-format Language: Cpp
/* The one loop, stamped for every rule and format; each instruction set compiles this file with its own flags, once for
 * each real type.
 *
 * It is plain C that the compiler vectorises. It knows nothing of what a rule computes. Everything but the table at the
 * end is static, so no wide copy of a shared function can be linked into a narrow caller. */
#include "core/dispatch.h"

#define BWD_CAT_(a, b) a##_##b
#define BWD_CAT(a, b)  BWD_CAT_(a, b)

#ifdef BWD_REAL_IS_DOUBLE
#define BWD_REAL_NAME   double
#define BWD_OWN_DTYPES  BWD_DOUBLE_DTYPES
#define BWD_OWN_FORMATS BWD_DOUBLE_FORMATS
#define BWD_OWN_DIRECT  BWD_DOUBLE_FORMATS
#define BWD_OWN_TILED(X, rule)
#else
#define BWD_REAL_NAME   float
#define BWD_OWN_DTYPES  BWD_FLOAT_DTYPES
#define BWD_OWN_FORMATS BWD_FLOAT_FORMATS
#define BWD_OWN_DIRECT  BWD_DIRECT_FORMATS
#define BWD_OWN_TILED   BWD_TILED_FORMATS
#endif

/* Trip counts that the compiler sees: two whole vectors of the widest kind per loaded part (N of them), for every width
 * a whole number of vectors, no remainder loop. */
enum { BWD_CACHE_LINE = 64, BWD_AHEAD = 256, BWD_SCAN_BLOCK = 64 };
#define BWD_BLOCK(N) (32 * (N))
_Static_assert(BWD_CHUNK % BWD_BLOCK(2) == 0 && BWD_BLOCK(1) % BWD_LANES == 0, "lanes tile blocks, blocks tile chunks");

/* A little ahead, worth a few percent from memory. How far is machine-dependent, and further can cost more than it
 * brings: 3 KiB ahead was a tenth faster on one machine and a quarter slower on another. A prefetch past the end of an
 * array does not fault. */
static inline void
bwd_prefetch(const void *block, size_t bytes)
{
#if defined(__GNUC__)
    const uintptr_t from = (uintptr_t)block + BWD_AHEAD;
    for (size_t at = 0; at < bytes; at += BWD_CACHE_LINE) {
        __builtin_prefetch((const void *)(from + at));
    }
#else
    (void)block, (void)bytes;
#endif
}

/* The square of a float is exact in double, so that adding it rounds once either way, and an instruction set that does
 * both at once gives the same bits in half the operations. */
#if defined(__FMA__) && !defined(BWD_REAL_IS_DOUBLE)
#define BWD_ADD_SQUARE(sum, x) fma(x, x, sum)
#else
#define BWD_ADD_SQUARE(sum, x) ((sum) + (x) * (x))
#endif

/* Squares of all but doubles are exact in double. Row by row into each lane, so the order of additions is the one the
 * lanes promise. */
#define BWD_STAMP_SQUARES(T, text)                                                                                     \
    static inline void bwd_squares_##T(const bwd_##T *restrict grad, int n, double *restrict lanes)                    \
    {                                                                                                                  \
        bwd_real tile[BWD_SCAN_BLOCK];                                                                                 \
        const bwd_real *g = bwd_reals_##T(grad, n, tile);                                                              \
        for (int k = 0; k < BWD_LANES; k++) {                                                                          \
            double sum = lanes[k];                                                                                     \
            for (int row = 0; row < n; row += BWD_LANES) {                                                             \
                sum = BWD_ADD_SQUARE(sum, (double)g[row + k]);                                                         \
            }                                                                                                          \
            lanes[k] = sum;                                                                                            \
        }                                                                                                              \
    }                                                                                                                  \
    static void bwd_scan_##T(size_t n, const void *grad, double *lanes)                                                \
    {                                                                                                                  \
        const bwd_##T *g = grad;                                                                                       \
        for (; n >= BWD_SCAN_BLOCK; n -= BWD_SCAN_BLOCK, g += BWD_SCAN_BLOCK) {                                        \
            bwd_prefetch(g, BWD_SCAN_BLOCK * sizeof *g);                                                               \
            bwd_squares_##T(g, BWD_SCAN_BLOCK, lanes);                                                                 \
        }                                                                                                              \
        if (n > 0) {                                                                                                   \
            bwd_##T rest[BWD_SCAN_BLOCK] = {0};                                                                        \
            memcpy(rest, g, n * sizeof *g);                                                                            \
            bwd_squares_##T(rest, BWD_SCAN_BLOCK, lanes);                                                              \
        }                                                                                                              \
    }
BWD_OWN_DTYPES(BWD_STAMP_SQUARES)

/* One block. The pointers are parameters because that is where GCC believes `restrict` without a run-time check. */
#define BWD_BLOCK_OF(rule, P, G, S)                                                                                    \
    static inline void bwd_##rule##_##P##_##G##_##S##_block(                                                           \
        bwd_##P *restrict param, const bwd_##G *restrict grad, bwd_##S *restrict state0, bwd_##S *restrict state1,     \
        bwd_##S *restrict state2, const bwd_##rule##_scalars *restrict scalars)

#define BWD_STAMP_BLOCK(rule, P, G, S, N)                                                                              \
    BWD_BLOCK_OF(rule, P, G, S)                                                                                        \
    {                                                                                                                  \
        enum { states = BWD_##rule##_STATE_COUNT };                                                                    \
        for (int i = 0; i < BWD_BLOCK(N); i += N) {                                                                    \
            bwd_real x[N], g[N], st[BWD_MAX_STATES][N];                                                                \
            bwd_load##N##_##P(param + i, x);                                                                           \
            bwd_load##N##_##G(grad + i, g);                                                                            \
            if (states > 0)                                                                                            \
                bwd_load##N##_##S(state0 + i, st[0]);                                                                  \
            if (states > 1)                                                                                            \
                bwd_load##N##_##S(state1 + i, st[1]);                                                                  \
            if (states > 2)                                                                                            \
                bwd_load##N##_##S(state2 + i, st[2]);                                                                  \
            for (int e = 0; e < N; e++) {                                                                              \
                bwd_real one[BWD_MAX_STATES];                                                                          \
                for (int k = 0; k < states; k++)                                                                       \
                    one[k] = st[k][e];                                                                                 \
                bwd_##rule##_update(&x[e], g[e], one, scalars);                                                        \
                for (int k = 0; k < states; k++)                                                                       \
                    st[k][e] = one[k];                                                                                 \
            }                                                                                                          \
            bwd_store##N##_##P(param + i, x);                                                                          \
            if (states > 0)                                                                                            \
                bwd_store##N##_##S(state0 + i, st[0]);                                                                 \
            if (states > 1)                                                                                            \
                bwd_store##N##_##S(state1 + i, st[1]);                                                                 \
            if (states > 2)                                                                                            \
                bwd_store##N##_##S(state2 + i, st[2]);                                                                 \
        }                                                                                                              \
    }

/* param and grad as floats in tiles, the states where they are. */
#define BWD_STAMP_TILED_BLOCK(rule, P, G, S, N)                                                                        \
    BWD_BLOCK_OF(rule, P, G, S)                                                                                        \
    {                                                                                                                  \
        bwd_real param_tile[BWD_BLOCK(N)], grad_tile[BWD_BLOCK(N)];                                                    \
        const bwd_real *g = bwd_reals_##G(grad, BWD_BLOCK(N), grad_tile);                                              \
        (void)bwd_reals_##P(param, BWD_BLOCK(N), param_tile);                                                          \
        bwd_##rule##_##S##_##S##_##S##_block(param_tile, g, state0, state1, state2, scalars);                          \
        bwd_pack_##P(param, BWD_BLOCK(N), param_tile);                                                                 \
    }

/* The squares come first: allocators place large arrays at one offset from a page, and a load of grad after a store to
 * another array at that offset looks to the machine as if it might depend on it.
 * The last elements run as a whole block in a padded copy: the same code, so the same bits, whatever n is; a zero in
 * the padding adds nothing to a lane. */
#define BWD_STAMP_UPDATE(rule, P, G, S, N)                                                                             \
    static void bwd_##rule##_##P##_##G##_##S(const bwd_scalars *scalars, size_t n, void *param, const void *grad,      \
                                             void *const *state, double *lanes)                                        \
    {                                                                                                                  \
        enum { states = BWD_##rule##_STATE_COUNT };                                                                    \
        bwd_##rule##_scalars s;                                                                                        \
        memcpy(&s, scalars, sizeof s);                                                                                 \
        bwd_##P *p = param;                                                                                            \
        const bwd_##G *g = grad;                                                                                       \
        bwd_##S *st[BWD_MAX_STATES] = {state[0], state[1], state[2]};                                                  \
        for (; n >= BWD_BLOCK(N); n -= BWD_BLOCK(N)) {                                                                 \
            bwd_prefetch(p, BWD_BLOCK(N) * sizeof *p);                                                                 \
            bwd_prefetch(g, BWD_BLOCK(N) * sizeof *g);                                                                 \
            for (int k = 0; k < states; k++)                                                                           \
                bwd_prefetch(st[k], BWD_BLOCK(N) * sizeof *st[k]);                                                     \
            bwd_squares_##G(g, BWD_BLOCK(N), lanes);                                                                   \
            bwd_##rule##_##P##_##G##_##S##_block(p, g, st[0], st[1], st[2], &s);                                       \
            p += BWD_BLOCK(N);                                                                                         \
            g += BWD_BLOCK(N);                                                                                         \
            for (int k = 0; k < states; k++)                                                                           \
                st[k] += BWD_BLOCK(N);                                                                                 \
        }                                                                                                              \
        if (n > 0) {                                                                                                   \
            bwd_##P param_rest[BWD_BLOCK(N)] = {0};                                                                    \
            bwd_##G grad_rest[BWD_BLOCK(N)] = {0};                                                                     \
            bwd_##S state_rest[BWD_MAX_STATES][BWD_BLOCK(N)] = {{0}};                                                  \
            void *rests[BWD_MAX_STATES] = {state_rest[0], state_rest[1], state_rest[2]};                               \
            memcpy(param_rest, p, n * sizeof *p);                                                                      \
            memcpy(grad_rest, g, n * sizeof *g);                                                                       \
            for (int k = 0; k < states; k++)                                                                           \
                memcpy(rests[k], st[k], n * sizeof *st[k]);                                                            \
            bwd_##rule##_##P##_##G##_##S(scalars, BWD_BLOCK(N), param_rest, grad_rest, rests, lanes);                  \
            memcpy(p, param_rest, n * sizeof *p);                                                                      \
            for (int k = 0; k < states; k++)                                                                           \
                memcpy(st[k], rests[k], n * sizeof *st[k]);                                                            \
        }                                                                                                              \
    }
#define BWD_STAMP_RULE(rule, states, hypers)                                                                           \
    _Static_assert(sizeof(bwd_##rule##_scalars) <= sizeof(bwd_scalars), "make room in bwd_scalars");                   \
    static void bwd_##rule##_ready(const double *hyper, double step, bwd_scalars *scalars)                             \
    {                                                                                                                  \
        const bwd_##rule##_scalars s = bwd_##rule##_prepare(hyper, step);                                              \
        memcpy(scalars, &s, sizeof s);                                                                                 \
    }                                                                                                                  \
    BWD_OWN_DIRECT(BWD_STAMP_BLOCK, rule)                                                                              \
    BWD_OWN_TILED(BWD_STAMP_TILED_BLOCK, rule)                                                                         \
    BWD_OWN_FORMATS(BWD_STAMP_UPDATE, rule)
BWD_RULES(BWD_STAMP_RULE)

#define BWD_PREPARE_CELL(rule, states, hypers) [BWD_RULE_##rule] = bwd_##rule##_ready,
#define BWD_UPDATE_CELL(rule, P, G, S, N)      [BWD_FORMAT_##P##_##G##_##S] = bwd_##rule##_##P##_##G##_##S,
#define BWD_UPDATE_ROW(rule, states, hypers)   [BWD_RULE_##rule] = {BWD_OWN_FORMATS(BWD_UPDATE_CELL, rule)},
#define BWD_SCAN_CELL(T, text)                 [BWD_##T] = bwd_scan_##T,
#define BWD_LOOPS                              BWD_CAT(bwd_loops, BWD_CAT(BWD_ISA, BWD_REAL_NAME))
extern const bwd_loops BWD_LOOPS;
const bwd_loops BWD_LOOPS = {
    {BWD_RULES(BWD_PREPARE_CELL)},
    {BWD_RULES(BWD_UPDATE_ROW)},
    {BWD_OWN_DTYPES(BWD_SCAN_CELL)},
};
