/* The module object `bwdfuse._C`: its state, and what it says about itself. It computes nothing. */
#include "python/module.h"

#include <stdlib.h>
#include <string.h>

bwd_module_state *
bwd_module_state_of(PyObject *module)
{
    return PyModule_GetState(module);
}

static PyObject *
tuple_of_names(const char *const *names, int count)
{
    PyObject *tuple = PyTuple_New(count);
    for (int i = 0; tuple && i < count; i++) {
        PyObject *name = PyUnicode_FromString(names[i]);
        if (!name || PyTuple_SetItem(tuple, i, name) < 0) {
            Py_CLEAR(tuple);
        }
    }
    return tuple;
}

static PyObject *
dict_of_defaults(int rule)
{
    int count;
    const char *const *names = bwd_rule_hypers(rule, &count);
    const double *defaults = bwd_rule_defaults(rule, &count);
    PyObject *dict = PyDict_New();
    for (int i = 0; dict && i < count; i++) {
        PyObject *value = PyFloat_FromDouble(defaults[i]);
        if (!value || PyDict_SetItemString(dict, names[i], value) < 0) {
            Py_CLEAR(dict);
        }
        Py_XDECREF(value);
    }
    return dict;
}

PyDoc_STRVAR(rules_doc,
             "rules()\n--\n\n"
             "The optimizers that have native kernels.\n\n"
             "Returns:\n"
             "    dict: name -> {\"states\": names in the order the kernel takes them,\n"
             "    \"hypers\": names in order, \"defaults\": name -> float}.\n");

static PyObject *
rules(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(unused))
{
    PyObject *all = PyDict_New(), *row = NULL;
    for (int rule = 0; all && rule < BWD_RULE_COUNT; rule++) {
        int state_count, hyper_count;
        const char *const *states = bwd_rule_states(rule, &state_count);
        const char *const *hypers = bwd_rule_hypers(rule, &hyper_count);
        row = Py_BuildValue("{s:N,s:N,s:N}", "states", tuple_of_names(states, state_count), "hypers",
                            tuple_of_names(hypers, hyper_count), "defaults", dict_of_defaults(rule));
        if (!row || PyDict_SetItemString(all, bwd_rule_name(rule), row) < 0) {
            Py_CLEAR(all);
        }
        Py_CLEAR(row);
    }
    return all;
}

/* Names of the instruction sets that were built, or of those that this CPU can run. */
static PyObject *
isa_names(int only_possible)
{
    const char *names[8];
    int count = 0;
    const bwd_isa *isa;
    for (int i = 0; (isa = bwd_isa_at(i)); i++) {
        if (!only_possible || bwd_isa_possible(isa)) {
            names[count++] = isa->name;
        }
    }
    return tuple_of_names(names, count);
}

PyDoc_STRVAR(isa_info_doc,
             "isa_info()\n--\n\n"
             "The instruction sets of the CPU kernels, widest first.\n\n"
             "Returns:\n"
             "    dict: \"chosen\": str, the one in use; \"possible\": those this CPU and its operating\n"
             "    system allow; \"built\": those this build contains. The environment variable BWDFUSE_ISA\n"
             "    chooses another possible one; it is read once, at import. Every one gives the same bits.\n");

static PyObject *
isa_info(PyObject *module, PyObject *Py_UNUSED(unused))
{
    const bwd_module_state *st = bwd_module_state_of(module);
    return Py_BuildValue("{s:s,s:N,s:N}", "chosen", st->isa->name, "possible", isa_names(1), "built", isa_names(0));
}

PyDoc_STRVAR(build_info_doc,
             "build_info()\n--\n\n"
             "What was decided when this extension was compiled.\n\n"
             "Returns:\n"
             "    dict: \"compiler\": its name and version; \"flags\": the flags of every file;\n"
             "    \"isa_flags\": instruction set -> the flags added for it; \"debug\": whether assertions and\n"
             "    no optimisation; \"sanitize\": sanitizers, or \"\"; \"cuda\": None, or why there is no CUDA part.\n");

static PyObject *
build_info(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(unused))
{
#if defined(__clang__)
    const char *compiler = __VERSION__;
#elif defined(__GNUC__)
    const char *compiler = "GCC " __VERSION__;
#else
    const char *compiler = "unknown";
#endif
#ifdef NDEBUG
    PyObject *debug = Py_False;
#else
    PyObject *debug = Py_True;
#endif
    return Py_BuildValue("{s:s,s:s,s:{s:s,s:s,s:s},s:O,s:s,s:s}", "compiler", compiler, "flags", BWD_FLAGS, "isa_flags",
                         "baseline", "", "avx2", BWD_FLAGS_AVX2, "avx512", BWD_FLAGS_AVX512, "debug", debug, "sanitize",
                         BWD_SANITIZE, "cuda", "CPU-only build: this version has no CUDA kernels");
}

PyDoc_STRVAR(get_num_threads_doc,
             "get_num_threads($module, /)\n--\n\n"
             "How many threads a native step on CPU may use. See bwdfuse.get_num_threads.\n");

