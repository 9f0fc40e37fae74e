#define BWD_ISA baseline
#define BWD_REAL_IS_DOUBLE
#include "cpu/stamp.h"
