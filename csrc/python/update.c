#include "python/update.h"

#include <stddef.h>
#include <string.h>

#define FORMAT_TEXT(prefix, P, G, S, ...) prefix "(" #P ", " #G ", " #S ")"
static const char known_formats[] = "(param, grad, state) as" BWD_FORMATS(FORMAT_TEXT, " ");
#undef FORMAT_TEXT

void
bwd_update_release(bwd_update *u)
{
    Py_XDECREF(u->group);
    Py_XDECREF(u->state);
    Py_XDECREF(u->param);
    Py_XDECREF(u->grad);
    Py_XDECREF(u->step);
    for (int i = 0; i < BWD_MAX_STATES; i++) {
        Py_XDECREF(u->states[i]);
    }
}

/* mapping[key] as a new reference, without the detour through the type's slots for the usual dict. */
static PyObject *
lookup(PyObject *mapping, PyObject *key)
{
    if (!PyDict_CheckExact(mapping)) {
        return PyObject_GetItem(mapping, key);
    }
    PyObject *value = PyDict_GetItemWithError(mapping, key);
    if (value == NULL && !PyErr_Occurred()) {
        PyErr_SetObject(PyExc_KeyError, key);
    }
    return Py_XNewRef(value);
}

/* Groups are found by index at every call: load_state_dict and accelerate's prepare replace the dicts. */
static int
read_group(bwd_slot *slot, PyObject *optimizer, bwd_update *u)
{
    bwd_plan *plan = slot->plan;
    PyObject *groups = PyObject_GetAttr(optimizer, plan->name_groups);
    u->group = groups ? PySequence_GetItem(groups, slot->group) : NULL;
    Py_XDECREF(groups);
    if (u->group == NULL) {
        return -1;
    }
    for (int i = 0; i < plan->n_hypers; i++) {
        const bwd_hyper_key *at = &plan->hypers[i];
        PyObject *value = lookup(u->group, at->key);
        if (value != NULL && at->index >= 0) {
            PyObject *pair = value;
            value = PySequence_GetItem(pair, at->index);
            Py_DECREF(pair);
        }
        const double number = value ? PyFloat_AsDouble(value) : -1.0;
        if (value == NULL || (number == -1.0 && PyErr_Occurred())) {
            Py_XDECREF(value);
            return -1;
        }
        Py_DECREF(value);
        u->job.hyper[i] = number;
    }
    const int bad = bwd_rule_bad_hyper(plan->rule, u->job.hyper);
    if (bad >= 0) {
        PyObject *value = PyFloat_FromDouble(u->job.hyper[bad]);
        PyErr_Format(plan->error, "%s of param_groups[%zd] is %S: set %s. Parameter %R was not changed",
                     plan->hyper_texts[bad], slot->group, value ? value : Py_None,
                     bwd_rule_hyper_range(plan->rule, bad), slot->name);
        Py_XDECREF(value);
        return -1;
    }
    return 0;
}

/* The live state dict of the parameter, filled by the optimizer where it is still empty. */
static int
read_state(bwd_slot *slot, PyObject *optimizer, PyObject *param, bwd_update *u)
{
    bwd_plan *plan = slot->plan;
    PyObject *all = PyObject_GetAttr(optimizer, plan->name_state);
    u->state = all ? PyObject_GetItem(all, param) : NULL;
    Py_XDECREF(all);
    if (u->state == NULL) {
        return -1;
    }
    if (!PyDict_Check(u->state) || PyDict_Size(u->state) == 0) {
        Py_DECREF(u->state);
        u->state = PyObject_CallMethodObjArgs(optimizer, plan->name_init_state, param, NULL);
        if (u->state == NULL) {
            return -1;
        }
    }
    for (int i = 0; i <= plan->n_states; i++) {
        PyObject *name = i < plan->n_states ? plan->state_names[i] : plan->name_step;
        PyObject *tensor = lookup(u->state, name);
        if (tensor == NULL) {
            if (PyErr_ExceptionMatches(PyExc_KeyError)) {
                PyErr_Clear();
                PyErr_Format(plan->error,
                             "the optimizer state of parameter %R has no %R; load a complete state_dict, or "
                             "clear it (optimizer.state[param].clear()) to start from zeros",
                             slot->name, name);
            }
            return -1;
        }
        PyObject *local = bwd_local(&plan->torch, tensor);
        Py_DECREF(tensor);
        if (local == NULL) {
            return -1;
        }
        if (i < plan->n_states) {
            u->states[i] = local;
        }
        else {
            u->step = local;
        }
    }
    return 0;
}

