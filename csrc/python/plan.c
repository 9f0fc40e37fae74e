#include "python/plan.h"

#include "python/module.h"

#include <stddef.h>
#include <string.h>
#include <structmember.h>

PyObject *
bwd_deref(PyObject *weak)
{
    PyObject *object = weak ? PyWeakref_GetObject(weak) : Py_None;
    return object == NULL || object == Py_None ? NULL : Py_NewRef(object);
}

void
bwd_plan_poison(bwd_plan *plan)
{
    if (plan->poison != NULL) {
        return;
    }
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    PyErr_NormalizeException(&type, &value, &traceback);
    PyObject *kind = type ? PyObject_GetAttrString(type, "__name__") : NULL;
    plan->poison = PyUnicode_FromFormat(
        "update %llu was left half done: %zd of %zd parameters were stepped before %S: %S. The `step` of each "
        "parameter in "
        "optimizer.state says which. Load a checkpoint (optimizer.load_state_dict), or accept the partial update with "
        "optimizer.acknowledge_partial_update()",
        plan->update, plan->fired, PyList_Size(plan->slots), kind ? kind : Py_None, value ? value : Py_None);
    Py_XDECREF(kind);
    if (plan->poison == NULL) {
        PyErr_Clear();
        plan->poison = PyUnicode_FromString("an update was left half done");
    }
    PyErr_Restore(type, value, traceback);
}

int
bwd_plan_refuse_poisoned(bwd_plan *plan)
{
    if (plan->poison == NULL) {
        return 0;
    }
    PyErr_SetObject(plan->accumulation_error, plan->poison);
    return -1;
}

static int
plan_traverse(PyObject *self, visitproc visit, void *arg)
{
    bwd_plan *plan = (bwd_plan *)self;
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(plan->optimizer);
    Py_VISIT(plan->kernel);
    Py_VISIT(plan->slots);
    Py_VISIT(plan->error);
    Py_VISIT(plan->accumulation_error);
    Py_VISIT(plan->bumped);
    return bwd_torch_traverse(&plan->torch, visit, arg);
}

static int
plan_clear(PyObject *self)
{
    bwd_plan *plan = (bwd_plan *)self;
    Py_CLEAR(plan->optimizer);
    Py_CLEAR(plan->kernel);
    Py_CLEAR(plan->slots);
    Py_CLEAR(plan->poison);
    Py_CLEAR(plan->error);
    Py_CLEAR(plan->accumulation_error);
    Py_CLEAR(plan->bumped);
    Py_CLEAR(plan->name_groups);
    Py_CLEAR(plan->name_state);
    Py_CLEAR(plan->name_begin);
    Py_CLEAR(plan->name_init_state);
    Py_CLEAR(plan->name_step);
    for (int i = 0; i < BWD_MAX_STATES; i++) {
        Py_CLEAR(plan->state_names[i]);
    }
    for (int i = 0; i < BWD_MAX_HYPERS; i++) {
        Py_CLEAR(plan->hypers[i].key);
    }
    bwd_torch_clear(&plan->torch);
    return 0;
}

static void
plan_dealloc(PyObject *self)
{
    bwd_dealloc(self, plan_clear);
}

/* "beta1" stands in a param group as betas[0]; every other hyper-parameter under its own name. */
static int
find_hyper(const char *text, bwd_hyper_key *at)
{
    const int is_beta = strncmp(text, "beta", 4) == 0 && text[4] >= '1' && text[4] <= '9' && text[5] == '\0';
    at->index = is_beta ? text[4] - '1' : -1;
    at->key = PyUnicode_InternFromString(is_beta ? "betas" : text);
    return at->key ? 0 : -1;
}

static int
plan_describe_rule(bwd_plan *plan, const char *rule)
{
    plan->rule = bwd_rule_find(rule);
    if (plan->rule < 0) {
        PyErr_Format(PyExc_ValueError, "unknown rule '%s'; see bwdfuse._C.rules()", rule);
        return -1;
    }
    const char *const *states = bwd_rule_states(plan->rule, &plan->n_states);
    const char *const *hypers = bwd_rule_hypers(plan->rule, &plan->n_hypers);
    for (int i = 0; i < plan->n_states; i++) {
        plan->state_texts[i] = states[i];
        if ((plan->state_names[i] = PyUnicode_InternFromString(states[i])) == NULL) {
            return -1;
        }
    }
    for (int i = 0; i < plan->n_hypers; i++) {
        plan->hyper_texts[i] = hypers[i];
        if (find_hyper(hypers[i], &plan->hypers[i]) != 0) {
            return -1;
        }
    }
    return 0;
}

