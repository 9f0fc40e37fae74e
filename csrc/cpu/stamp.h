/* The one loop, stamped for every rule and format; each instruction set compiles this file with its own flags.
 *
 * It is plain C that the compiler vectorises. It knows nothing of what a rule computes. Everything but the table at the
 * end is static, so no wide copy of a shared function can be linked into a narrow caller. */
#include "core/dispatch.h"

#define BWD_CAT_(a, b) a##_##b
#define BWD_CAT(a, b)  BWD_CAT_(a, b)
#define BWD_TEXT_(a)   #a
#define BWD_TEXT(a)    BWD_TEXT_(a)

/* A trip count that the compiler sees: whole vectors for every width, no remainder loop. */
enum { BWD_BLOCK = 64, BWD_CACHE_LINE = 64, BWD_AHEAD = 256 };
_Static_assert(BWD_BLOCK % BWD_LANES == 0 && BWD_CHUNK % BWD_BLOCK == 0, "blocks tile chunks, lanes tile blocks");

/* The next block or two: worth a few percent from memory. Further ahead is machine-dependent and can cost much more
 * than it brings (3 KiB: +10 % on one machine, -25 % on another). A prefetch past the end of an array does not fault.
 */
static inline void
bwd_prefetch(const void *block, size_t size)
{
#if defined(__GNUC__)
    const uintptr_t from = (uintptr_t)block + BWD_AHEAD;
    for (size_t at = 0; at < BWD_BLOCK * size; at += BWD_CACHE_LINE) {
        __builtin_prefetch((const void *)(from + at));
    }
#else
    (void)block, (void)size;
#endif
}

/* Squares are exact in double. Row by row into each lane, so the order of additions is the one the lanes promise. */
#define BWD_STAMP_SQUARES(T, text)                                                                                     \
    static inline void bwd_squares_##T(const bwd_##T *restrict grad, double *restrict lanes)                           \
    {                                                                                                                  \
        bwd_real tile[BWD_BLOCK];                                                                                      \
        const bwd_real *g = bwd_reals_##T(grad, BWD_BLOCK, tile);                                                      \
        for (int k = 0; k < BWD_LANES; k++) {                                                                          \
            double sum = lanes[k];                                                                                     \
            for (int row = 0; row < BWD_BLOCK; row += BWD_LANES) {                                                     \
                sum += (double)g[row + k] * g[row + k];                                                                \
            }                                                                                                          \
            lanes[k] = sum;                                                                                            \
        }                                                                                                              \
    }                                                                                                                  \
    static void bwd_scan_##T(size_t n, const void *grad, double *lanes)                                                \
    {                                                                                                                  \
        const bwd_##T *g = grad;                                                                                       \
        for (; n >= BWD_BLOCK; n -= BWD_BLOCK, g += BWD_BLOCK) {                                                       \
            bwd_prefetch(g, sizeof *g);                                                                                \
            bwd_squares_##T(g, lanes);                                                                                 \
        }                                                                                                              \
        if (n > 0) {                                                                                                   \
            bwd_##T rest[BWD_BLOCK] = {0};                                                                             \
            memcpy(rest, g, n * sizeof *g);                                                                            \
            bwd_squares_##T(rest, lanes);                                                                              \
        }                                                                                                              \
    }
BWD_DTYPES(BWD_STAMP_SQUARES)

/* The pointers are parameters because that is where GCC believes `restrict` without a run-time check.
 * The squares come first: allocators place large arrays at one offset from a page, and a load of grad after a store to
 * another array at that offset looks to the machine as if it might depend on it.
 * The last elements run as a whole block in a padded copy: the same code, so the same bits, whatever n is; a zero in
 * the padding adds nothing to a lane. */
#define BWD_STAMP_UPDATE(rule, P, G, S, N)                                                                             \
    static inline void bwd_##rule##_##P##_##G##_##S##_block(                                                           \
        bwd_##P *restrict param, const bwd_##G *restrict grad, bwd_##S *restrict state0, bwd_##S *restrict state1,     \
        bwd_##S *restrict state2, const bwd_##rule##_scalars *restrict scalars)                                        \
    {                                                                                                                  \
        enum { states = BWD_##rule##_STATE_COUNT };                                                                    \
        for (int i = 0; i < BWD_BLOCK; i += N) {                                                                       \
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
    }                                                                                                                  \
    static void bwd_##rule##_##P##_##G##_##S(const bwd_scalars *scalars, size_t n, void *param, const void *grad,      \
                                             void *const *state, double *lanes)                                        \
    {                                                                                                                  \
        enum { states = BWD_##rule##_STATE_COUNT };                                                                    \
        const bwd_##rule##_scalars s = scalars->rule;                                                                  \
        bwd_##P *p = param;                                                                                            \
        const bwd_##G *g = grad;                                                                                       \
        bwd_##S *st[BWD_MAX_STATES] = {state[0], state[1], state[2]};                                                  \
        for (; n >= BWD_BLOCK; n -= BWD_BLOCK) {                                                                       \
            bwd_prefetch(p, sizeof *p);                                                                                \
            bwd_prefetch(g, sizeof *g);                                                                                \
            for (int k = 0; k < states; k++)                                                                           \
                bwd_prefetch(st[k], sizeof *st[k]);                                                                    \
            bwd_squares_##G(g, lanes);                                                                                 \
            bwd_##rule##_##P##_##G##_##S##_block(p, g, st[0], st[1], st[2], &s);                                       \
            p += BWD_BLOCK;                                                                                            \
            g += BWD_BLOCK;                                                                                            \
            for (int k = 0; k < states; k++)                                                                           \
                st[k] += BWD_BLOCK;                                                                                    \
        }                                                                                                              \
        if (n > 0) {                                                                                                   \
            bwd_##P param_rest[BWD_BLOCK] = {0};                                                                       \
            bwd_##G grad_rest[BWD_BLOCK] = {0};                                                                        \
            bwd_##S state_rest[BWD_MAX_STATES][BWD_BLOCK] = {{0}};                                                     \
            void *rests[BWD_MAX_STATES] = {state_rest[0], state_rest[1], state_rest[2]};                               \
            memcpy(param_rest, p, n * sizeof *p);                                                                      \
            memcpy(grad_rest, g, n * sizeof *g);                                                                       \
            for (int k = 0; k < states; k++)                                                                           \
                memcpy(rests[k], st[k], n * sizeof *st[k]);                                                            \
            bwd_##rule##_##P##_##G##_##S(scalars, BWD_BLOCK, param_rest, grad_rest, rests, lanes);                     \
            memcpy(p, param_rest, n * sizeof *p);                                                                      \
            for (int k = 0; k < states; k++)                                                                           \
                memcpy(st[k], rests[k], n * sizeof *st[k]);                                                            \
        }                                                                                                              \
    }
#define BWD_STAMP_RULE(rule, states, hypers) BWD_FORMATS(BWD_STAMP_UPDATE, rule)
BWD_RULES(BWD_STAMP_RULE)

#define BWD_UPDATE_CELL(rule, P, G, S, N)    bwd_##rule##_##P##_##G##_##S,
#define BWD_UPDATE_ROW(rule, states, hypers) {BWD_FORMATS(BWD_UPDATE_CELL, rule)},
#define BWD_SCAN_CELL(T, text)               bwd_scan_##T,
extern const bwd_isa BWD_CAT(bwd_isa, BWD_ISA);
const bwd_isa BWD_CAT(bwd_isa, BWD_ISA) = {
    BWD_TEXT(BWD_ISA),
    {BWD_RULES(BWD_UPDATE_ROW)},
    {BWD_DTYPES(BWD_SCAN_CELL)},
};
