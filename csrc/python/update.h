/* One step about to be taken: what it needs, looked up afresh and checked. Nothing is written here. */
#ifndef BWD_UPDATE_H
#define BWD_UPDATE_H

#include "python/plan.h"

/* Everything one step needs, looked up afresh: nothing of it outlives the call. */
typedef struct bwd_update {
    PyObject *group, *state; /* the live param group and state dict */
    PyObject *param, *grad;  /* local tensors */
    PyObject *states[BWD_MAX_STATES];
    PyObject *step;
    bwd_view param_view, grad_view, state_views[BWD_MAX_STATES], step_view;
    int flat; /* all arrays lie alike and dense: one loop over memory */
    bwd_job job;
    bwd_layout layout;
} bwd_update;

/* Looks everything up and refuses what cannot be stepped. Release it whatever it returns: 0, or -1 with an exception.
 */
int bwd_update_prepare(bwd_slot *slot, PyObject *param, PyObject *grad, bwd_update *u);
void bwd_update_release(bwd_update *u);

#endif