static int
plan_intern_names(bwd_plan *plan)
{
    const struct {
        PyObject **slot;
        const char *text;
    } names[] = {
        {&plan->name_groups, "param_groups"},    {&plan->name_state, "state"}, {&plan->name_begin, "_begin_backward"},
        {&plan->name_init_state, "_init_state"}, {&plan->name_step, "step"},
    };
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        if ((*names[i].slot = PyUnicode_InternFromString(names[i].text)) == NULL) {
            return -1;
        }
    }
    return 0;
}

static int
parse_nonfinite(const char *text, bwd_nonfinite *out)
{
    static const char *const texts[] = {"off", "skip", "raise"};
    for (int i = 0; i < 3; i++) {
        if (strcmp(text, texts[i]) == 0) {
            *out = (bwd_nonfinite)i;
            return 0;
        }
    }
    PyErr_Format(PyExc_ValueError, "nonfinite='%s' is not one of 'off', 'skip', 'raise'", text);
    return -1;
}

static int
plan_import_errors(bwd_plan *plan)
{
    PyObject *errors = PyImport_ImportModule("bwdfuse.errors");
    if (errors != NULL) {
        plan->error = PyObject_GetAttrString(errors, "BwdFuseError");
        plan->accumulation_error = plan->error ? PyObject_GetAttrString(errors, "AccumulationError") : NULL;
        Py_DECREF(errors);
    }
    return plan->accumulation_error ? 0 : -1;
}

static PyObject *
plan_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"optimizer", "rule", "nonfinite", "kernel", "exchange", NULL};
    PyObject *optimizer, *kernel = Py_None;
    const char *rule, *nonfinite = "off";
    int exchange = 1;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "Os|$sOp:Plan", keywords, &optimizer, &rule, &nonfinite, &kernel,
                                     &exchange)) {
        return NULL;
    }
    const bwd_module_state *state = PyType_GetModuleState(type);
    allocfunc alloc = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    bwd_plan *plan = state ? (bwd_plan *)alloc(type, 0) : NULL;
    if (plan == NULL) {
        return NULL;
    }
    plan->isa = state->isa;
    plan->pool = state->pool;
    plan->update = 1;
    plan->kernel = kernel == Py_None ? NULL : Py_NewRef(kernel);
    if (parse_nonfinite(nonfinite, &plan->nonfinite) != 0 || plan_describe_rule(plan, rule) != 0 ||
        plan_intern_names(plan) != 0 || plan_import_errors(plan) != 0 ||
        (plan->optimizer = PyWeakref_NewRef(optimizer, NULL)) == NULL || (plan->slots = PyList_New(0)) == NULL ||
        (plan->bumped = Py_BuildValue("[O]", Py_None)) == NULL || bwd_torch_init(&plan->torch, exchange) != 0) {
        Py_DECREF(plan);
        return NULL;
    }
    return (PyObject *)plan;
}

PyDoc_STRVAR(
    plan_add_doc,
    "add($self, param, /, group, name, armed)\n--\n\n"
    "Adds a parameter and returns its Slot.\n\n"
    "Args:\n    param: the tensor; held weakly.\n    group: index of its param group.\n    name: for messages.\n"
    "    armed: whether the caller registers ``slot.hook`` on it.");

static PyObject *
plan_add(PyObject *self, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"", "group", "name", "armed", NULL};
    bwd_plan *plan = (bwd_plan *)self;
    PyObject *param, *name;
    Py_ssize_t group;
    int armed;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OnUp:add", keywords, &param, &group, &name, &armed)) {
        return NULL;
    }
    const bwd_module_state *state = PyType_GetModuleState(Py_TYPE(self));
    PyObject *slot = state ? bwd_slot_new(state->slot_type, plan, param, group, name, armed) : NULL;
    if (slot != NULL && PyList_Append(plan->slots, slot) != 0) {
        Py_CLEAR(slot);
    }
    return slot;
}

/* Calls `visit` for every slot whose parameter is alive and holds a gradient; stops at the first failure. */
static int
each_gradient(bwd_plan *plan, int (*visit)(bwd_slot *slot, PyObject *param, PyObject *grad))
{
    const Py_ssize_t count = PyList_Size(plan->slots);
    for (Py_ssize_t i = 0; i < count && i < PyList_Size(plan->slots); i++) {
        PyObject *slot = Py_NewRef(PyList_GetItem(plan->slots, i));
        PyObject *param = bwd_deref(((bwd_slot *)slot)->param);
        PyObject *grad = param ? PyObject_GetAttr(param, plan->torch.name_grad) : NULL;
        int rc = param != NULL && grad == NULL ? -1 : 0;
        if (grad != NULL && grad != Py_None) {
            rc = visit((bwd_slot *)slot, param, grad);
        }
        Py_XDECREF(grad);
        Py_XDECREF(param);
        Py_DECREF(slot);
        if (rc != 0) {
            return rc;
        }
    }
    return 0;
}

