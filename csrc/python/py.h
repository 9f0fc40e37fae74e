/* The limited API of CPython 3.11, stated once, so that every file of this room agrees on it. */
#ifndef BWD_PY_H
#define BWD_PY_H

#define PY_SSIZE_T_CLEAN
#ifndef Py_LIMITED_API
#define Py_LIMITED_API 0x030b0000
#endif
#include <Python.h>

#endif
