/* The way of one gradient: guard, look, step, release. Python objects above bwd_step, plain C below it. */
#include "python/plan.h"

#include <string.h>

/* Below this many elements the work is shorter than handing the GIL over and waiting to get it back. */
enum { RELEASE_GIL_FROM = 4096 };

#define FORMAT_TEXT(prefix, P, G, S) prefix "(" #P ", " #G ", " #S ")"
static const char known_formats[] = "(param, grad, state) as" BWD_FORMATS(FORMAT_TEXT, " ");
#undef FORMAT_TEXT

/* Everything one step needs, looked up afresh: nothing of it outlives the call. */
typedef struct update {
    PyObject *group, *state; /* the live param group and state dict */
    PyObject *param, *grad;  /* local tensors */
    PyObject *states[BWD_MAX_STATES];
    PyObject *step;
    bwd_view param_view, grad_view, state_views[BWD_MAX_STATES], step_view;
    int flat; /* all arrays lie alike and dense: one loop over memory */
    bwd_job job;
    bwd_layout layout;
} update;

static void
update_release(update *u)
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

/* Groups are found by index at every call: load_state_dict and accelerate's prepare replace the dicts. */
static int
read_group(bwd_slot *slot, PyObject *optimizer, update *u)
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
        PyObject *value = PyObject_GetItem(u->group, at->key);
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
                     plan->hyper_texts[bad], slot->group, value ? value : Py_None, bwd_rule_hyper_range(plan->rule, bad),
                     slot->name);
        Py_XDECREF(value);
        return -1;
    }
    return 0;
}