static int
visit_check(bwd_slot *slot, PyObject *param, PyObject *grad)
{
    return bwd_slot_update(slot, param, grad, BWD_CHECK);
}

static int
visit_update(bwd_slot *slot, PyObject *param, PyObject *grad)
{
    int rc = bwd_slot_claim(slot);
    if (rc == 0) {
        rc = bwd_slot_update(slot, param, grad, BWD_KEEP_GRAD);
        slot->busy = 0;
    }
    return rc;
}

static int
visit_refuse(bwd_slot *slot, PyObject *param, PyObject *grad)
{
    bwd_plan *plan = slot->plan;
    (void)param;
    (void)grad;
    PyErr_Format(
        plan->error,
        slot->armed
            ? "parameter %R holds a gradient that its hook should have consumed: the gradient was set by hand, or "
              "hooks "
              "were removed. Clear it (zero_grad()) or call optimizer.disarm() to step after backward"
            : "parameter %R was frozen when the hooks were armed and has a gradient now: call optimizer.arm() after "
              "changing requires_grad",
        slot->name);
    return -1;
}

/* A rank may hold no element of any parameter: FSDP1 splits flat parameters, and it then has nothing to step. */
static int
has_armed(const bwd_plan *plan)
{
    const Py_ssize_t count = PyList_Size(plan->slots);
    for (Py_ssize_t i = 0; i < count; i++) {
        if (((bwd_slot *)PyList_GetItem(plan->slots, i))->armed) {
            return 1;
        }
    }
    return 0;
}

static void
plan_close_update(bwd_plan *plan)
{
    plan->params_stepped = plan->fired;
    plan->fired = 0;
    plan->update++;
    plan->backward_open = 0;
}

PyDoc_STRVAR(plan_step_doc,
             "step($self, /)\n--\n\n"
             "Steps every parameter that has a gradient, and keeps the gradients, as ``torch.optim`` does.\n\n"
             "All are checked before the first is changed.\n\nReturns:\n    The number of parameters handled.");

static PyObject *
plan_step(PyObject *self, PyObject *unused)
{
    bwd_plan *plan = (bwd_plan *)self;
    (void)unused;
    if (bwd_plan_refuse_poisoned(plan) != 0 || each_gradient(plan, visit_check) != 0) {
        return NULL;
    }
    if (each_gradient(plan, visit_update) != 0) {
        bwd_plan_poison(plan);
        return NULL;
    }
    plan_close_update(plan);
    plan->updates++;
    return PyLong_FromSsize_t(plan->params_stepped);
}

PyDoc_STRVAR(plan_close_doc,
             "close($self, /)\n--\n\n"
             "Closes an update whose parameters were stepped by hooks: checks coverage and re-arms the guard.\n\n"
             "Returns:\n    The number of parameters handled.\n\n"
             "Raises:\n    AccumulationError: the update was left half done.\n"
             "    BwdFuseError: no hook fired, or a gradient is present that a hook should have consumed.");

static PyObject *
plan_close(PyObject *self, PyObject *unused)
{
    bwd_plan *plan = (bwd_plan *)self;
    (void)unused;
    if (plan->poison == NULL && plan->backward_open) {
        PyErr_SetString(plan->accumulation_error, "backward did not reach its end");
        bwd_plan_poison(plan);
        PyErr_Clear();
    }
    if (bwd_plan_refuse_poisoned(plan) != 0 || each_gradient(plan, visit_refuse) != 0) {
        return NULL;
    }
    if (plan->fired == 0 && has_armed(plan)) {
        PyErr_SetString(
            plan->error,
            "step(): no hook has fired since the last step(), so nothing was trained. Call backward() before step(). "
            "If you "
            "did: the parameters were replaced after arming (fully_shard, accelerator.prepare, deepcopy, a new "
            "nn.Parameter); build the optimizer or call optimizer.arm(model) after the model has its final parameters");
        return NULL;
    }
    plan_close_update(plan);
    plan->updates++;
    return PyLong_FromSsize_t(plan->params_stepped);
}

PyDoc_STRVAR(plan_acknowledge_doc,
             "acknowledge($self, /)\n--\n\n"
             "Forgets a half-done update and starts the next one. The parameters stay as they are.");

static PyObject *
plan_acknowledge(PyObject *self, PyObject *unused)
{
    bwd_plan *plan = (bwd_plan *)self;
    (void)unused;
    Py_CLEAR(plan->poison);
    plan_close_update(plan);
    Py_RETURN_NONE;
}

PyDoc_STRVAR(plan_end_backward_doc,
             "end_backward($self, /)\n--\n\n"
             "Notes that the backward in which hooks fired reached its end.");

