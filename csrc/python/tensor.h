/* torch tensors as plain C views: pointer, shape, strides, storage type. Knows torch only by attribute names. */
#ifndef BWD_TENSOR_H
#define BWD_TENSOR_H

#include "python/py.h"

#include "core/layout.h"
#include "core/strides.h"
#include "python/dlpack.h"

/* What is looked up of torch once per plan: types, callables, interned names, the exchange table. */
typedef struct bwd_torch {
    const bwd_dl_exchange *exchange; /* NULL: fall back on data_ptr() and friends */
    PyObject *tensor_type;           /* torch.Tensor */
    PyObject *parameter_type;        /* torch.nn.Parameter */
    PyObject *is_neg;                /* torch.Tensor.is_neg, unbound */
    PyObject *resolve_neg;
    PyObject *increment_version;       /* torch._C._increment_version */
    PyObject *dtypes[BWD_DTYPE_COUNT]; /* torch.float32 and so on */
    PyObject *name_grad, *name_local_tensor, *name_data_ptr, *name_stride, *name_shape, *name_dtype, *name_device;
    PyObject *name_type;
} bwd_torch;

int bwd_torch_init(bwd_torch *torch, int use_exchange);
int bwd_torch_traverse(bwd_torch *torch, visitproc visit, void *arg);
void bwd_torch_clear(bwd_torch *torch);

/* A borrowed look at one tensor: valid while the tensor is referenced and nobody resizes it. */
typedef struct bwd_view {
    char *data;
    int ndim;
    const int64_t *shape, *strides; /* strides in elements */
    enum bwd_dtype dtype;
    size_t n;
    int64_t owned[2 * BWD_MAX_DIMS]; /* shape and strides where torch lends none */
} bwd_view;

/* The plain tensor behind `object`: a DTensor's local shard, else the object itself. New reference. */
PyObject *bwd_local(const bwd_torch *torch, PyObject *object);

/* Fills `view`; `what` ("gradient", "exp_avg", ...) and `name` (the parameter's) go into the message.
 * Raises `error` for anything but a dense CPU tensor of a known storage type. Returns -1 with an exception set. */
int bwd_view_of(const bwd_torch *torch, PyObject *tensor, const char *what, PyObject *name, PyObject *error,
                bwd_view *view);

#endif
