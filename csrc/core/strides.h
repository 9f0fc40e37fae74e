/* Questions about a strided layout: is it flat, does it write one element twice. Plain integers, no data touched. */
#ifndef BWD_STRIDES_H
#define BWD_STRIDES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* More dimensions than torch itself allows a tensor (64). */
enum { BWD_MAX_DIMS = 64 };

/* Number of elements: the product of the shape; 1 for a scalar. */
size_t bwd_count(int ndim, const int64_t *shape);

/* Elements lie one after the other in row-major order. */
bool bwd_is_contiguous(int ndim, const int64_t *shape, const int64_t *strides);

/* Elements fill a block without gaps or overlap, in any order of dimensions (channels_last, a transpose, ...). */
bool bwd_is_dense(int ndim, const int64_t *shape, const int64_t *strides);

/* Two indices may reach one element, as after expand(): such an array must not be written element by element. */
bool bwd_may_overlap(int ndim, const int64_t *shape, const int64_t *strides);

/* Both layouts visit the same offsets: equal strides wherever a dimension is longer than 1. */
bool bwd_same_strides(int ndim, const int64_t *shape, const int64_t *a, const int64_t *b);

/* Elements from the first to one past the last offset that is reached; 0 when there are none. Strides are >= 0. */
size_t bwd_extent(int ndim, const int64_t *shape, const int64_t *strides);

#endif