/* The live state dict of the parameter, filled by the optimizer where it is still empty. */
static int
read_state(bwd_slot *slot, PyObject *optimizer, PyObject *param, update *u)
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
        PyObject *tensor = PyObject_GetItem(u->state, name);
        if (tensor == NULL) {
            if (PyErr_ExceptionMatches(PyExc_KeyError)) {
                PyErr_Clear();
                PyErr_Format(plan->error, "the optimizer state of parameter %R has no %R; load a complete state_dict, or "
                             "clear it (optimizer.state[param].clear()) to start from zeros", slot->name, name);
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
read_grad(bwd_slot *slot, PyObject *grad, update *u)
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
    if (other->ndim == param->ndim
        && memcmp(other->shape, param->shape, (size_t)param->ndim * sizeof *param->shape) == 0) {
        return 0;
    }
    PyErr_Format(slot->plan->error, "%s of parameter %R has %zd elements in %d dimensions, the parameter %zd in %d: shapes must be "
                 "equal; nothing was changed", what, slot->name, (Py_ssize_t)other->n, other->ndim, (Py_ssize_t)param->n, param->ndim);
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
check_memory(bwd_slot *slot, const update *u)
{
    const bwd_view *arrays[2 + BWD_MAX_STATES] = {&u->param_view, &u->grad_view};
    const int count = 2 + slot->plan->n_states;
    for (int i = 0; i < slot->plan->n_states; i++) {
        arrays[2 + i] = &u->state_views[i];
    }
    for (int i = 0; i < count; i++) {
        if (i != 1 && !u->flat && bwd_may_overlap(arrays[i]->ndim, arrays[i]->shape, arrays[i]->strides)) {
            PyErr_Format(slot->plan->error, "parameter %R or its state reaches one element by two indices (expand()?): "
                         "clone() it before training; nothing was changed", slot->name);
            return -1;
        }
        for (int k = i + 1; k < count; k++) {
            if (!apart(arrays[i], arrays[k])) {
                PyErr_Format(slot->plan->error, "parameter %R shares memory with its gradient or state: give each a tensor of its "
                             "own (clone()); nothing was changed", slot->name);
                return -1;
            }
        }
    }
    return 0;
}

/* One loop over memory when every array is dense in the same order; else the strides go along. */
static void
choose_layout(bwd_slot *slot, update *u)
{
    const bwd_view *param = &u->param_view;
    u->flat = bwd_is_dense(param->ndim, param->shape, param->strides)
              && bwd_same_strides(param->ndim, param->shape, param->strides, u->grad_view.strides);
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
read_step(bwd_slot *slot, update *u)
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
        PyErr_Format(plan->error, "step of parameter %R must be a float32 tensor of one element that counts updates from 0, got %R; "
                     "nothing was changed", slot->name, u->step);
        return -1;
    }
    return 0;
}

/* Looks everything up and refuses what cannot be stepped. Nothing is written. */
static int
update_prepare(bwd_slot *slot, PyObject *param, PyObject *grad, update *u)
{
    bwd_plan *plan = slot->plan;
    const bwd_torch *torch = &plan->torch;
    PyObject *optimizer = bwd_deref(plan->optimizer);
    if (optimizer == NULL) {
        PyErr_Format(plan->error, "the optimizer of parameter %R is gone but its hook is still there: keep a reference to the "
                     "optimizer for as long as you train, or call optimizer.disarm()", slot->name);
        return -1;
    }
    const int looked_up = read_group(slot, optimizer, u) == 0 && read_state(slot, optimizer, param, u) == 0;
    Py_DECREF(optimizer);
    if (!looked_up || read_grad(slot, grad, u) != 0 || (u->param = bwd_local(torch, param)) == NULL) {
        return -1;
    }
    if (bwd_view_of(torch, u->param, "value", slot->name, plan->error, &u->param_view) != 0
        || bwd_view_of(torch, u->grad, "gradient", slot->name, plan->error, &u->grad_view) != 0
        || check_alike(slot, "gradient", &u->param_view, &u->grad_view) != 0) {
        return -1;
    }
    for (int i = 0; i < plan->n_states; i++) {
        if (bwd_view_of(torch, u->states[i], plan->state_texts[i], slot->name, plan->error, &u->state_views[i]) != 0
            || check_alike(slot, plan->state_texts[i], &u->param_view, &u->state_views[i]) != 0) {
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
        PyErr_Format(plan->error, "no native step for parameter %R with storage (param %s, grad %s, state %s); known: %s; nothing was "
                     "changed", slot->name, bwd_dtype_name(u->param_view.dtype), bwd_dtype_name(u->grad_view.dtype),
                     bwd_dtype_name(state_dtype), known_formats);
        return -1;
    }
    choose_layout(slot, u);
    return check_memory(slot, u) != 0 || read_step(slot, u) != 0 ? -1 : 0;
}

static bwd_status
run_scan(const bwd_plan *plan, update *u)
{
    const bwd_view *grad = &u->grad_view;
    if (u->flat) {
        return bwd_scan(plan->isa, grad->dtype, grad->data, grad->n, &u->job.grad_sq_sum, &u->job.nonfinite);
    }
    return bwd_scan_strided(plan->isa, grad->dtype, grad->data, grad->ndim, grad->shape, grad->strides,
                            &u->job.grad_sq_sum, &u->job.nonfinite);
}

static bwd_status
run_step(const bwd_plan *plan, update *u)
{
    return u->flat ? bwd_step(plan->isa, &u->job) : bwd_step_strided(plan->isa, &u->job, &u->layout);
}

/* Runs `work` without the GIL where it is long enough to be worth the hand-over. */
static int
run_native(bwd_slot *slot, update *u, bwd_status (*work)(const bwd_plan *, update *))
{
    bwd_status status;
    if (u->job.n < RELEASE_GIL_FROM) {
        status = work(slot->plan, u);
    }
    else {
        Py_BEGIN_ALLOW_THREADS
        status = work(slot->plan, u);
        Py_END_ALLOW_THREADS
    }
    if (status != BWD_OK) {
        PyErr_Format(slot->plan->error, "parameter %R: %s; nothing was changed", slot->name, bwd_status_text(status));
        return -1;
    }
    return 0;
}

/* The seam for tests: a Python callable in the place of bwd_step, inside the same hook. */
static int
run_seam(bwd_slot *slot, update *u)
{
    const bwd_plan *plan = slot->plan;
    PyObject *states = PyDict_New(), *step = PyFloat_FromDouble(u->job.step), *result = NULL;
    if (states == NULL || step == NULL) {
        goto done;
    }
    for (int i = 0; i < plan->n_states; i++) {
        if (PyDict_SetItem(states, plan->state_names[i], u->states[i]) != 0) {
            goto done;
        }
    }
    result = PyObject_CallFunctionObjArgs(plan->kernel, u->param, u->grad, states, u->group, step, NULL);
done:
    Py_XDECREF(states);
    Py_XDECREF(step);
    Py_XDECREF(result);
    return result ? 0 : -1;
}

/* A raw write leaves the version counter behind, and a stale saved tensor would then pass unnoticed. */
static int
bump_version(const bwd_torch *torch, PyObject *param)
{
    PyObject *one = PyTuple_Pack(1, param);
    PyObject *result = one ? PyObject_CallFunctionObjArgs(torch->increment_version, one, NULL) : NULL;
    Py_XDECREF(one);
    Py_XDECREF(result);
    return result ? 0 : -1;
}

/* Returns 1 when the policy leaves the parameter as it is, 0 to go on, -1 with an exception. */
static int
apply_nonfinite_policy(bwd_slot *slot, update *u)
{
    bwd_plan *plan = slot->plan;
    if (plan->nonfinite == BWD_NONFINITE_OFF && plan->kernel == NULL) {
        return 0; /* the step itself sums and counts in its one pass */
    }
    if (run_native(slot, u, run_scan) != 0) {
        return -1;
    }
    slot->grad_sq_sum = u->job.grad_sq_sum;
    if (u->job.nonfinite == 0 || plan->nonfinite == BWD_NONFINITE_OFF) {
        return 0;
    }
    if (plan->nonfinite == BWD_NONFINITE_SKIP) {
        plan->skipped++;
        return 1;
    }
    PyErr_Format(plan->error, "the gradient of parameter %R has %llu non-finite elements of %zd (nonfinite=\"raise\"); this parameter was "
                 "not changed. Lower lr, or set nonfinite=\"skip\" to leave such parameters out of the update",
                 slot->name, (unsigned long long)u->job.nonfinite, (Py_ssize_t)u->job.n);
    return -1;
}

static int
update_run(bwd_slot *slot, PyObject *param, update *u)
{
    bwd_plan *plan = slot->plan;
    const int leave = apply_nonfinite_policy(slot, u);
    if (leave != 0) {
        return leave > 0 ? 0 : -1;
    }
    if (plan->kernel != NULL) {
        if (run_seam(slot, u) != 0) {
            return -1;
        }
    }
    else {
        if (run_native(slot, u, run_step) != 0) {
            return -1;
        }
        slot->grad_sq_sum = u->job.grad_sq_sum;
        plan->native_steps++;
    }
    const float step = (float)u->job.step;
    memcpy(u->step_view.data, &step, sizeof step);
    plan->param_steps++;
    return bump_version(&plan->torch, param);
}

/* The hook takes the gradient away before the kernel runs without the GIL: another thread's backward then cannot add to
 * memory that is being read. It is put back when the step fails, for whoever wants to look at it. */
static int
update_run_taking(bwd_slot *slot, PyObject *param, PyObject *grad, update *u)
{
    PyObject *name = slot->plan->torch.name_grad, *type, *value, *traceback;
    if (PyObject_SetAttr(param, name, Py_None) != 0) {
        return -1;
    }
    const int rc = update_run(slot, param, u);
    if (rc != 0) {
        PyErr_Fetch(&type, &value, &traceback);
        if (PyObject_SetAttr(param, name, grad) != 0) {
            PyErr_Clear();
        }
        PyErr_Restore(type, value, traceback);
    }
    return rc;
}

int
bwd_slot_update(bwd_slot *slot, PyObject *param, PyObject *grad, bwd_mode mode)
{
    update u;
    u.group = u.state = u.param = u.grad = u.step = NULL;
    memset(u.states, 0, sizeof u.states);
    int rc = update_prepare(slot, param, grad, &u);
    if (rc == 0 && mode == BWD_CHECK) {
        rc = slot->plan->nonfinite == BWD_NONFINITE_RAISE && apply_nonfinite_policy(slot, &u) < 0 ? -1 : 0;
    }
    else if (rc == 0) {
        slot->busy = 1;
        rc = mode == BWD_TAKE_GRAD ? update_run_taking(slot, param, grad, &u) : update_run(slot, param, &u);
        slot->busy = 0;
        if (rc == 0) {
            slot->last_update = slot->plan->update;
            slot->plan->fired++;
        }
    }
    update_release(&u);
    return rc;
}

/* Raises unless this parameter may be stepped now. */
static int
guard(bwd_slot *slot, PyObject *param)
{
    bwd_plan *plan = slot->plan;
    if (bwd_plan_refuse_poisoned(plan) != 0) {
        return -1;
    }
    if (slot->busy) {
        PyErr_Format(plan->accumulation_error, "parameter %R is being stepped by another thread: train one model from one thread",
                     slot->name);
        return -1;
    }
    if (slot->last_update == plan->update) {
        PyErr_Format(plan->accumulation_error,
                     "parameter %R received a second gradient in update %llu, after it was already stepped. Either optimizer.step() was "
                     "not called after the last backward, or several backwards feed one update (gradient accumulation, a loss in parts, "
                     "reentrant checkpointing, an interrupted backward). Call step() after every backward, and set gradient accumulation "
                     "to 1 (verl: data.train_batch_size = ranks x data.micro_batch_size_per_gpu; TRL: gradient_accumulation_steps=1); to "
                     "go on from here: optimizer.acknowledge_partial_update() or optimizer.load_state_dict()",
                     slot->name, plan->update);
        return -1;
    }
    PyObject *own = bwd_deref(slot->param);
    Py_XDECREF(own);
    if (own != param) {
        PyErr_Format(plan->error, "the hook of parameter %R was called with another tensor; call optimizer.arm() again after replacing "
                     "parameters", slot->name);
        return -1;
    }
    return 0;
}

/* The first parameter of a backward tells the optimizer, which checks what may change between updates. */
static int
begin_backward(bwd_plan *plan)
{
    if (plan->backward_open) {
        return 0;
    }
    PyObject *optimizer = bwd_deref(plan->optimizer);
    if (optimizer == NULL) {
        return 0; /* update_prepare names the parameter and says so */
    }
    PyObject *result = PyObject_CallMethodObjArgs(optimizer, plan->name_begin, NULL);
    Py_DECREF(optimizer);
    if (result == NULL) {
        return -1;
    }
    Py_DECREF(result);
    plan->backward_open = 1;
    return 0;
}

PyObject *
bwd_slot_hook(PyObject *self, PyObject *param)
{
    bwd_slot *slot = (bwd_slot *)self;
    bwd_plan *plan = slot->plan;
    PyObject *grad = NULL;
    int rc = guard(slot, param);
    if (rc == 0) {
        grad = PyObject_GetAttr(param, plan->torch.name_grad);
        rc = grad ? 0 : -1;
    }
    if (rc == 0 && grad != Py_None) {
        rc = begin_backward(plan);
        rc = rc == 0 ? bwd_slot_update(slot, param, grad, BWD_TAKE_GRAD) : rc;
    }
    Py_XDECREF(grad);
    if (rc != 0) {
        bwd_plan_poison(plan);
        return NULL;
    }
    Py_RETURN_NONE;
}
