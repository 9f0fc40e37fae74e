/* Chooses the loops for this CPU, and counts what is rare enough to need none of its own. */
#include "core/dispatch.h"

#include "core/run.h"

/* Widest first; baseline is always there. */
#ifdef BWD_BUILT_AVX2
#define AVX2(X) X(avx2)
#else
#define AVX2(X)
#endif
#ifdef BWD_BUILT_AVX512
#define AVX512(X) X(avx512)
#else
#define AVX512(X)
#endif
#define BUILT_ISAS(X)      AVX512(X) AVX2(X) X(baseline)

#define DECLARE_LOOPS(isa) extern const bwd_loops bwd_loops_##isa##_float, bwd_loops_##isa##_double;
BUILT_ISAS(DECLARE_LOOPS)

#define ISA_ID(isa) ISA_##isa,
enum { BUILT_ISAS(ISA_ID) ISA_COUNT };
#define ISA_ROW(isa) {#isa, {[BWD_FLOAT] = &bwd_loops_##isa##_float, [BWD_DOUBLE] = &bwd_loops_##isa##_double}},
static const bwd_isa isas[ISA_COUNT] = {BUILT_ISAS(ISA_ROW)};

/* __builtin_cpu_supports also asks the operating system whether it saves the wide registers. */
int
bwd_isa_possible(const bwd_isa *isa)
{
#ifdef BWD_BUILT_AVX512
    if (isa == &isas[ISA_avx512]) {
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
               __builtin_cpu_supports("fma");
    }
#endif
#ifdef BWD_BUILT_AVX2
    if (isa == &isas[ISA_avx2]) {
        return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    }
#endif
    return isa == &isas[ISA_baseline];
}

const bwd_isa *
bwd_isa_at(int index)
{
    return index >= 0 && index < ISA_COUNT ? &isas[index] : NULL;
}

const bwd_isa *
bwd_isa_best(void)
{
    int i = 0;
    while (!bwd_isa_possible(&isas[i])) {
        i++;
    }
    return &isas[i];
}

const bwd_isa *
bwd_isa_by_name(const char *name)
{
    for (int i = 0; i < ISA_COUNT; i++) {
        if (strcmp(isas[i].name, name) == 0 && bwd_isa_possible(&isas[i])) {
            return &isas[i];
        }
    }
    return NULL;
}

static uint64_t
count_nonfinite_f32(size_t n, const void *grad)
{
    uint64_t count = 0;
    for (size_t i = 0; i < n; i++) {
        count += !isfinite(((const bwd_f32 *)grad)[i]);
    }
    return count;
}

static uint64_t
count_nonfinite_bf16(size_t n, const void *grad)
{
    uint64_t count = 0;
    for (size_t i = 0; i < n; i++) {
        count += (((const bwd_bf16 *)grad)[i] & 0x7f80u) == 0x7f80u;
    }
    return count;
}

static uint64_t
count_nonfinite_f16(size_t n, const void *grad)
{
    uint64_t count = 0;
    for (size_t i = 0; i < n; i++) {
        count += (((const bwd_f16 *)grad)[i] & 0x7c00u) == 0x7c00u;
    }
    return count;
}

static uint64_t
count_nonfinite_f64(size_t n, const void *grad)
{
    uint64_t count = 0;
    for (size_t i = 0; i < n; i++) {
        count += !isfinite(((const bwd_f64 *)grad)[i]);
    }
    return count;
}

#define NONFINITE_CELL(T, text) [BWD_##T] = count_nonfinite_##T,
static uint64_t (*const count_nonfinite[BWD_DTYPE_COUNT])(size_t n, const void *grad) = {BWD_DTYPES(NONFINITE_CELL)};
#undef NONFINITE_CELL

uint64_t
bwd_count_nonfinite(enum bwd_dtype dtype, size_t n, const void *grad)
{
    return count_nonfinite[dtype](n, grad);
}
