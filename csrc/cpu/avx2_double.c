#define BWD_ISA avx2
#define BWD_REAL_IS_DOUBLE
#include "cpu/stamp.h"
