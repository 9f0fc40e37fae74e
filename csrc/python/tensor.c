#include "python/tensor.h"

#include <string.h>

/* The exchange table of torch.Tensor, or NULL where this torch has none or speaks another major version. */
static const bwd_dl_exchange *
find_exchange(PyObject *tensor_type)
{
    PyObject *capsule = PyObject_GetAttrString(tensor_type, "__dlpack_c_exchange_api__");
    if (capsule == NULL) {
        PyErr_Clear();
        return NULL;
    }
    const bwd_dl_exchange *api = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
    Py_DECREF(capsule);
    if (api == NULL) {
        PyErr_Clear();
    }
    while (api != NULL && api->major > BWD_DL_MAJOR) {
        api = api->older;
    }
    return api != NULL && api->major == BWD_DL_MAJOR && api->tensor_from_object != NULL ? api : NULL;
}

int
bwd_torch_init(bwd_torch *torch, int use_exchange)
{
    int rc = -1;
    PyObject *module = PyImport_ImportModule("torch"), *nn = NULL, *native = NULL;
    if (module == NULL || (nn = PyImport_ImportModule("torch.nn")) == NULL ||
        (native = PyImport_ImportModule("torch._C")) == NULL) {
        goto done;
    }
    const struct {
        PyObject **slot;
        PyObject *owner;
        const char *attribute;
    } found[] = {
        {&torch->tensor_type, module, "Tensor"},
        {&torch->parameter_type, nn, "Parameter"},
#define DTYPE_OBJECT(T, text) {&torch->dtypes[BWD_##T], module, text},
        BWD_DTYPES(DTYPE_OBJECT)
#undef DTYPE_OBJECT
            {&torch->increment_version, native, "_increment_version"},
    };
    for (size_t i = 0; i < sizeof found / sizeof found[0]; i++) {
        if ((*found[i].slot = PyObject_GetAttrString(found[i].owner, found[i].attribute)) == NULL) {
            goto done;
        }
    }
    const struct {
        PyObject **slot;
        const char *text;
    } names[] = {
        {&torch->name_grad, "grad"},         {&torch->name_local_tensor, "_local_tensor"},
        {&torch->name_data_ptr, "data_ptr"}, {&torch->name_stride, "stride"},
        {&torch->name_shape, "shape"},       {&torch->name_dtype, "dtype"},
        {&torch->name_device, "device"},     {&torch->name_type, "type"},
    };
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        if ((*names[i].slot = PyUnicode_InternFromString(names[i].text)) == NULL) {
            goto done;
        }
    }
    if ((torch->is_neg = PyObject_GetAttrString(torch->tensor_type, "is_neg")) == NULL ||
        (torch->resolve_neg = PyObject_GetAttrString(torch->tensor_type, "resolve_neg")) == NULL) {
        goto done;
    }
    torch->exchange = use_exchange ? find_exchange(torch->tensor_type) : NULL;
    rc = 0;
done:
    Py_XDECREF(native);
    Py_XDECREF(nn);
    Py_XDECREF(module);
    return rc;
}

/* Every reference of the table, in one list for the two functions that must not forget one. */
/* clang-format off */
#define EACH_REFERENCE(X)                                              \
    X(tensor_type) X(parameter_type) X(is_neg) X(resolve_neg)          \
    X(increment_version) X(dtypes[BWD_f32]) X(dtypes[BWD_bf16])        \
    X(dtypes[BWD_f16]) X(dtypes[BWD_f64]) X(name_grad)                 \
    X(name_local_tensor) X(name_data_ptr) X(name_stride) X(name_shape) \
    X(name_dtype) X(name_device) X(name_type)
/* clang-format on */

int
bwd_torch_traverse(bwd_torch *torch, visitproc visit, void *arg)
{
#define VISIT(field) Py_VISIT(torch->field);
    EACH_REFERENCE(VISIT)
#undef VISIT
    return 0;
}

void
bwd_torch_clear(bwd_torch *torch)
{
#define CLEAR(field) Py_CLEAR(torch->field);
    EACH_REFERENCE(CLEAR)
#undef CLEAR
}

PyObject *
bwd_local(const bwd_torch *torch, PyObject *object)
{
    PyObject *type = (PyObject *)Py_TYPE(object);
    if (type == torch->parameter_type || type == torch->tensor_type) {
        return Py_NewRef(object);
    }
    PyObject *local = PyObject_GetAttr(object, torch->name_local_tensor);
    if (local == NULL && PyErr_ExceptionMatches(PyExc_AttributeError)) {
        PyErr_Clear();
        local = Py_NewRef(object);
    }
    return local;
}

/* A refusal in our words, whatever torch said: its own texts for these are dumps of C++ frames. */
static int
refuse(PyObject *error, const char *what, PyObject *name, PyObject *tensor, const char *why)
{
    PyErr_Clear();
    PyObject *layout = PyObject_GetAttrString(tensor, "layout");
    PyObject *dtype = layout ? PyObject_GetAttrString(tensor, "dtype") : NULL;
    PyObject *device = dtype ? PyObject_GetAttrString(tensor, "device") : NULL;
    if (device != NULL) {
        PyErr_Format(error, "%s of parameter %R (%S, %S, on %S): %s", what, name, dtype, layout, device, why);
    }
    else {
        PyErr_Clear();
        PyErr_Format(error, "%s of parameter %R (%R): %s", what, name, (PyObject *)Py_TYPE(tensor), why);
    }
    Py_XDECREF(device);
    Py_XDECREF(dtype);
    Py_XDECREF(layout);
    return -1;
}

