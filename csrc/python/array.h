/* What the NumPy entry points take as an array: a numpy.ndarray, or anything that lends its memory by DLPack. */
#ifndef BWD_ARRAY_H
#define BWD_ARRAY_H

#include "python/py.h"

#include "core/dispatch.h"

/* One argument as plain memory. `keep` holds what owns the memory: the array itself, or the producer's capsule. */
typedef struct bwd_array {
    PyObject *keep;
    const char *name; /* of the argument, for messages */
    char *data;
    const int64_t *shape;
    int ndim;
    int dtype; /* enum bwd_dtype */
    size_t n;
} bwd_array;

int bwd_array_exec(void);

/* Asks `object` for its memory and takes hold of it; every later question runs no Python code. The name is for
 * messages. Returns -1 with an exception set for what lends no memory of this machine. Release it in either case. */
int bwd_array_hold(bwd_array *array, PyObject *object, const char *name);
/* Fills the rest. Raises for a dtype without a kernel, memory that is not row-major, misaligned, or read-only where it
 * will be written. */
int bwd_array_look(bwd_array *array, int written);
/* Lets go of the memory. */
void bwd_array_release(bwd_array *array);

#endif
