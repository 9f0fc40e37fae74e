/* `_C.step_`: one step of any rule on arrays of the caller. It knows nothing of torch or of hooks. */
#include "python/array.h"
#include "python/module.h"

enum { PARAM, GRAD, STATES, MAX_ARRAYS = STATES + BWD_MAX_STATES };

#define FORMAT_TEXT(prefix, P, G, S, ...) prefix "(" #P ", " #G ", " #S ")"
static const char known_formats[] = BWD_FORMATS(FORMAT_TEXT, " ");
#undef FORMAT_TEXT

static PyObject *
shape_of(const bwd_array *array)
{
    PyObject *shape = PyTuple_New(array->ndim);
    for (int d = 0; shape && d < array->ndim; d++) {
        PyObject *length = PyLong_FromLongLong(array->shape[d]);
        if (!length || PyTuple_SetItem(shape, d, length) < 0) {
            Py_CLEAR(shape);
        }
    }
    return shape;
}

/* Every array has param's shape. */
static int
check_shape(const bwd_array *param, const bwd_array *array)
{
    const size_t bytes = (size_t)param->ndim * sizeof *param->shape;
    if (array->ndim == param->ndim && (bytes == 0 || memcmp(array->shape, param->shape, bytes) == 0)) {
        return 0;
    }
    PyObject *have = shape_of(array), *want = shape_of(param);
    if (have && want) {
        PyErr_Format(PyExc_ValueError, "%s has shape %R but param has shape %R: pass arrays of one shape", array->name,
                     have, want);
    }
    Py_XDECREF(have);
    Py_XDECREF(want);
    return -1;
}

/* No two arrays share memory: one of each pair is written. */
static int
check_apart(const bwd_array *a, const bwd_array *b)
{
    const uintptr_t from_a = (uintptr_t)a->data, from_b = (uintptr_t)b->data;
    if (from_a < from_b + b->n * bwd_dtype_size(b->dtype) && from_b < from_a + a->n * bwd_dtype_size(a->dtype)) {
        PyErr_Format(PyExc_ValueError, "%s and %s share memory: pass separate arrays, for instance a copy of %s",
                     a->name, b->name, b->name);
        return -1;
    }
    return 0;
}

/* The storage format of the arrays, or -1 with an exception set. */
static int
find_format(const bwd_array *arrays, int count)
{
    const int state = count > STATES ? arrays[STATES].dtype : arrays[PARAM].dtype;
    for (int i = STATES + 1; i < count; i++) {
        if (arrays[i].dtype != state) {
            PyErr_Format(PyExc_TypeError, "%s has dtype %s but %s has dtype %s: pass states of one dtype",
                         arrays[i].name, bwd_dtype_name(arrays[i].dtype), arrays[STATES].name, bwd_dtype_name(state));
            return -1;
        }
    }
    const int format = bwd_format_find(arrays[PARAM].dtype, arrays[GRAD].dtype, state);
    if (format < 0) {
        PyErr_Format(PyExc_TypeError, "param, grad and states have dtypes %s, %s and %s: pass one of%s",
                     bwd_dtype_name(arrays[PARAM].dtype), bwd_dtype_name(arrays[GRAD].dtype), bwd_dtype_name(state),
                     known_formats);
    }
    return format;
}

/* Looks at every array; runs no Python code, so that nothing can change before the step. */
static int
check_arrays(bwd_array *arrays, int count, bwd_job *job)
{
    for (int i = 0; i < count; i++) {
        if (bwd_array_look(&arrays[i], i != GRAD) < 0 || check_shape(&arrays[PARAM], &arrays[i]) < 0) {
            return -1;
        }
    }
    for (int i = 0; i < count; i++) {
        for (int k = i + 1; k < count; k++) {
            if (check_apart(&arrays[i], &arrays[k]) < 0) {
                return -1;
            }
        }
    }
    job->format = find_format(arrays, count);
    job->n = arrays[PARAM].n;
    job->param = arrays[PARAM].data;
    job->grad = arrays[GRAD].data;
    for (int i = STATES; i < count; i++) {
        job->state[i - STATES] = arrays[i].data;
    }
    return job->format < 0 ? -1 : 0;
}

