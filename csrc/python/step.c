/* `_C.adamw_`: one AdamW step on NumPy arrays. The only file that sees NumPy; it knows nothing of torch or of hooks. */
#include "python/module.h"

#define NPY_NO_DEPRECATED_API NPY_2_0_API_VERSION
#define NPY_TARGET_VERSION    NPY_1_25_API_VERSION
#include <numpy/arrayobject.h>

/* In the order of the signature: param, grad, then the rule's states. */
enum { PARAM, GRAD, STATES, ARRAYS = STATES + BWD_adamw_STATE_COUNT };
static const char *const array_names[ARRAYS] = {"param", "grad", "exp_avg", "exp_avg_sq"};

static int
written(int which)
{
    return which != GRAD;
}

/* The dtype of a native-endian array by the name of its scalar type, which needs no import of the package that
 * registered it (and, unlike dtype.name, no Python code). -1 with an exception set: not one that is supported. */
static int
dtype_of(PyArrayObject *array, const char *name)
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
        PyErr_Format(PyExc_TypeError, "%s has dtype %S: pass float32, or bfloat16 from ml_dtypes", name,
                     (PyObject *)descr);
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

/* What one array must be by itself; its dtype, or -1 with an exception set. */
static int
check_array(PyObject *object, int which)
{
    const char *name = array_names[which];
    if (!PyArray_CheckExact(object)) {
        PyErr_Format(PyExc_TypeError, "%s is a %R: pass a plain numpy.ndarray, for instance numpy.asarray(%s)", name,
                     (PyObject *)Py_TYPE(object), name);
        return -1;
    }
    PyArrayObject *array = (PyArrayObject *)object;
    const int dtype = dtype_of(array, name);
    if (dtype < 0) {
        return -1;
    }
    if (!PyArray_IS_C_CONTIGUOUS(array)) {
        PyErr_Format(PyExc_ValueError,
                     "%s is not C-contiguous: pass an array whose elements lie side by side in memory, for instance "
                     "numpy.ascontiguousarray(%s)",
                     name, name);
        return -1;
    }
    if (!PyArray_ISALIGNED(array)) {
        PyErr_Format(PyExc_ValueError, "%s is misaligned at address %p: pass %s.copy()", name, PyArray_DATA(array),
                     name);
        return -1;
    }
    if (written(which) && !PyArray_ISWRITEABLE(array)) {
        PyErr_Format(PyExc_ValueError, "%s is read-only and would be written: pass a writeable array", name);
        return -1;
    }
    return dtype;
}

static PyObject *
shape_of(PyObject *array)
{
    return PyObject_GetAttrString(array, "shape");
}

/* All arrays have param's shape, and no two share memory (each pair has one that is written). */
static int
check_together(PyObject *const *objects)
{
    for (int i = 1; i < ARRAYS; i++) {
        PyArrayObject *array = (PyArrayObject *)objects[i], *param = (PyArrayObject *)objects[PARAM];
        if (!PyArray_SAMESHAPE(array, param)) {
            PyObject *have = shape_of(objects[i]), *want = shape_of(objects[PARAM]);
            if (have && want) {
                PyErr_Format(PyExc_ValueError, "%s has shape %R but param has shape %R: pass arrays of one shape",
                             array_names[i], have, want);
            }
            Py_XDECREF(have);
            Py_XDECREF(want);
            return -1;
        }
    }
    for (int i = 0; i < ARRAYS; i++) {
        for (int k = i + 1; k < ARRAYS; k++) {
            PyArrayObject *a = (PyArrayObject *)objects[i], *b = (PyArrayObject *)objects[k];
            const uintptr_t from_a = (uintptr_t)PyArray_DATA(a), from_b = (uintptr_t)PyArray_DATA(b);
            if (from_a < from_b + (uintptr_t)PyArray_NBYTES(b) && from_b < from_a + (uintptr_t)PyArray_NBYTES(a)) {
                PyErr_Format(PyExc_ValueError, "%s and %s share memory: pass separate arrays, for instance %s.copy()",
                             array_names[i], array_names[k], array_names[k]);
                return -1;
            }
        }
    }
    return 0;
}

/* The storage format of the arrays, or -1 with an exception set. */
static int
check_arrays(PyObject *const *objects)
{
    int dtypes[ARRAYS];
    for (int i = 0; i < ARRAYS; i++) {
        dtypes[i] = check_array(objects[i], i);
        if (dtypes[i] < 0) {
            return -1;
        }
    }
    if (check_together(objects) < 0) {
        return -1;
    }
    for (int i = STATES + 1; i < ARRAYS; i++) {
        if (dtypes[i] != dtypes[STATES]) {
            PyErr_Format(PyExc_TypeError, "%s has dtype %s but %s has dtype %s: pass states of one dtype",
                         array_names[i], bwd_dtype_name(dtypes[i]), array_names[STATES],
                         bwd_dtype_name(dtypes[STATES]));
            return -1;
        }
    }
    const int format = bwd_format_find(dtypes[PARAM], dtypes[GRAD], dtypes[STATES]);
    if (format < 0) {
        PyErr_Format(PyExc_TypeError,
                     "param, grad and states have dtypes %s, %s and %s: pass all float32, all bfloat16, or bfloat16 "
                     "param and grad with float32 states",
                     bwd_dtype_name(dtypes[PARAM]), bwd_dtype_name(dtypes[GRAD]), bwd_dtype_name(dtypes[STATES]));
    }
    return format;
}