/* A lazily negated gradient (its negative bit is set) has memory of the wrong sign: materialise it. */
static int
read_grad(bwd_slot *slot, PyObject *grad, bwd_update *u)
{
    const bwd_torch *torch = &slot->plan->torch;
    if ((u->grad = bwd_local(torch, grad)) == NULL) {
        return -1;
    }
    PyObject *negated = PyObject_CallFunctionObjArgs(torch->is_neg, u->grad, NULL);
    if (negated == NULL) {
        return -1;
    }
    if (negated == Py_True) {
        PyObject *resolved = PyObject_CallFunctionObjArgs(torch->resolve_neg, u->grad, NULL);
        Py_DECREF(u->grad);
        u->grad = resolved;
    }
    Py_DECREF(negated);
    return u->grad ? 0 : -1;
}

static int
check_alike(bwd_slot *slot, const char *what, const bwd_view *param, const bwd_view *other)
{
    if (other->ndim == param->ndim &&
        memcmp(other->shape, param->shape, (size_t)param->ndim * sizeof *param->shape) == 0) {
        return 0;
    }
    PyErr_Format(slot->plan->error,
                 "%s of parameter %R has %zd elements in %d dimensions, the parameter %zd in %d: shapes must be "
                 "equal; nothing was changed",
                 what, slot->name, (Py_ssize_t)other->n, other->ndim, (Py_ssize_t)param->n, param->ndim);
    return -1;
}

static int
apart(const bwd_view *a, const bwd_view *b)
{
    const char *a_end = a->data + bwd_extent(a->ndim, a->shape, a->strides) * bwd_dtype_size(a->dtype);
    const char *b_end = b->data + bwd_extent(b->ndim, b->shape, b->strides) * bwd_dtype_size(b->dtype);
    return a_end <= b->data || b_end <= a->data;
}

/* Written arrays must be reached once per element and share no memory with any other array. */
static int
check_memory(bwd_slot *slot, const bwd_update *u)
{
    const bwd_view *arrays[2 + BWD_MAX_STATES] = {&u->param_view, &u->grad_view};
    const int count = 2 + slot->plan->n_states;
    for (int i = 0; i < slot->plan->n_states; i++) {
        arrays[2 + i] = &u->state_views[i];
    }
    for (int i = 0; i < count; i++) {
        if (i != 1 && !u->flat && bwd_may_overlap(arrays[i]->ndim, arrays[i]->shape, arrays[i]->strides)) {
            PyErr_Format(slot->plan->error,
                         "parameter %R or its state reaches one element by two indices (expand()?): "
                         "clone() it before training; nothing was changed",
                         slot->name);
            return -1;
        }
        for (int k = i + 1; k < count; k++) {
            if (!apart(arrays[i], arrays[k])) {
                PyErr_Format(slot->plan->error,
                             "parameter %R shares memory with its gradient or state: give each a tensor of its "
                             "own (clone()); nothing was changed",
                             slot->name);
                return -1;
            }
        }
    }
    return 0;
}

/* One loop over memory when every array is dense in the same order; else the strides go along. */
static void
choose_layout(bwd_slot *slot, bwd_update *u)
{
    const bwd_view *param = &u->param_view;
    u->flat = bwd_is_dense(param->ndim, param->shape, param->strides) &&
              bwd_same_strides(param->ndim, param->shape, param->strides, u->grad_view.strides);
    u->layout = (bwd_layout){.ndim = param->ndim,
                             .shape = param->shape,
                             .param_strides = param->strides,
                             .grad_strides = u->grad_view.strides};
    for (int i = 0; i < slot->plan->n_states; i++) {
        const int64_t *strides = u->state_views[i].strides;
        u->flat = u->flat && bwd_same_strides(param->ndim, param->shape, param->strides, strides);
        u->layout.state_strides[i] = strides;
    }
}

