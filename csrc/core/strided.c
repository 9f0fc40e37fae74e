/* The same pass for arrays of one shape whose memory layouts differ: gather a tile, step it, scatter it back. */
#include <stdbool.h>

#include "core/run.h"

/* 1 Ki elements: four arrays of them stay in the first-level cache. */
enum { TILE = 1024, MAX_DIMS = 64, MAX_ARRAYS = 2 + BWD_MAX_STATES, WIDEST = 8 };
_Static_assert(TILE % BWD_LANES == 0, "a tile must end where the lanes end");

typedef struct walk {
    int ndim, arrays;
    size_t n;
    int64_t shape[MAX_DIMS];
    int64_t strides[MAX_ARRAYS][MAX_DIMS];
    char *base[MAX_ARRAYS]; /* element 0 of grad, param, then the states; of grad alone when scanning */
} walk;

/* Drops dimensions of one element and joins neighbours that every array walks in one stride. */
static bwd_status
walk_begin(walk *w, int ndim, const int64_t *shape, int arrays, const int64_t *const *strides)
{
    if (ndim < 0 || ndim > MAX_DIMS) {
        return BWD_BAD_LAYOUT;
    }
    w->arrays = arrays;
    w->ndim = 0;
    w->n = 1;
    for (int d = 0; d < ndim; d++) {
        if (shape[d] < 0) {
            return BWD_BAD_LAYOUT;
        }
        w->n *= (size_t)shape[d];
        if (shape[d] == 1) {
            continue;
        }
        bool joins = w->ndim > 0;
        for (int a = 0; a < arrays && joins; a++) {
            joins = w->strides[a][w->ndim - 1] == shape[d] * strides[a][d];
        }
        if (joins) {
            w->ndim--;
        }
        w->shape[w->ndim] = joins ? w->shape[w->ndim] * shape[d] : shape[d];
        for (int a = 0; a < arrays; a++) {
            w->strides[a][w->ndim] = strides[a][d];
        }
        w->ndim++;
    }
    return BWD_OK;
}

static bool
walk_contiguous(const walk *w)
{
    bool contiguous = w->ndim <= 1;
    for (int a = 0; a < w->arrays && w->ndim == 1; a++) {
        contiguous = contiguous && w->strides[a][0] == 1;
    }
    return contiguous;
}

static inline void
copy_run(char *packed, char *apart, int64_t step, int64_t count, size_t size, bool scatter)
{
    for (int64_t i = 0; i < count; i++) {
        char *one = packed + i * (int64_t)size, *other = apart + i * step;
        memcpy(scatter ? other : one, scatter ? one : other, size);
    }
}

/* Where element `at` lies. */
static void
walk_seek(const walk *w, size_t at, int64_t *index)
{
    for (int d = w->ndim - 1; d >= 0; d--) {
        index[d] = (int64_t)(at % (size_t)w->shape[d]);
        at /= (size_t)w->shape[d];
    }
}

/* Moves n elements of one array, from `first` on, between `packed` and the array. Leaves in `index` where the next ones
 * begin. */
static void
walk_move(const walk *w, int array, const int64_t *first, int64_t *index, size_t n, char *packed, size_t size,
          bool scatter)
{
    const int64_t *strides = w->strides[array];
    const int last = w->ndim - 1;
    memcpy(index, first, (size_t)w->ndim * sizeof *index);
    while (n > 0) {
        int64_t offset = 0;
        for (int d = 0; d <= last; d++) {
            offset += index[d] * strides[d];
        }
        const int64_t left = w->shape[last] - index[last];
        const int64_t count = (size_t)left < n ? left : (int64_t)n;
        const int64_t step = strides[last] * (int64_t)size;
        char *apart = w->base[array] + offset * (int64_t)size;
        /* a constant size makes each element one move instead of a call */
        if (size == 2) {
            copy_run(packed, apart, step, count, 2, scatter);
        }
        else if (size == 4) {
            copy_run(packed, apart, step, count, 4, scatter);
        }
        else {
            copy_run(packed, apart, step, count, 8, scatter);
        }
        packed += (size_t)count * size;
        n -= (size_t)count;
        index[last] += count;
        for (int d = last; d > 0 && index[d] == w->shape[d]; d--) {
            index[d] = 0;
            index[d - 1]++;
        }
    }
}

