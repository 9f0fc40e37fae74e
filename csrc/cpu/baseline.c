#define BWD_ISA baseline
#include "cpu/stamp.h"