/* 0, or -1 with a TypeError that names the argument. */
static int
number_of(PyObject *object, const char *name, double *number)
{
    *number = PyFloat_AsDouble(object);
    if (*number != -1.0 || !PyErr_Occurred()) {
        return 0;
    }
    /* Anything else, such as KeyboardInterrupt in a __float__, is not ours to replace. */
    if (PyErr_ExceptionMatches(PyExc_TypeError) || PyErr_ExceptionMatches(PyExc_OverflowError)) {
        PyErr_Clear();
        PyErr_Format(PyExc_TypeError, "%s=%R is not a number that fits a float: pass a number", name, object);
    }
    return -1;
}

/* The arguments under the names that a caller knows, in the order of the rule. */
static const char *const hyper_names[BWD_MAX_HYPERS] = {"lr",  "betas[0]",     "betas[1]",
                                                        "eps", "weight_decay", "maximize"};

static int
check_hypers(PyObject *const *objects, PyObject *betas, PyObject *maximize, double *hyper)
{
    PyObject *beta[2] = {NULL, NULL};
    int result = -1;
    if ((!PyTuple_Check(betas) && !PyList_Check(betas)) || PySequence_Size(betas) != 2) {
        PyErr_Format(PyExc_TypeError, "betas=%R is not a pair: pass two numbers in [0, 1), for instance (0.9, 0.999)",
                     betas);
        return -1;
    }
    if (!PyBool_Check(maximize)) {
        PyErr_Format(PyExc_TypeError, "maximize=%R is not a bool: pass True or False", maximize);
        return -1;
    }
    beta[0] = PySequence_GetItem(betas, 0);
    beta[1] = PySequence_GetItem(betas, 1);
    if (!beta[0] || !beta[1]) {
        goto done;
    }
    PyObject *const in_order[] = {objects[0], beta[0], beta[1], objects[1], objects[2], maximize};
    for (int i = 0; i < 6; i++) {
        if (number_of(in_order[i], hyper_names[i], &hyper[i]) < 0) {
            goto done;
        }
    }
    const int bad = bwd_rule_bad_hyper(BWD_RULE_adamw, hyper);
    if (bad >= 0) {
        PyErr_Format(PyExc_ValueError, "%s=%R is out of range: pass %s", hyper_names[bad], in_order[bad],
                     bwd_rule_hyper_range(BWD_RULE_adamw, bad));
        goto done;
    }
    result = 0;
done:
    Py_XDECREF(beta[0]);
    Py_XDECREF(beta[1]);
    return result;
}

static const bwd_isa *
isa_argument(PyObject *module, const char *name)
{
    const bwd_isa *isa = name ? bwd_isa_by_name(name) : bwd_module_state_of(module)->isa;
    if (!isa) {
        PyErr_Format(PyExc_ValueError, "isa='%s' is not possible here: pass one of isa_info()['possible']", name);
    }
    return isa;
}

PyDoc_STRVAR(adamw_doc,
             "adamw_($module, param, grad, exp_avg, exp_avg_sq, /, *, step, lr, betas, eps, weight_decay,\n"
             "       maximize, isa)\n--\n\n"
             "One AdamW step on NumPy arrays, in place. See bwdfuse.functional.adamw_.\n\n"
             "Args:\n"
             "    isa: None for the one chosen at import, or the name of a possible one (for tests).\n\n"
             "Returns:\n"
             "    tuple: (sum of grad * grad as float, number of non-finite elements of grad as int).\n\n"
             "Raises:\n"
             "    TypeError, ValueError: An argument is wrong; no array was changed.\n");

static PyObject *
adamw_(PyObject *module, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"", "", "", "", "step", "lr", "betas", "eps", "weight_decay", "maximize", "isa", NULL};
    PyObject *arrays[ARRAYS], *step, *numbers[3], *betas, *maximize, *result = NULL;
    const char *isa_name = NULL;
    bwd_job job = {.rule = BWD_RULE_adamw};
    bwd_status status;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOOO$OOOOOOz:adamw_", keywords, &arrays[0], &arrays[1], &arrays[2],
                                     &arrays[3], &step, &numbers[0], &betas, &numbers[1], &numbers[2], &maximize,
                                     &isa_name)) {
        goto done;
    }
    const bwd_isa *isa = isa_argument(module, isa_name);
    if (!isa || number_of(step, "step", &job.step) < 0 || check_hypers(numbers, betas, maximize, job.hyper) < 0) {
        goto done;
    }
    /* Last, so that no Python code runs between the checks and the step. */
    job.format = check_arrays(arrays);
    if (job.format < 0) {
        goto done;
    }
    job.n = (size_t)PyArray_SIZE((PyArrayObject *)arrays[PARAM]);
    job.param = PyArray_DATA((PyArrayObject *)arrays[PARAM]);
    job.grad = PyArray_DATA((PyArrayObject *)arrays[GRAD]);
    for (int k = 0; k < BWD_adamw_STATE_COUNT; k++) {
        job.state[k] = PyArray_DATA((PyArrayObject *)arrays[STATES + k]);
    }
    Py_BEGIN_ALLOW_THREADS status = bwd_step(isa, &job);
    Py_END_ALLOW_THREADS if (status != BWD_OK)
    {
        PyErr_Format(PyExc_ValueError, "step=%R: %s", step, bwd_status_text(status));
        goto done;
    }
    result = Py_BuildValue("dK", job.grad_sq_sum, (unsigned long long)job.nonfinite);
done:
    return result;
}

static PyMethodDef step_methods[] = {
    {"adamw_", (PyCFunction)(void (*)(void))adamw_, METH_VARARGS | METH_KEYWORDS, adamw_doc},
    {NULL, NULL, 0, NULL},
};

int
bwd_step_exec(PyObject *module)
{
    if (PyArray_ImportNumPyAPI() < 0) {
        return -1;
    }
    return PyModule_AddFunctions(module, step_methods);
}