static void
walk_tiles(const bwd_run *run, const void *arrays, size_t at, size_t left, bwd_seen *seen)
{
    const walk *w = arrays;
    size_t size[MAX_ARRAYS];
    union {
        double align;
        char bytes[TILE * WIDEST];
    } tile[MAX_ARRAYS];
    int64_t first[MAX_DIMS], next[MAX_DIMS];
    void *state[BWD_MAX_STATES] = {NULL};

    for (int a = 0; a < w->arrays; a++) {
        size[a] = bwd_dtype_size(a == 0 ? run->grad : a == 1 ? run->param : run->state);
    }
    for (int k = 0; k < run->state_count; k++) {
        state[k] = tile[2 + k].bytes;
    }
    walk_seek(w, at, first);
    while (left > 0) {
        const size_t n = left < TILE ? left : TILE;
        for (int a = 0; a < w->arrays; a++) {
            walk_move(w, a, first, next, n, tile[a].bytes, size[a], false);
        }
        bwd_run_span(run, n, tile[1].bytes, tile[0].bytes, state, seen);
        for (int a = 1; a < w->arrays; a++) {
            walk_move(w, a, first, next, n, tile[a].bytes, size[a], true);
        }
        memcpy(first, next, (size_t)w->ndim * sizeof *next);
        left -= n;
    }
}

bwd_status
bwd_step_strided(const bwd_isa *isa, bwd_pool *pool, bwd_job *job, const bwd_layout *layout)
{
    walk w;
    bwd_run run;
    bwd_status status = bwd_run_step(&run, isa, job);
    if (status != BWD_OK) {
        return status;
    }
    const int64_t *strides[MAX_ARRAYS] = {layout->grad_strides, layout->param_strides};
    /* only the scatter writes through these, and it leaves array 0 alone */
    w.base[0] = (char *)(uintptr_t)job->grad;
    w.base[1] = job->param;
    for (int k = 0; k < run.state_count; k++) {
        strides[2 + k] = layout->state_strides[k];
        w.base[2 + k] = job->state[k];
    }
    status = walk_begin(&w, layout->ndim, layout->shape, 2 + run.state_count, strides);
    if (status != BWD_OK) {
        return status;
    }
    if (w.n != job->n) {
        return BWD_BAD_LAYOUT;
    }
    if (walk_contiguous(&w)) {
        bwd_run_flat(&run, pool, job, &job->grad_sq_sum, &job->nonfinite);
    }
    else {
        bwd_run_pass(&run, pool, w.n, walk_tiles, &w, &job->grad_sq_sum, &job->nonfinite);
    }
    return BWD_OK;
}

bwd_status
bwd_scan_strided(const bwd_isa *isa, bwd_pool *pool, enum bwd_dtype dtype, const void *grad, int ndim,
                 const int64_t *shape, const int64_t *strides, double *sq_sum, uint64_t *nonfinite)
{
    walk w;
    bwd_run run;
    bwd_status status = bwd_run_scan(&run, isa, dtype);
    if (status == BWD_OK) {
        status = walk_begin(&w, ndim, shape, 1, &strides);
    }
    if (status != BWD_OK) {
        return status;
    }
    if (walk_contiguous(&w)) {
        const bwd_job job = {.n = w.n, .grad = grad};
        bwd_run_flat(&run, pool, &job, sq_sum, nonfinite);
    }
    else {
        w.base[0] = (char *)(uintptr_t)grad;
        bwd_run_pass(&run, pool, w.n, walk_tiles, &w, sq_sum, nonfinite);
    }
    return BWD_OK;
}