static const char *const needs_dense_cpu =
    "the native step takes dense float32, float64, float16 or bfloat16 tensors in CPU memory; nothing was changed. "
    "Sparse gradients: build the embedding with sparse=False. Other dtypes or devices: use torch.optim.AdamW";
static const char *const not_materialised =
    "it has no memory of its own (a meta or fake tensor, or a tensor subclass whose data cannot be reached); "
    "materialise it before the first backward";

static int
view_by_exchange(const bwd_torch *torch, PyObject *tensor, bwd_view *view)
{
    bwd_dl_tensor lent;
    if (torch->exchange->tensor_from_object(tensor, &lent) != 0 || lent.device.type != BWD_DL_CPU ||
        lent.ndim > BWD_MAX_DIMS) {
        return -1;
    }
    view->data = lent.data ? (char *)lent.data + lent.byte_offset : NULL;
    view->ndim = lent.ndim;
    view->shape = lent.shape;
    view->strides = lent.strides;
    const int dtype = bwd_dl_find_dtype(lent.dtype);
    view->dtype = (enum bwd_dtype)dtype;
    if (lent.strides == NULL) {
        int64_t stride = 1;
        for (int d = lent.ndim - 1; d >= 0; d--) {
            view->owned[d] = stride;
            stride *= lent.shape[d];
        }
        view->strides = view->owned;
    }
    return dtype < 0 ? -1 : 0;
}

/* Copies a Python sequence of at most BWD_MAX_DIMS integers; returns its length or -1. */
static int
read_integers(PyObject *sequence, int64_t *out)
{
    const Py_ssize_t count = sequence ? PySequence_Size(sequence) : -1;
    if (count < 0 || count > BWD_MAX_DIMS) {
        return -1;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *item = PySequence_GetItem(sequence, i);
        out[i] = item ? (int64_t)PyLong_AsLongLong(item) : -1;
        Py_XDECREF(item);
        if (PyErr_Occurred()) {
            return -1;
        }
    }
    return (int)count;
}

/* For a torch without the exchange table: the same facts through five attribute calls. */
static int
view_by_attributes(const bwd_torch *torch, PyObject *tensor, bwd_view *view)
{
    int rc = -1;
    PyObject *shape = NULL, *stride = NULL, *dtype = NULL, *device = NULL, *type = NULL, *pointer = NULL;
    if ((device = PyObject_GetAttr(tensor, torch->name_device)) == NULL ||
        (type = PyObject_GetAttr(device, torch->name_type)) == NULL ||
        PyUnicode_CompareWithASCIIString(type, "cpu") != 0 ||
        (dtype = PyObject_GetAttr(tensor, torch->name_dtype)) == NULL) {
        goto done;
    }
    int found = 0;
    while (found < BWD_DTYPE_COUNT && torch->dtypes[found] != dtype) {
        found++;
    }
    if (found == BWD_DTYPE_COUNT) {
        goto done;
    }
    view->dtype = (enum bwd_dtype)found;
    shape = PyObject_GetAttr(tensor, torch->name_shape);
    if ((view->ndim = read_integers(shape, view->owned)) < 0 ||
        (stride = PyObject_CallMethodObjArgs(tensor, torch->name_stride, NULL)) == NULL ||
        read_integers(stride, view->owned + BWD_MAX_DIMS) != view->ndim ||
        (pointer = PyObject_CallMethodObjArgs(tensor, torch->name_data_ptr, NULL)) == NULL) {
        goto done;
    }
    view->shape = view->owned;
    view->strides = view->owned + BWD_MAX_DIMS;
    view->data = PyLong_AsVoidPtr(pointer);
    rc = PyErr_Occurred() ? -1 : 0;
done:
    Py_XDECREF(pointer);
    Py_XDECREF(stride);
    Py_XDECREF(shape);
    Py_XDECREF(dtype);
    Py_XDECREF(type);
    Py_XDECREF(device);
    return rc;
}

int
bwd_view_of(const bwd_torch *torch, PyObject *tensor, const char *what, PyObject *name, PyObject *error, bwd_view *view)
{
    if (!PyObject_TypeCheck(tensor, (PyTypeObject *)torch->tensor_type)) {
        PyErr_Format(
            error,
            "%s of parameter %R is %R, not a tensor; load a state_dict of this optimizer or of torch.optim.AdamW", what,
            name, tensor);
        return -1;
    }
    const int failed =
        torch->exchange ? view_by_exchange(torch, tensor, view) : view_by_attributes(torch, tensor, view);
    if (failed) {
        return refuse(error, what, name, tensor, needs_dense_cpu);
    }
    view->n = bwd_count(view->ndim, view->shape);
    if (view->data == NULL && view->n > 0) {
        return refuse(error, what, name, tensor, not_materialised);
    }
    return 0;
}
