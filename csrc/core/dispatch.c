/* Chooses the loops for this CPU, and counts what is rare enough to need none of its own. */
#include "core/dispatch.h"

#include "core/run.h"

extern const bwd_isa bwd_isa_baseline;
#ifdef BWD_BUILT_AVX2
extern const bwd_isa bwd_isa_avx2;
#endif
#ifdef BWD_BUILT_AVX512
extern const bwd_isa bwd_isa_avx512;
#endif

/* Widest first. */
static const bwd_isa *const isas[] = {
#ifdef BWD_BUILT_AVX512
    &bwd_isa_avx512,
#endif
#ifdef BWD_BUILT_AVX2
    &bwd_isa_avx2,
#endif
    &bwd_isa_baseline,
};
enum { ISA_COUNT = sizeof isas / sizeof *isas };

/* __builtin_cpu_supports also asks the operating system whether it saves the wide registers. */
int
bwd_isa_possible(const bwd_isa *isa)
{
#ifdef BWD_BUILT_AVX512
    if (isa == &bwd_isa_avx512) {
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
               __builtin_cpu_supports("fma");
    }
#endif
#ifdef BWD_BUILT_AVX2
    if (isa == &bwd_isa_avx2) {
        return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    }
#endif
    return isa == &bwd_isa_baseline;
}

const bwd_isa *
bwd_isa_at(int index)
{
    return index >= 0 && index < ISA_COUNT ? isas[index] : NULL;
}

const bwd_isa *
bwd_isa_best(void)
{
    int i = 0;
    while (!bwd_isa_possible(isas[i])) {
        i++;
    }
    return isas[i];
}

const bwd_isa *
bwd_isa_by_name(const char *name)
{
    for (int i = 0; i < ISA_COUNT; i++) {
        if (strcmp(isas[i]->name, name) == 0 && bwd_isa_possible(isas[i])) {
            return isas[i];
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

#define NONFINITE_CELL(T, text) [BWD_##T] = count_nonfinite_##T,
static uint64_t (*const count_nonfinite[BWD_DTYPE_COUNT])(size_t n, const void *grad) = {BWD_DTYPES(NONFINITE_CELL)};
#undef NONFINITE_CELL

uint64_t
bwd_count_nonfinite(enum bwd_dtype dtype, size_t n, const void *grad)
{
    return count_nonfinite[dtype](n, grad);
}
