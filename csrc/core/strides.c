#include "strides.h"

size_t
bwd_count(int ndim, const int64_t *shape)
{
    size_t n = 1;
    for (int d = 0; d < ndim; d++) {
        n *= (size_t)shape[d];
    }
    return n;
}

bool
bwd_is_contiguous(int ndim, const int64_t *shape, const int64_t *strides)
{
    int64_t expected = 1;
    for (int d = ndim - 1; d >= 0; d--) {
        if (shape[d] > 1 && strides[d] != expected) {
            return false;
        }
        expected *= shape[d];
    }
    return true;
}

/* Dimensions longer than 1, by rising stride; returns how many. Insertion sort: tensors have a handful of them. */
static int
by_stride(int ndim, const int64_t *shape, const int64_t *strides, int *order)
{
    int count = 0;
    for (int d = 0; d < ndim; d++) {
        if (shape[d] <= 1) {
            continue;
        }
        int at = count++;
        for (; at > 0 && strides[order[at - 1]] > strides[d]; at--) {
            order[at] = order[at - 1];
        }
        order[at] = d;
    }
    return count;
}

bool
bwd_is_dense(int ndim, const int64_t *shape, const int64_t *strides)
{
    int order[BWD_MAX_DIMS];
    const int count = by_stride(ndim, shape, strides, order);
    int64_t expected = 1;
    for (int k = 0; k < count; k++) {
        if (strides[order[k]] != expected) {
            return false;
        }
        expected *= shape[order[k]];
    }
    return true;
}

bool
bwd_may_overlap(int ndim, const int64_t *shape, const int64_t *strides)
{
    int order[BWD_MAX_DIMS];
    const int count = by_stride(ndim, shape, strides, order);
    int64_t last = 0; /* the furthest offset that the shorter strides reach together */
    for (int k = 0; k < count; k++) {
        const int d = order[k];
        if (strides[d] <= last) {
            return true;
        }
        last += (shape[d] - 1) * strides[d];
    }
    return false;
}

bool
bwd_same_strides(int ndim, const int64_t *shape, const int64_t *a, const int64_t *b)
{
    for (int d = 0; d < ndim; d++) {
        if (shape[d] > 1 && a[d] != b[d]) {
            return false;
        }
    }
    return true;
}

size_t
bwd_extent(int ndim, const int64_t *shape, const int64_t *strides)
{
    size_t last = 0;
    for (int d = 0; d < ndim; d++) {
        if (shape[d] == 0) {
            return 0;
        }
        last += (size_t)(shape[d] - 1) * (size_t)strides[d];
    }
    return last + 1;
}
