/* Plan: one optimizer's parameters and the books of its updates. Slot: one parameter's place in it.
 * A slot holds no strong path to a parameter: torch's collector does not look through post-accumulate hooks,
 * so such a path would keep the whole model alive for ever. */
#ifndef BWD_PLAN_H
#define BWD_PLAN_H

#include "python/tensor.h"

#include "core/dispatch.h"

typedef enum bwd_nonfinite { BWD_NONFINITE_OFF, BWD_NONFINITE_SKIP, BWD_NONFINITE_RAISE } bwd_nonfinite;

/* Where a rule's hyper-parameter stands in a param group: group[key], or group[key][index] for betas. */
typedef struct bwd_hyper_key {
    PyObject *key;
    Py_ssize_t index; /* -1: the value itself */
} bwd_hyper_key;

typedef struct bwd_plan {
    PyObject_HEAD PyObject *optimizer; /* weak reference */
    PyObject *kernel;                  /* NULL, or a Python callable in the place of bwd_step (tests) */
    PyObject *slots;                   /* list of Slot */
    PyObject *poison;                  /* NULL, or the text that every later call raises */
    PyObject *bumped;                  /* list of one, lent to torch's increment_version: None between calls */
    PyObject *error, *accumulation_error;
    PyObject *name_groups, *name_state, *name_begin, *name_init_state, *name_step;
    const bwd_isa *isa;
    bwd_pool *pool; /* the module's, which outlives every type of the module */
    bwd_torch torch;
    int rule, n_states, n_hypers;
    PyObject *state_names[BWD_MAX_STATES];
    const char *state_texts[BWD_MAX_STATES];
    bwd_hyper_key hypers[BWD_MAX_HYPERS];
    const char *hyper_texts[BWD_MAX_HYPERS];
    bwd_nonfinite nonfinite;
    int backward_open;         /* a backward began to step parameters and has not ended */
    Py_ssize_t fired;          /* parameters handled in the open update */
    Py_ssize_t params_stepped; /* in the last closed update */
    unsigned long long update; /* number of the open update, from 1 */
    unsigned long long updates, param_steps, native_steps, skipped;
} bwd_plan;

typedef struct bwd_slot {
    PyObject_HEAD bwd_plan *plan;
    PyObject *param; /* weak reference */
    PyObject *name;
    Py_ssize_t group;
    char armed;
    char busy;                      /* claimed by a thread: looking things up may already hand the GIL to another */
    unsigned long long last_update; /* the update in which this parameter was last handled */
    double grad_sq_sum;             /* sum of its squared gradient there */
} bwd_slot;

/* Stop before anything is written; step and leave the gradient; step and free it. */
typedef enum bwd_mode { BWD_CHECK, BWD_KEEP_GRAD, BWD_TAKE_GRAD } bwd_mode;

/* Keeps other threads out until slot->busy is cleared; -1 with an exception when one is in. */
int bwd_slot_claim(bwd_slot *slot);

/* Steps one parameter from `grad`; the slot is claimed, except to check. 0, or -1 with an exception. */
int bwd_slot_update(bwd_slot *slot, PyObject *param, PyObject *grad, bwd_mode mode);

/* The post-accumulate-grad hook: METH_O on Slot. */
PyObject *bwd_slot_hook(PyObject *self, PyObject *param);

/* Records the pending exception as what spoilt the open update, and leaves it pending. */
void bwd_plan_poison(bwd_plan *plan);

/* Raises the recorded text if there is one. */
int bwd_plan_refuse_poisoned(bwd_plan *plan);

/* The type of Slot, and a new one; `param` is held weakly. */
extern PyType_Spec bwd_slot_spec;
PyObject *bwd_slot_new(PyTypeObject *type, bwd_plan *plan, PyObject *param, Py_ssize_t group, PyObject *name,
                       int armed);

/* tp_dealloc of a heap type whose references all go in its tp_clear. */
void bwd_dealloc(PyObject *self, inquiry clear);

/* A new reference to what a weak reference points at, or NULL without an exception. */
PyObject *bwd_deref(PyObject *weak);

#endif
