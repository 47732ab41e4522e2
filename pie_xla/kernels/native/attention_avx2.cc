#define PIE_NAMESPACE avx2
#define PIE_LANES 8
#include "attention.inc"