static PyObject *
plan_end_backward(PyObject *self, PyObject *unused)
{
    (void)unused;
    ((bwd_plan *)self)->backward_open = 0;
    Py_RETURN_NONE;
}

PyDoc_STRVAR(plan_forget_doc, "forget($self, /)\n--\n\nDrops all slots; the totals stay.");

static PyObject *
plan_forget(PyObject *self, PyObject *unused)
{
    bwd_plan *plan = (bwd_plan *)self;
    (void)unused;
    PyObject *fresh = PyList_New(0);
    if (fresh == NULL) {
        return NULL;
    }
    PyObject *old = plan->slots;
    plan->slots = fresh;
    Py_DECREF(old);
    Py_RETURN_NONE;
}

static PyMethodDef plan_methods[] = {
    {"add", (PyCFunction)(void (*)(void))plan_add, METH_VARARGS | METH_KEYWORDS, plan_add_doc},
    {"step", plan_step, METH_NOARGS, plan_step_doc},
    {"close", plan_close, METH_NOARGS, plan_close_doc},
    {"acknowledge", plan_acknowledge, METH_NOARGS, plan_acknowledge_doc},
    {"end_backward", plan_end_backward, METH_NOARGS, plan_end_backward_doc},
    {"forget", plan_forget, METH_NOARGS, plan_forget_doc},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef plan_members[] = {
    {"slots", T_OBJECT, offsetof(bwd_plan, slots), READONLY, "the Slots, in the order of the param groups"},
    {"poison", T_OBJECT, offsetof(bwd_plan, poison), READONLY, "what spoilt the open update, or None"},
    {"fired", T_PYSSIZET, offsetof(bwd_plan, fired), READONLY, "parameters handled in the open update"},
    {"params_stepped", T_PYSSIZET, offsetof(bwd_plan, params_stepped), READONLY, "parameters handled in the last one"},
    {"update", T_ULONGLONG, offsetof(bwd_plan, update), READONLY, "number of the open update, from 1"},
    {"updates", T_ULONGLONG, offsetof(bwd_plan, updates), READONLY, "updates closed"},
    {"param_steps", T_ULONGLONG, offsetof(bwd_plan, param_steps), READONLY, "parameter steps in total"},
    {"native_steps", T_ULONGLONG, offsetof(bwd_plan, native_steps), READONLY, "of these, by the C kernel"},
    {"skipped", T_ULONGLONG, offsetof(bwd_plan, skipped), READONLY, "left out for non-finite gradients"},
    {NULL, 0, 0, 0, NULL},
};

static PyObject *
plan_get_exchange(PyObject *self, void *unused)
{
    (void)unused;
    return PyBool_FromLong(((bwd_plan *)self)->torch.exchange != NULL);
}

static PyGetSetDef plan_getset[] = {
    {"exchange", plan_get_exchange, NULL, "whether tensors are read through torch's DLPack exchange table", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

PyDoc_STRVAR(
    plan_doc,
    "Plan(optimizer, rule, *, nonfinite='off', kernel=None, exchange=True)\n--\n\n"
    "The parameters of one optimizer and the books of its updates.\n\n"
    "Args:\n    optimizer: held weakly; its ``param_groups`` and ``state`` are read at every step, and its methods\n"
    "        ``_begin_backward()`` and ``_init_state(param)`` are called.\n"
    "    rule: a key of ``rules()``.\n"
    "    nonfinite: what a gradient with inf or nan does: 'off' steps, 'skip' leaves the parameter, 'raise' raises.\n"
    "    kernel: a callable ``(param, grad, state, group, step)`` in place of the native step, for tests.\n"
    "    exchange: False reads tensors through Python attributes even where torch has the exchange table.");

static PyType_Slot plan_slots[] = {
    {Py_tp_doc, (void *)plan_doc}, {Py_tp_new, plan_new},         {Py_tp_traverse, plan_traverse},
    {Py_tp_clear, plan_clear},     {Py_tp_dealloc, plan_dealloc}, {Py_tp_methods, plan_methods},
    {Py_tp_members, plan_members}, {Py_tp_getset, plan_getset},   {0, NULL},
};

static PyType_Spec plan_spec = {
    .name = "bwdfuse._C.Plan",
    .basicsize = sizeof(bwd_plan),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = plan_slots,
};

int
bwd_plan_exec(PyObject *module, bwd_module_state *state)
{
    state->slot_type = (PyTypeObject *)PyType_FromModuleAndSpec(module, &bwd_slot_spec, NULL);
    state->plan_type = (PyTypeObject *)PyType_FromModuleAndSpec(module, &plan_spec, NULL);
    if (state->slot_type == NULL || state->plan_type == NULL) {
        return -1;
    }
    return PyModule_AddType(module, state->slot_type) != 0 || PyModule_AddType(module, state->plan_type) != 0 ? -1 : 0;
}
