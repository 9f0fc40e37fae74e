/* The only file that sees NumPy. It knows nothing of rules, of torch or of hooks. */
#include "python/array.h"

#include "python/dlpack.h"

#define NPY_NO_DEPRECATED_API NPY_2_0_API_VERSION
#define NPY_TARGET_VERSION    NPY_1_25_API_VERSION
#include <numpy/arrayobject.h>

_Static_assert(sizeof(npy_intp) == sizeof(int64_t), "a shape is lent as it lies in NumPy");

#define DTYPE_TEXT(T, text) " " text
static const char known_dtypes[] = BWD_DTYPES(DTYPE_TEXT);
#undef DTYPE_TEXT

int
bwd_array_exec(void)
{
    return PyArray_ImportNumPyAPI();
}

void
bwd_array_release(bwd_array *array)
{
    Py_CLEAR(array->keep);
}

/* ---- DLPack ----------------------------------------------------------------------------------------------------- */

/* The tensor in a capsule that nobody has consumed, and its flags. The capsule keeps the memory alive and gives it back
 * to its producer when it goes, so it is looked into and not consumed. */
static const bwd_dl_tensor *
tensor_of(PyObject *capsule, uint64_t *flags)
{
    *flags = 0;
    if (PyCapsule_IsValid(capsule, "dltensor_versioned")) {
        const bwd_dl_managed_versioned *managed = PyCapsule_GetPointer(capsule, "dltensor_versioned");
        if (managed->major != BWD_DL_MAJOR) {
            return NULL;
        }
        *flags = managed->flags;
        return &managed->tensor;
    }
    return PyCapsule_IsValid(capsule, "dltensor") ? PyCapsule_GetPointer(capsule, "dltensor") : NULL;
}

/* object.__dlpack__(max_version=(1, 0), copy=False), or without arguments where the producer knows none of them. */
static PyObject *
ask_for_capsule(PyObject *object)
{
    PyObject *method = PyObject_GetAttrString(object, "__dlpack__"), *none = PyTuple_New(0), *capsule = NULL;
    PyObject *wishes = Py_BuildValue("{s:(ii),s:O}", "max_version", BWD_DL_MAJOR, 0, "copy", Py_False);
    if (method && none && wishes) {
        capsule = PyObject_Call(method, none, wishes);
        if (!capsule && PyErr_ExceptionMatches(PyExc_TypeError)) {
            PyErr_Clear();
            capsule = PyObject_Call(method, none, NULL);
        }
    }
    Py_XDECREF(wishes);
    Py_XDECREF(none);
    Py_XDECREF(method);
    return capsule;
}

static int
hold_capsule(bwd_array *array, PyObject *object)
{
    PyObject *device = PyObject_CallMethod(object, "__dlpack_device__", NULL);
    int type = 0, id, known;
    uint64_t flags;
    if (!device) {
        return -1;
    }
    known = PyTuple_Check(device) && PyArg_ParseTuple(device, "ii", &type, &id);
    Py_DECREF(device);
    if (!known || (type != BWD_DL_CPU && type != BWD_DL_CUDA_HOST)) {
        if (!PyErr_Occurred()) {
            PyErr_Format(PyExc_TypeError, "%s lies on DLPack device type %d: pass an array in CPU memory", array->name,
                         type);
        }
        return -1;
    }
    array->keep = ask_for_capsule(object);
    if (array->keep && !tensor_of(array->keep, &flags)) {
        PyErr_Format(PyExc_TypeError,
                     "%s.__dlpack__() returned %R, no DLPack tensor of version %d or before: pass a numpy.ndarray",
                     array->name, array->keep, BWD_DL_MAJOR);
        return -1;
    }
    return array->keep ? 0 : -1;
}

static int
row_major(const bwd_dl_tensor *tensor)
{
    int64_t stride = 1;
    int apart = 0;
    for (int d = tensor->ndim - 1; tensor->strides && d >= 0; d--) {
        apart |= tensor->shape[d] != 1 && tensor->strides[d] != stride;
        stride *= tensor->shape[d];
    }
    return !apart || stride == 0; /* without elements there is nothing out of order */
}

