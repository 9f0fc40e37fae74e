#define BWD_ISA avx512
#include "cpu/stamp.h"