/* The step being taken, from the 0-dim float32 `step` tensor: the journal of this parameter. */
static int
read_step(bwd_slot *slot, bwd_update *u)
{
    const bwd_plan *plan = slot->plan;
    if (bwd_view_of(&plan->torch, u->step, "step", slot->name, plan->error, &u->step_view) != 0) {
        return -1;
    }
    float done = 0.0f;
    const int is_scalar = u->step_view.n == 1 && u->step_view.dtype == BWD_f32;
    if (is_scalar) {
        memcpy(&done, u->step_view.data, sizeof done);
    }
    u->job.step = (double)(done + 1.0f);
    if (!is_scalar || !(done >= 0.0f) || !((float)u->job.step > done)) {
        PyErr_Format(plan->error,
                     "step of parameter %R must be a float32 tensor of one element that counts updates from 0, got %R; "
                     "nothing was changed",
                     slot->name, u->step);
        return -1;
    }
    return 0;
}

int
bwd_update_prepare(bwd_slot *slot, PyObject *param, PyObject *grad, bwd_update *u)
{
    memset(u, 0, offsetof(bwd_update, param_view));
    bwd_plan *plan = slot->plan;
    const bwd_torch *torch = &plan->torch;
    PyObject *optimizer = bwd_deref(plan->optimizer);
    if (optimizer == NULL) {
        PyErr_Format(plan->error,
                     "the optimizer of parameter %R is gone but its hook is still there: keep a reference to the "
                     "optimizer for as long as you train, or call optimizer.disarm()",
                     slot->name);
        return -1;
    }
    const int looked_up = read_group(slot, optimizer, u) == 0 && read_state(slot, optimizer, param, u) == 0;
    Py_DECREF(optimizer);
    if (!looked_up || read_grad(slot, grad, u) != 0 || (u->param = bwd_local(torch, param)) == NULL) {
        return -1;
    }
    if (bwd_view_of(torch, u->param, "value", slot->name, plan->error, &u->param_view) != 0 ||
        bwd_view_of(torch, u->grad, "gradient", slot->name, plan->error, &u->grad_view) != 0 ||
        check_alike(slot, "gradient", &u->param_view, &u->grad_view) != 0) {
        return -1;
    }
    for (int i = 0; i < plan->n_states; i++) {
        if (bwd_view_of(torch, u->states[i], plan->state_texts[i], slot->name, plan->error, &u->state_views[i]) != 0 ||
            check_alike(slot, plan->state_texts[i], &u->param_view, &u->state_views[i]) != 0) {
            return -1;
        }
        u->job.state[i] = u->state_views[i].data;
    }
    const enum bwd_dtype state_dtype = plan->n_states ? u->state_views[0].dtype : u->param_view.dtype;
    u->job.n = u->param_view.n;
    u->job.param = u->param_view.data;
    u->job.grad = u->grad_view.data;
    u->job.rule = plan->rule;
    u->job.format = bwd_format_find(u->param_view.dtype, u->grad_view.dtype, state_dtype);
    for (int i = 1; i < plan->n_states; i++) {
        if (u->state_views[i].dtype != state_dtype) {
            u->job.format = -1;
        }
    }
    if (u->job.format < 0) {
        PyErr_Format(
            plan->error,
            "no native step for parameter %R with storage (param %s, grad %s, state %s); known: %s; nothing was "
            "changed",
            slot->name, bwd_dtype_name(u->param_view.dtype), bwd_dtype_name(u->grad_view.dtype),
            bwd_dtype_name(state_dtype), known_formats);
        return -1;
    }
    choose_layout(slot, u);
    return check_memory(slot, u) != 0 || read_step(slot, u) != 0 ? -1 : 0;
}
