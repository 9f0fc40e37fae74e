/* The way of one gradient: guard, look, step, release. Python objects above bwd_step, plain C below it. */
#include "python/update.h"

#include <string.h>

/* Below this many elements the work is shorter than handing the GIL over and waiting to get it back. */
enum { RELEASE_GIL_FROM = 4096 };

static bwd_status
run_scan(const bwd_plan *plan, bwd_update *u)
{
    const bwd_view *grad = &u->grad_view;
    if (u->flat) {
        return bwd_scan(plan->isa, plan->pool, grad->dtype, grad->data, grad->n, &u->job.grad_sq_sum,
                        &u->job.nonfinite);
    }
    return bwd_scan_strided(plan->isa, plan->pool, grad->dtype, grad->data, grad->ndim, grad->shape, grad->strides,
                            &u->job.grad_sq_sum, &u->job.nonfinite);
}

static bwd_status
run_step(const bwd_plan *plan, bwd_update *u)
{
    return u->flat ? bwd_step(plan->isa, plan->pool, &u->job)
                   : bwd_step_strided(plan->isa, plan->pool, &u->job, &u->layout);
}

/* Runs `work` without the GIL where it is long enough to be worth the hand-over. */
static int
run_native(bwd_slot *slot, bwd_update *u, bwd_status (*work)(const bwd_plan *, bwd_update *))
{
    bwd_status status;
    if (u->job.n < RELEASE_GIL_FROM) {
        status = work(slot->plan, u);
    }
    else {
        Py_BEGIN_ALLOW_THREADS status = work(slot->plan, u);
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
run_seam(bwd_slot *slot, bwd_update *u)
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
bump_version(const bwd_plan *plan, PyObject *param)
{
    if (PyList_SetItem(plan->bumped, 0, Py_NewRef(param)) != 0) {
        return -1;
    }
    PyObject *result = PyObject_CallFunctionObjArgs(plan->torch.increment_version, plan->bumped, NULL);
    Py_XDECREF(result);
    return PyList_SetItem(plan->bumped, 0, Py_NewRef(Py_None)) == 0 && result != NULL ? 0 : -1;
}

/* Returns 1 when the policy leaves the parameter as it is, 0 to go on, -1 with an exception. */
static int
apply_nonfinite_policy(bwd_slot *slot, bwd_update *u)
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
    PyErr_Format(
        plan->error,
        "the gradient of parameter %R has %llu non-finite elements of %zd (nonfinite=\"raise\"); this parameter was "
        "not changed. Lower lr, or set nonfinite=\"skip\" to leave such parameters out of the update",
        slot->name, (unsigned long long)u->job.nonfinite, (Py_ssize_t)u->job.n);
    return -1;
}

static int
update_run(bwd_slot *slot, PyObject *param, bwd_update *u)
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
    return bump_version(plan, param);
}

/* The hook takes the gradient away before the kernel runs without the GIL: another thread's backward then cannot add to
 * memory that is being read. It is put back when the step fails, for whoever wants to look at it. */
static int
update_run_taking(bwd_slot *slot, PyObject *param, PyObject *grad, bwd_update *u)
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
bwd_slot_claim(bwd_slot *slot)
{
    if (slot->busy) {
        PyErr_Format(slot->plan->accumulation_error,
                     "parameter %R is being stepped by another thread: train one model from one thread", slot->name);
        return -1;
    }
    slot->busy = 1;
    return 0;
}

int
bwd_slot_update(bwd_slot *slot, PyObject *param, PyObject *grad, bwd_mode mode)
{
    bwd_update u;
    int rc = bwd_update_prepare(slot, param, grad, &u);
    if (rc == 0 && mode == BWD_CHECK) {
        rc = slot->plan->nonfinite == BWD_NONFINITE_RAISE && apply_nonfinite_policy(slot, &u) < 0 ? -1 : 0;
    }
    else if (rc == 0) {
        rc = mode == BWD_TAKE_GRAD ? update_run_taking(slot, param, grad, &u) : update_run(slot, param, &u);
        if (rc == 0) {
            slot->last_update = slot->plan->update;
            slot->plan->fired++;
        }
    }
    bwd_update_release(&u);
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
    if (slot->last_update == plan->update) {
        PyErr_Format(plan->accumulation_error,
                     "parameter %R received a second gradient in update %llu, after it was already stepped. Either "
                     "optimizer.step() was "
                     "not called after the last backward, or several backwards feed one update (gradient accumulation, "
                     "a loss in parts, "
                     "reentrant checkpointing, an interrupted backward). Call step() after every backward, and set "
                     "gradient accumulation "
                     "to 1 (verl: data.train_batch_size = ranks x data.micro_batch_size_per_gpu; TRL: "
                     "gradient_accumulation_steps=1); to "
                     "go on from here: optimizer.acknowledge_partial_update() or optimizer.load_state_dict()",
                     slot->name, plan->update);
        return -1;
    }
    PyObject *own = bwd_deref(slot->param);
    Py_XDECREF(own);
    if (own != param) {
        PyErr_Format(
            plan->error,
            "the hook of parameter %R was called with another tensor; call optimizer.arm() again after replacing "
            "parameters",
            slot->name);
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

/* The hook proper, for a slot that no other thread is in. */
static int
hook_claimed(bwd_slot *slot, PyObject *param)
{
    bwd_plan *plan = slot->plan;
    PyObject *grad = guard(slot, param) == 0 ? PyObject_GetAttr(param, plan->torch.name_grad) : NULL;
    int rc = grad ? 0 : -1;
    if (rc == 0 && grad != Py_None) {
        rc = begin_backward(plan);
        rc = rc == 0 ? bwd_slot_update(slot, param, grad, BWD_TAKE_GRAD) : rc;
    }
    Py_XDECREF(grad);
    return rc;
}

PyObject *
bwd_slot_hook(PyObject *self, PyObject *param)
{
    bwd_slot *slot = (bwd_slot *)self;
    int rc = bwd_slot_claim(slot);
    if (rc == 0) {
        rc = hook_claimed(slot, param);
        slot->busy = 0;
    }
    if (rc != 0) {
        bwd_plan_poison(slot->plan);
        return NULL;
    }
    Py_RETURN_NONE;
}
