/* The core without Python, for the sanitizers: every instruction set, format and walk gives the same bits, and wrong
 * work orders change nothing. Every array is its own allocation, so that a byte too far is an error of its own. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/dispatch.h"

enum { ARRAYS = 2 + BWD_MAX_STATES, DIMS = 4 };

/* One rule at a time; its states fill the last places, and those that it does not have stay as they are. */
static int rule;

static int failures;

static void
expect(int ok, const char *what, const char *isa, int format, size_t n)
{
    if (!ok) {
        fprintf(stderr, "%s: isa %s, format %d, n %zu\n", what, isa, format, n);
        failures++;
    }
}

/* splitmix64 */
static uint64_t random_state = 1;

static uint64_t
random_bits(void)
{
    uint64_t z = (random_state += 0x9E3779B97F4A7C15u);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

/* In (-1, 1), never a NaN, so that bits can be compared as they are. */
static float
random_float(void)
{
    return (float)((double)(int64_t)random_bits() * 0x1p-63);
}

static void *
allocate(size_t bytes)
{
    void *memory = malloc(bytes ? bytes : 1);
    if (!memory) {
        abort();
    }
    return memory;
}

static void
fill(enum bwd_dtype dtype, void *array, size_t n, int positive)
{
    for (size_t i = 0; i < n; i++) {
        float x = random_float();
        x = positive ? fabsf(x) : x;
        const double wide = (double)x;
        uint32_t bits;
        memcpy(&bits, &x, sizeof bits);
        const uint16_t upper = (uint16_t)(bits >> 16);
        /* a float16 below 1: sign, an exponent under 15, ten bits */
        const uint16_t half = (uint16_t)((bits >> 16 & 0x8000u) | (bits & 0x3fffu) % 0x3c00u);
        const void *from = dtype == BWD_f32   ? (const void *)&x
                           : dtype == BWD_f64 ? (const void *)&wide
                           : dtype == BWD_f16 ? (const void *)&half
                                              : (const void *)&upper;
        memcpy((char *)array + bwd_dtype_size(dtype) * i, from, bwd_dtype_size(dtype));
    }
}

/* param, grad, states; sizes in elements may differ where strides leave holes. */
typedef struct arrays {
    void *at[ARRAYS];
    size_t bytes[ARRAYS];
    enum bwd_dtype dtype[ARRAYS];
} arrays;

static arrays
arrays_new(int format, const size_t *n)
{
    arrays a;
    enum bwd_dtype param, grad, state;
    bwd_format_dtypes(format, &param, &grad, &state);
    for (int k = 0; k < ARRAYS; k++) {
        a.dtype[k] = k == 0 ? param : k == 1 ? grad : state;
        a.bytes[k] = n[k] * bwd_dtype_size(a.dtype[k]);
        a.at[k] = allocate(a.bytes[k]);
        fill(a.dtype[k], a.at[k], n[k], k >= 3);
    }
    return a;
}

static arrays
arrays_copy(const arrays *from)
{
    arrays a = *from;
    for (int k = 0; k < ARRAYS; k++) {
        a.at[k] = allocate(a.bytes[k]);
        memcpy(a.at[k], from->at[k], a.bytes[k]);
    }
    return a;
}

static int
arrays_equal(const arrays *a, const arrays *b)
{
    int equal = 1;
    for (int k = 0; k < ARRAYS; k++) {
        equal &= memcmp(a->at[k], b->at[k], a->bytes[k]) == 0;
    }
    return equal;
}

static void
arrays_free(arrays *a)
{
    for (int k = 0; k < ARRAYS; k++) {
        free(a->at[k]);
    }
}

static bwd_job
job_of(const arrays *a, int format, size_t n)
{
    bwd_job job = {.n = n, .param = a->at[0], .grad = a->at[1], .step = 3, .rule = rule, .format = format};
    int count;
    const double *defaults = bwd_rule_defaults(rule, &count);
    memcpy(job.hyper, defaults, sizeof *defaults * (size_t)count);
    for (int k = 0; k < BWD_MAX_STATES; k++) {
        job.state[k] = a->at[2 + k];
    }
    return job;
}

static int
same_sums(const bwd_job *a, const bwd_job *b)
{
    return memcmp(&a->grad_sq_sum, &b->grad_sq_sum, sizeof(double)) == 0 && a->nonfinite == b->nonfinite;
}

static void
check_contiguous(int format, size_t n)
{
    const size_t sizes[ARRAYS] = {n, n, n, n, n};
    arrays start = arrays_new(format, sizes), first = arrays_copy(&start);
    bwd_job first_job = job_of(&first, format, n);
    const bwd_isa *isa = bwd_isa_by_name("baseline");
    expect(bwd_step(isa, NULL, &first_job) == BWD_OK, "step failed", isa->name, format, n);
    for (int i = 0; (isa = bwd_isa_at(i)); i++) {
        if (!bwd_isa_possible(isa)) {
            continue;
        }
        arrays a = arrays_copy(&start);
        bwd_job job = job_of(&a, format, n);
        expect(bwd_step(isa, NULL, &job) == BWD_OK, "step failed", isa->name, format, n);
        expect(arrays_equal(&a, &first), "bits differ from baseline", isa->name, format, n);
        expect(same_sums(&job, &first_job), "sums differ from baseline", isa->name, format, n);
        bwd_job scan = {0};
        expect(bwd_scan(isa, NULL, a.dtype[1], start.at[1], n, &scan.grad_sq_sum, &scan.nonfinite) == BWD_OK,
               "scan failed", isa->name, format, n);
        expect(same_sums(&scan, &job), "scan and step disagree", isa->name, format, n);
        arrays_free(&a);
    }
    arrays_free(&start);
    arrays_free(&first);
}

typedef struct order {
    int64_t strides[DIMS];
    size_t extent; /* elements from the lowest address to the highest */
    size_t first;  /* where element 0 lies in it */
} order;

/* A random permutation of the dimensions, with random gaps and directions. */
static order
random_order(const int64_t *shape, int holes)
{
    int place[DIMS] = {0, 1, 2, 3};
    order o = {{0}, 1, 0};
    for (int d = DIMS - 1; d > 0; d--) {
        const int other = (int)(random_bits() % (uint64_t)(d + 1)), kept = place[d];
        place[d] = place[other];
        place[other] = kept;
    }
    int64_t stride = 1;
    for (int d = 0; d < DIMS; d++) {
        const int64_t size = shape[place[d]];
        o.strides[place[d]] = stride;
        o.extent += (size_t)(size > 0 ? (size - 1) * stride : 0);
        stride *= size > 0 ? size : 1;
        stride += holes ? (int64_t)(random_bits() % 3) : 0;
    }
    for (int d = 0; d < DIMS && holes; d++) {
        if (random_bits() % 2 && shape[d] > 0) {
            o.first += (size_t)((shape[d] - 1) * o.strides[d]);
            o.strides[d] = -o.strides[d];
        }
    }
    return o;
}

/* Copies between the packed array and the ordered one, one element at a time. */
static void
reorder(const int64_t *shape, const order *o, size_t size, char *packed, char *ordered, int to_packed)
{
    int64_t at[DIMS];
    ordered += o->first * size;
    for (at[0] = 0; at[0] < shape[0]; at[0]++) {
        for (at[1] = 0; at[1] < shape[1]; at[1]++) {
            for (at[2] = 0; at[2] < shape[2]; at[2]++) {
                for (at[3] = 0; at[3] < shape[3]; at[3]++, packed += size) {
                    int64_t offset = 0;
                    for (int d = 0; d < DIMS; d++) {
                        offset += at[d] * o->strides[d];
                    }
                    char *element = ordered + offset * (int64_t)size;
                    memcpy(to_packed ? packed : element, to_packed ? element : packed, size);
                }
            }
        }
    }
}

static void
check_strided(const bwd_isa *isa, int format, const int64_t *shape, int holes)
{
    const size_t n = (size_t)(shape[0] * shape[1] * shape[2] * shape[3]);
    const size_t sizes[ARRAYS] = {n, n, n, n, n};
    arrays packed = arrays_new(format, sizes);
    order orders[ARRAYS];
    size_t extents[ARRAYS];
    for (int k = 0; k < ARRAYS; k++) {
        orders[k] = random_order(shape, holes);
        extents[k] = orders[k].extent;
    }
    arrays apart = arrays_new(format, extents);
    char *element0[ARRAYS];
    for (int k = 0; k < ARRAYS; k++) {
        const size_t size = bwd_dtype_size(apart.dtype[k]);
        element0[k] = (char *)apart.at[k] + orders[k].first * size;
        reorder(shape, &orders[k], size, packed.at[k], apart.at[k], 0);
    }
    arrays before = arrays_copy(&apart), after = arrays_copy(&packed);

    bwd_job expected = job_of(&packed, format, n), job = job_of(&apart, format, n), scan = {0};
    job.param = element0[0];
    job.grad = element0[1];
    for (int k = 0; k < BWD_MAX_STATES; k++) {
        job.state[k] = element0[2 + k];
    }
    const bwd_layout layout = {
        .ndim = DIMS,
        .shape = shape,
        .param_strides = orders[0].strides,
        .grad_strides = orders[1].strides,
        .state_strides = {orders[2].strides, orders[3].strides, orders[4].strides},
    };
    expect(bwd_step(isa, NULL, &expected) == BWD_OK, "step failed", isa->name, format, n);
    expect(bwd_step_strided(isa, NULL, &job, &layout) == BWD_OK, "strided step failed", isa->name, format, n);
    expect(same_sums(&job, &expected), "strided sums differ", isa->name, format, n);
    expect(bwd_scan_strided(isa, NULL, apart.dtype[1], element0[1], DIMS, shape, orders[1].strides, &scan.grad_sq_sum,
                            &scan.nonfinite) == BWD_OK,
           "strided scan failed", isa->name, format, n);
    expect(same_sums(&scan, &expected), "strided scan sums differ", isa->name, format, n);
    for (int k = 0; k < ARRAYS; k++) {
        reorder(shape, &orders[k], bwd_dtype_size(apart.dtype[k]), after.at[k], apart.at[k], 1);
        /* put the result into the untouched copy: what remains different was written in a hole */
        reorder(shape, &orders[k], bwd_dtype_size(apart.dtype[k]), after.at[k], before.at[k], 0);
    }
    expect(arrays_equal(&after, &packed), "strided bits differ", isa->name, format, n);
    expect(arrays_equal(&before, &apart), "strided step wrote between its elements", isa->name, format, n);
    arrays_free(&packed);
    arrays_free(&apart);
    arrays_free(&before);
    arrays_free(&after);
}

static void
check_refusals(const bwd_isa *isa, int format)
{
    const size_t n = 70, sizes[ARRAYS] = {n, n, n, n, n};
    const double nan_value = (double)NAN;
    arrays a = arrays_new(format, sizes), before = arrays_copy(&a);
    const int64_t shape[] = {7, 10}, short_shape[] = {7, 9}, negative[] = {-7, -10}, strides[] = {10, 1};
    int64_t many[65];
    for (int d = 0; d < 65; d++) {
        many[d] = 1;
    }
    const struct {
        int ndim;
        const int64_t *shape;
    } bad_shapes[] = {{2, short_shape}, {2, negative}, {-1, shape}, {65, many}, {0, shape}};
    const struct {
        bwd_status status;
        int rule, format, hyper;
        double value, step;
    } bad[] = {
        {BWD_BAD_RULE, -1, format, 0, 0.1, 1},
        {BWD_BAD_RULE, BWD_RULE_COUNT, format, 0, 0.1, 1},
        {BWD_BAD_FORMAT, rule, -1, 0, 0.1, 1},
        {BWD_BAD_FORMAT, rule, BWD_FORMAT_COUNT, 0, 0.1, 1},
        {BWD_BAD_HYPER, rule, format, 0, -0.1, 1},
        {BWD_BAD_HYPER, rule, format, 1, 1.0, 1},
        {BWD_BAD_HYPER, rule, format, 3, nan_value, 1},
        {BWD_BAD_HYPER, rule, format, 5, 0.5, 1},
        {BWD_BAD_STEP, rule, format, 0, 0.1, 0},
        {BWD_BAD_STEP, rule, format, 0, 0.1, nan_value},
        {BWD_BAD_STEP, rule, format, 0, 0.1, (double)INFINITY},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        bwd_job job = job_of(&a, bad[i].format, n);
        job.rule = bad[i].rule;
        job.hyper[bad[i].hyper] = bad[i].value;
        job.step = bad[i].step;
        const bwd_layout layout = {2, shape, strides, strides, {strides, strides, strides}};
        expect(bwd_step(isa, NULL, &job) == bad[i].status, "wrong answer to a wrong job", isa->name, (int)i, n);
        expect(bwd_step_strided(isa, NULL, &job, &layout) == bad[i].status, "wrong strided answer", isa->name, (int)i,
               n);
        expect(strlen(bwd_status_text(bad[i].status)) > 10, "no text", isa->name, (int)i, n);
    }
    for (size_t i = 0; i < sizeof bad_shapes / sizeof *bad_shapes; i++) {
        bwd_job job = job_of(&a, format, n);
        const bwd_layout layout = {
            bad_shapes[i].ndim, bad_shapes[i].shape, strides, strides, {strides, strides, strides}};
        expect(bwd_step_strided(isa, NULL, &job, &layout) == BWD_BAD_LAYOUT, "wrong layout taken", isa->name, (int)i,
               n);
    }
    double sum;
    uint64_t count;
    expect(bwd_scan(isa, NULL, BWD_DTYPE_COUNT, a.at[1], n, &sum, &count) == BWD_BAD_FORMAT, "scan took a wrong dtype",
           isa->name, format, n);
    expect(arrays_equal(&a, &before), "a refused job changed an array", isa->name, format, n);
    expect(strcmp(bwd_status_text((bwd_status)99), "unknown status") == 0, "no text for 99", isa->name, format, n);
    arrays_free(&a);
    arrays_free(&before);
}

/* A gradient that is one element seen n times: strides of zero. */
static void
check_broadcast_gradient(const bwd_isa *isa, int format)
{
    const int64_t shape[] = {33, 70}, strides[] = {70, 1}, zeros[] = {0, 0};
    const size_t n = 33 * 70, sizes[ARRAYS] = {n, n, n, n, n};
    arrays a = arrays_new(format, sizes), b = arrays_copy(&a);
    const size_t size = bwd_dtype_size(a.dtype[1]);
    for (size_t i = 1; i < n; i++) {
        memcpy((char *)b.at[1] + i * size, b.at[1], size);
    }
    bwd_job spread = job_of(&a, format, n), full = job_of(&b, format, n);
    const bwd_layout layout = {2, shape, strides, zeros, {strides, strides, strides}};
    expect(bwd_step_strided(isa, NULL, &spread, &layout) == BWD_OK && bwd_step(isa, NULL, &full) == BWD_OK,
           "step failed", isa->name, format, n);
    expect(same_sums(&spread, &full), "broadcast sums differ", isa->name, format, n);
    expect(memcmp(a.at[0], b.at[0], a.bytes[0]) == 0, "broadcast bits differ", isa->name, format, n);
    arrays_free(&a);
    arrays_free(&b);
}

int
main(void)
{
    static const size_t sizes[] = {0,   1,   15,   16,   17,   63,    64,    65,    127,
                                   128, 129, 1023, 1024, 1025, 16383, 16384, 16385, 50001};
    static const int64_t shapes[][DIMS] = {
        {1, 1, 1, 1}, {0, 3, 2, 1}, {3, 1, 5, 1}, {2, 3, 5, 7}, {1, 64, 1, 65}, {9, 11, 13, 17}, {130, 1, 1, 130},
    };
    int checked = 0;
    for (int cell = 0; cell < BWD_RULE_COUNT * BWD_FORMAT_COUNT; cell++) {
        const int format = cell % BWD_FORMAT_COUNT;
        rule = cell / BWD_FORMAT_COUNT;
        for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
            check_contiguous(format, sizes[i]);
        }
        const bwd_isa *isa;
        for (int i = 0; (isa = bwd_isa_at(i)); i++) {
            if (!bwd_isa_possible(isa)) {
                continue;
            }
            checked++;
            check_refusals(isa, format);
            check_broadcast_gradient(isa, format);
            for (size_t k = 0; k < sizeof shapes / sizeof *shapes; k++) {
                check_strided(isa, format, shapes[k], 0);
                check_strided(isa, format, shapes[k], 1);
            }
        }
    }
    printf("%d rules x formats x isas, %d failures\n", checked, failures);
    return failures != 0;
}
