#define BWD_ISA avx512
#define BWD_REAL_IS_DOUBLE
#include "cpu/stamp.h"
