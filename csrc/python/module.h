/* What the files of the extension module share. Only csrc/python sees Python.h. */
#ifndef BWD_MODULE_H
#define BWD_MODULE_H

#include "python/py.h"

#include "core/dispatch.h"

/* Every object that the module owns, one row each: traverse, clear and free follow from it. */
#define BWD_MODULE_OBJECTS(X)                                                                                          \
    X(PyTypeObject, plan_type)                                                                                         \
    X(PyTypeObject, slot_type)

#define BWD_MODULE_MEMBER(type, name) type *name;
typedef struct bwd_module_state {
    const bwd_isa *isa; /* chosen when the module is executed, never changed after */
    bwd_pool *pool;     /* owned; every step of this module may use it */
    BWD_MODULE_OBJECTS(BWD_MODULE_MEMBER)
} bwd_module_state;
#undef BWD_MODULE_MEMBER

/* Borrowed; never NULL for our own module. */
bwd_module_state *bwd_module_state_of(PyObject *module);

/* Each part adds its types and functions when the module is executed; -1 with an exception set on failure. */
int bwd_step_exec(PyObject *module);
int bwd_plan_exec(PyObject *module, bwd_module_state *st);

#endif