/* Takes hold of the memory of param, grad and the rule's states: the only part that may run Python code of others. */
static int
hold_arrays(bwd_array *arrays, PyObject *objects, int rule)
{
    int state_count;
    const char *const *states = bwd_rule_states(rule, &state_count);
    const int count = STATES + state_count;
    if (PyTuple_Size(objects) != count) {
        PyErr_Format(PyExc_TypeError, "%s takes %d arrays (param, grad and its states), got %zd: pass all of them",
                     bwd_rule_name(rule), count, PyTuple_Size(objects));
        return -1;
    }
    for (int i = 0; i < count; i++) {
        const char *name = i == PARAM ? "param" : i == GRAD ? "grad" : states[i - STATES];
        if (bwd_array_hold(&arrays[i], PyTuple_GetItem(objects, i), name) < 0) {
            return -1;
        }
    }
    return count;
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

/* Under the name that a caller knows. */
static const char *
caller_name(const char *hyper)
{
    return strcmp(hyper, "beta1") == 0 ? "betas[0]" : strcmp(hyper, "beta2") == 0 ? "betas[1]" : hyper;
}

static int
check_hypers(PyObject *numbers, bwd_job *job)
{
    int count;
    const char *const *names = bwd_rule_hypers(job->rule, &count);
    if (PyTuple_Size(numbers) != count) {
        PyErr_Format(PyExc_TypeError, "%s has %d hyper-parameters, got %zd: pass all of them", bwd_rule_name(job->rule),
                     count, PyTuple_Size(numbers));
        return -1;
    }
    for (int i = 0; i < count; i++) {
        PyObject *number = PyTuple_GetItem(numbers, i);
        if (bwd_rule_hyper_is_switch(job->rule, i) && !PyBool_Check(number)) {
            PyErr_Format(PyExc_TypeError, "%s=%R is not a bool: pass True or False", names[i], number);
            return -1;
        }
        if (number_of(number, caller_name(names[i]), &job->hyper[i]) < 0) {
            return -1;
        }
    }
    const int bad = bwd_rule_bad_hyper(job->rule, job->hyper);
    if (bad >= 0) {
        PyErr_Format(PyExc_ValueError, "%s=%R is out of range: pass %s", caller_name(names[bad]),
                     PyTuple_GetItem(numbers, bad), bwd_rule_hyper_range(job->rule, bad));
        return -1;
    }
    return 0;
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

PyDoc_STRVAR(step_doc,
             "step_($module, rule, arrays, hypers, /, *, step, isa)\n--\n\n"
             "One step of a rule on arrays, in place. bwdfuse.functional has a function for each rule.\n\n"
             "Args:\n"
             "    rule: A key of rules().\n"
             "    arrays: (param, grad, states in the rule's order).\n"
             "    hypers: Numbers in the rule's order; switches are bools.\n"
             "    step: Number of the step being taken, from 1.\n"
             "    isa: None for the one chosen at import, or the name of a possible one (for tests).\n\n"
             "Returns:\n"
             "    tuple: (sum of grad * grad as float, number of non-finite elements of grad as int).\n\n"
             "Raises:\n"
             "    TypeError, ValueError: An argument is wrong; no array was changed.\n");

static PyObject *
step_(PyObject *module, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"", "", "", "step", "isa", NULL};
    PyObject *objects, *numbers, *step, *result = NULL;
    const char *rule, *isa_name = NULL;
    bwd_array arrays[MAX_ARRAYS];
    bwd_job job = {0};
    bwd_status status;
    int count;
    memset(arrays, 0, sizeof arrays);
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "sO!O!$Oz:step_", keywords, &rule, &PyTuple_Type, &objects,
                                     &PyTuple_Type, &numbers, &step, &isa_name)) {
        goto done;
    }
    job.rule = bwd_rule_find(rule);
    if (job.rule < 0) {
        PyErr_Format(PyExc_ValueError, "rule='%s' is unknown: pass a key of rules()", rule);
        goto done;
    }
    const bwd_isa *isa = isa_argument(module, isa_name);
    if (!isa || number_of(step, "step", &job.step) < 0 || check_hypers(numbers, &job) < 0 ||
        (count = hold_arrays(arrays, objects, job.rule)) < 0 || check_arrays(arrays, count, &job) < 0) {
        goto done;
    }
    bwd_pool *pool = bwd_module_state_of(module)->pool;
    Py_BEGIN_ALLOW_THREADS status = bwd_step(isa, pool, &job);
    Py_END_ALLOW_THREADS if (status != BWD_OK)
    {
        PyErr_Format(PyExc_ValueError, "step=%R: %s", step, bwd_status_text(status));
        goto done;
    }
    result = Py_BuildValue("dK", job.grad_sq_sum, (unsigned long long)job.nonfinite);
done:
    for (int i = 0; i < MAX_ARRAYS; i++) {
        bwd_array_release(&arrays[i]);
    }
    return result;
}

static PyMethodDef step_methods[] = {
    {"step_", (PyCFunction)(void (*)(void))step_, METH_VARARGS | METH_KEYWORDS, step_doc},
    {NULL, NULL, 0, NULL},
};

int
bwd_step_exec(PyObject *module)
{
    return bwd_array_exec() < 0 ? -1 : PyModule_AddFunctions(module, step_methods);
}