static PyObject *
get_num_threads(PyObject *module, PyObject *Py_UNUSED(unused))
{
    return PyLong_FromLong(bwd_pool_threads(bwd_module_state_of(module)->pool));
}

PyDoc_STRVAR(set_num_threads_doc,
             "set_num_threads($module, n, /)\n--\n\n"
             "How many threads a native step on CPU may use from now on. See bwdfuse.set_num_threads.\n");

static PyObject *
set_num_threads(PyObject *module, PyObject *n)
{
    if (!PyLong_Check(n) || PyBool_Check(n)) {
        PyErr_Format(PyExc_TypeError, "set_num_threads(%R): pass an int from 1 to %d", n, BWD_MAX_THREADS);
        return NULL;
    }
    int overflow;
    const long threads = PyLong_AsLongAndOverflow(n, &overflow);
    if (overflow || threads < 1 || threads > BWD_MAX_THREADS) {
        PyErr_Format(PyExc_ValueError, "set_num_threads(%R): pass an int from 1 (no thread but the caller's) to %d", n,
                     BWD_MAX_THREADS);
        return NULL;
    }
    bwd_pool_set_threads(bwd_module_state_of(module)->pool, (int)threads);
    Py_RETURN_NONE;
}

/* The first number of OMP_NUM_THREADS, which may be a list for nested regions; 0 where there is none to be obeyed: what
 * is not a number is as good as unset, as OpenMP has it. */
static long
omp_num_threads(void)
{
    const char *text = getenv("OMP_NUM_THREADS");
    char *end;
    if (!text) {
        return 0;
    }
    const long number = strtol(text, &end, 10);
    end += strspn(end, " \t");
    return end != text && number > 0 && (*end == '\0' || *end == ',') ? number : 0;
}

static bwd_pool *
make_pool(void)
{
    const long asked = omp_num_threads(), threads = asked > 0 ? asked : bwd_pool_cpus();
    bwd_pool *pool = bwd_pool_new(threads < BWD_MAX_THREADS ? (int)threads : BWD_MAX_THREADS);
    if (!pool) {
        PyErr_NoMemory();
    }
    return pool;
}

/* Returns NULL with ImportError set when BWDFUSE_ISA asks for what cannot be. */
static const bwd_isa *
choose_isa(void)
{
    const char *wanted = getenv("BWDFUSE_ISA");
    if (!wanted || !*wanted) {
        return bwd_isa_best();
    }
    const bwd_isa *isa = bwd_isa_by_name(wanted);
    if (!isa) {
        PyObject *possible = isa_names(1);
        if (possible) {
            PyErr_Format(PyExc_ImportError,
                         "BWDFUSE_ISA=%s: not an instruction set that this build and this CPU can run. "
                         "Possible here: %R. Set one of them, or unset BWDFUSE_ISA for the widest.",
                         wanted, possible);
            Py_DECREF(possible);
        }
    }
    return isa;
}

static int
module_exec(PyObject *module)
{
    bwd_module_state *st = bwd_module_state_of(module);
    st->isa = choose_isa();
    if (!st->isa || !(st->pool = make_pool()) || bwd_step_exec(module) < 0) {
        return -1;
    }
#ifdef BWD_WITH_PLAN
    if (bwd_plan_exec(module, st) < 0) {
        return -1;
    }
#endif
    return 0;
}

static int
module_traverse(PyObject *module, visitproc visit, void *arg)
{
    bwd_module_state *st = bwd_module_state_of(module);
#define VISIT(type, name) Py_VISIT(st->name);
    BWD_MODULE_OBJECTS(VISIT)
#undef VISIT
    return 0;
}

static int
module_clear(PyObject *module)
{
    bwd_module_state *st = bwd_module_state_of(module);
#define CLEAR(type, name) Py_CLEAR(st->name);
    BWD_MODULE_OBJECTS(CLEAR)
#undef CLEAR
    return 0;
}

static void
module_free(void *module)
{
    bwd_pool_free(bwd_module_state_of(module)->pool);
    (void)module_clear(module);
}

static PyMethodDef module_methods[] = {
    {"rules", rules, METH_NOARGS, rules_doc},
    {"isa_info", isa_info, METH_NOARGS, isa_info_doc},
    {"build_info", build_info, METH_NOARGS, build_info_doc},
    {"get_num_threads", get_num_threads, METH_NOARGS, get_num_threads_doc},
    {"set_num_threads", set_num_threads, METH_O, set_num_threads_doc},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot module_slots[] = {
    {Py_mod_exec, module_exec},
    {0, NULL},
};

static PyModuleDef module_def = {
    PyModuleDef_HEAD_INIT,
    .m_name = "bwdfuse._C",
    .m_doc = "Native kernels and the hook of bwdfuse.",
    .m_size = sizeof(bwd_module_state),
    .m_methods = module_methods,
    .m_slots = module_slots,
    .m_traverse = module_traverse,
    .m_clear = module_clear,
    .m_free = module_free,
};

PyMODINIT_FUNC
PyInit__C(void)
{
    return PyModuleDef_Init(&module_def);
}