static int
look_into_capsule(bwd_array *array, int written)
{
    uint64_t flags;
    const bwd_dl_tensor *tensor = tensor_of(array->keep, &flags);
    array->dtype = bwd_dl_find_dtype(tensor->dtype);
    if (array->dtype < 0) {
        PyErr_Format(PyExc_TypeError, "%s has DLPack type code %d of %d bits: pass one of%s", array->name,
                     tensor->dtype.code, tensor->dtype.bits, known_dtypes);
        return -1;
    }
    if (!row_major(tensor)) {
        PyErr_Format(PyExc_ValueError,
                     "%s is not C-contiguous: pass an array whose elements lie side by side in memory (row-major)",
                     array->name);
        return -1;
    }
    if (written && (flags & (BWD_DL_READ_ONLY | BWD_DL_COPIED))) {
        PyErr_Format(PyExc_ValueError, "%s is read-only or lent as a copy and would be written: pass a writeable array",
                     array->name);
        return -1;
    }
    array->data = tensor->data ? (char *)tensor->data + tensor->byte_offset : NULL;
    array->ndim = tensor->ndim;
    array->shape = tensor->shape;
    array->n = 1;
    for (int d = 0; d < tensor->ndim; d++) {
        array->n *= (size_t)tensor->shape[d];
    }
    if (!array->data && array->n > 0) {
        PyErr_Format(PyExc_ValueError, "%s has no memory: pass an array that holds its elements", array->name);
        return -1;
    }
    return 0;
}

/* ---- NumPy ------------------------------------------------------------------------------------------------------ */

/* The dtype of a native-endian array by the name of its scalar type, which needs no import of the package that
 * registered it (and, unlike dtype.name, no Python code). -1 with an exception set: not one that is supported. */
static int
dtype_of_ndarray(PyArrayObject *array, const char *name)
{
    PyArray_Descr *descr = PyArray_DESCR(array);
    PyObject *text = PyType_GetName(descr->typeobj), *utf8 = text ? PyUnicode_AsUTF8String(text) : NULL;
    const char *chars = utf8 ? PyBytes_AsString(utf8) : NULL;
    int dtype = -1;
    if (!chars) {
        goto done;
    }
    dtype = bwd_dtype_find(chars);
    if (dtype < 0) {
        PyErr_Format(PyExc_TypeError, "%s has dtype %S: pass one of%s (bfloat16 is in ml_dtypes)", name,
                     (PyObject *)descr, known_dtypes);
    }
    else if (!PyArray_ISNOTSWAPPED(array)) {
        PyErr_Format(PyExc_ValueError, "%s has dtype %S, not in this machine's byte order: pass %s.astype(\"%s\")",
                     name, (PyObject *)descr, name, chars);
        dtype = -1;
    }
done:
    Py_XDECREF(utf8);
    Py_XDECREF(text);
    return dtype;
}

static int
look_into_ndarray(bwd_array *view, int written)
{
    PyArrayObject *array = (PyArrayObject *)view->keep;
    view->dtype = dtype_of_ndarray(array, view->name);
    if (view->dtype < 0) {
        return -1;
    }
    if (!PyArray_IS_C_CONTIGUOUS(array)) {
        PyErr_Format(PyExc_ValueError,
                     "%s is not C-contiguous: pass an array whose elements lie side by side in memory, for instance "
                     "numpy.ascontiguousarray(%s)",
                     view->name, view->name);
        return -1;
    }
    if (written && !PyArray_ISWRITEABLE(array)) {
        PyErr_Format(PyExc_ValueError, "%s is read-only and would be written: pass a writeable array", view->name);
        return -1;
    }
    view->data = PyArray_DATA(array);
    view->ndim = PyArray_NDIM(array);
    view->shape = (const int64_t *)PyArray_DIMS(array);
    view->n = (size_t)PyArray_SIZE(array);
    return 0;
}

/* ---- either ----------------------------------------------------------------------------------------------------- */

int
bwd_array_hold(bwd_array *array, PyObject *object, const char *name)
{
    array->name = name;
    if (PyArray_CheckExact(object)) {
        array->keep = Py_NewRef(object);
        return 0;
    }
    /* A subclass of ndarray lends plain memory too, but what it means by its elements (masks, units) would be lost. */
    if (!PyArray_Check(object) && PyObject_HasAttrString(object, "__dlpack__") &&
        PyObject_HasAttrString(object, "__dlpack_device__")) {
        return hold_capsule(array, object);
    }
    PyErr_Format(PyExc_TypeError,
                 "%s is a %R: pass a plain numpy.ndarray, for instance numpy.asarray(%s), or an array that lends its "
                 "memory by __dlpack__",
                 name, (PyObject *)Py_TYPE(object), name);
    return -1;
}

int
bwd_array_look(bwd_array *array, int written)
{
    const int is_ndarray = PyArray_CheckExact(array->keep);
    if ((is_ndarray ? look_into_ndarray(array, written) : look_into_capsule(array, written)) < 0) {
        return -1;
    }
    if ((uintptr_t)array->data % bwd_dtype_size(array->dtype) != 0) {
        PyErr_Format(PyExc_ValueError, "%s is misaligned at address %p: pass a copy of it", array->name, array->data);
        return -1;
    }
    return 0;
}
