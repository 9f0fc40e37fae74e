#define BWD_ISA avx2
#include "cpu/stamp.h"
