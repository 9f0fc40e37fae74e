/* The Slot type: the object that a hook is bound to. */
#include "python/plan.h"

#include <stddef.h>
#include <structmember.h>

static int
slot_traverse(PyObject *self, visitproc visit, void *arg)
{
    bwd_slot *slot = (bwd_slot *)self;
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(slot->plan);
    Py_VISIT(slot->param);
    Py_VISIT(slot->name);
    return 0;
}

static int
slot_clear(PyObject *self)
{
    bwd_slot *slot = (bwd_slot *)self;
    Py_CLEAR(slot->plan);
    Py_CLEAR(slot->param);
    Py_CLEAR(slot->name);
    return 0;
}

void
bwd_dealloc(PyObject *self, inquiry clear)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    clear(self);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static void
slot_dealloc(PyObject *self)
{
    bwd_dealloc(self, slot_clear);
}

PyDoc_STRVAR(
    slot_hook_doc,
    "hook($self, param, /)\n--\n\n"
    "Steps the parameter from its gradient and frees the gradient.\n\n"
    "Give this to ``param.register_post_accumulate_grad_hook``. A parameter without a gradient is left alone.\n\n"
    "Args:\n    param: the tensor of this slot; dense, in CPU memory.\n\n"
    "Raises:\n    AccumulationError: a second gradient in one update, or an update that was left half done.\n"
    "    BwdFuseError: a gradient, state or hyper-parameter that cannot be stepped; the parameter is unchanged.");

PyDoc_STRVAR(
    slot_step_doc,
    "step($self, /)\n--\n\n"
    "The hook for a caller that knows only the slot: FSDP1 calls ``step()`` and then ``zero_grad()`` of what it\n"
    "finds in a parameter's ``_in_backward_optimizers``.");

static PyObject *
slot_step(PyObject *self, PyObject *unused)
{
    bwd_slot *slot = (bwd_slot *)self;
    (void)unused;
    PyObject *param = bwd_deref(slot->param);
    if (param == NULL) {
        PyErr_Format(slot->plan->error, "parameter %R is gone; call optimizer.arm() after replacing parameters",
                     slot->name);
        bwd_plan_poison(slot->plan);
        return NULL;
    }
    PyObject *result = bwd_slot_hook(self, param);
    Py_DECREF(param);
    return result;
}

PyDoc_STRVAR(slot_zero_grad_doc,
             "zero_grad($self, /, *args, **kwargs)\n--\n\n"
             "Does nothing: the step has freed the gradient.");

static PyObject *
slot_zero_grad(PyObject *self, PyObject *args, PyObject *kwargs)
{
    (void)self;
    (void)args;
    (void)kwargs;
    Py_RETURN_NONE;
}

static PyMethodDef slot_methods[] = {
    {"hook", bwd_slot_hook, METH_O, slot_hook_doc},
    {"step", slot_step, METH_NOARGS, slot_step_doc},
    {"zero_grad", (PyCFunction)(void (*)(void))slot_zero_grad, METH_VARARGS | METH_KEYWORDS, slot_zero_grad_doc},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef slot_members[] = {
    {"name", T_OBJECT, offsetof(bwd_slot, name), READONLY, "the parameter's name in messages"},
    {"group", T_PYSSIZET, offsetof(bwd_slot, group), READONLY, "index of its param group"},
    {"armed", T_BOOL, offsetof(bwd_slot, armed), 0, "a hook of this slot is registered"},
    {"last_update", T_ULONGLONG, offsetof(bwd_slot, last_update), READONLY, "update in which it was last handled"},
    {"grad_sq_sum", T_DOUBLE, offsetof(bwd_slot, grad_sq_sum), READONLY, "sum of its squared gradient there"},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot slot_slots[] = {
    {Py_tp_doc, "One parameter's place in a plan; made by Plan.add()."},
    {Py_tp_traverse, slot_traverse},
    {Py_tp_clear, slot_clear},
    {Py_tp_dealloc, slot_dealloc},
    {Py_tp_methods, slot_methods},
    {Py_tp_members, slot_members},
    {0, NULL},
};

PyType_Spec bwd_slot_spec = {
    .name = "bwdfuse._C.Slot",
    .basicsize = sizeof(bwd_slot),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = slot_slots,
};

PyObject *
bwd_slot_new(PyTypeObject *type, bwd_plan *plan, PyObject *param, Py_ssize_t group, PyObject *name, int armed)
{
    allocfunc alloc = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    bwd_slot *slot = alloc ? (bwd_slot *)alloc(type, 0) : NULL;
    if (slot == NULL) {
        return NULL;
    }
    slot->plan = (bwd_plan *)Py_NewRef((PyObject *)plan);
    slot->name = Py_NewRef(name);
    slot->group = group;
    slot->armed = (char)armed;
    slot->param = PyWeakref_NewRef(param, NULL);
    if (slot->param == NULL) {
        Py_DECREF(slot);
        return NULL;
    }
    return (PyObject *)slot;
}
