/* The DLPack C ABI, version 1, as far as it is used here: struct layouts of the public specification
 * (https://dmlc.github.io/dlpack/latest/c_api.html), declared so that nothing of torch is needed to build. */
#ifndef BWD_DLPACK_H
#define BWD_DLPACK_H

#include "core/layout.h"

enum { BWD_DL_MAJOR = 1 };
enum { BWD_DL_CPU = 1, BWD_DL_CUDA = 2, BWD_DL_CUDA_HOST = 3 };
enum { BWD_DL_FLOAT = 2, BWD_DL_BFLOAT = 4 };

typedef struct bwd_dl_device {
    int32_t type;
    int32_t id;
} bwd_dl_device;

typedef struct bwd_dl_dtype {
    uint8_t code;
    uint8_t bits;
    uint16_t lanes;
} bwd_dl_dtype;

/* The storage type that it is here, or -1. */
static inline int
bwd_dl_find_dtype(bwd_dl_dtype dtype)
{
    if (dtype.lanes != 1) {
        return -1;
    }
    if (dtype.code == BWD_DL_BFLOAT) {
        return dtype.bits == 16 ? BWD_bf16 : -1;
    }
    if (dtype.code != BWD_DL_FLOAT) {
        return -1;
    }
    return dtype.bits == 32 ? BWD_f32 : dtype.bits == 64 ? BWD_f64 : dtype.bits == 16 ? BWD_f16 : -1;
}

typedef struct bwd_dl_tensor {
    void *data;
    bwd_dl_device device;
    int32_t ndim;
    bwd_dl_dtype dtype;
    int64_t *shape;
    int64_t *strides; /* in elements; NULL means row-major */
    uint64_t byte_offset;
} bwd_dl_tensor;

/* What a capsule named "dltensor_versioned" holds; one named "dltensor" begins with the tensor itself. */
enum { BWD_DL_READ_ONLY = 1, BWD_DL_COPIED = 2 };
typedef struct bwd_dl_managed_versioned {
    uint32_t major, minor;
    void *manager;
    void (*deleter)(struct bwd_dl_managed_versioned *self);
    uint64_t flags;
    bwd_dl_tensor tensor;
} bwd_dl_managed_versioned;

/* What the capsule type(tensor).__dlpack_c_exchange_api__ points at. Functions that are not called stay opaque. */
typedef struct bwd_dl_exchange {
    uint32_t major, minor;
    struct bwd_dl_exchange *older;
    void (*managed_tensor_allocator)(void);
    void (*managed_tensor_from_object)(void);
    void (*managed_tensor_to_object)(void);
    int (*tensor_from_object)(void *object, bwd_dl_tensor *out); /* borrowed view, may be NULL */
    int (*current_stream)(int32_t device_type, int32_t device_id, void **stream);
} bwd_dl_exchange;

#endif
