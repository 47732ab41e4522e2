#define PIE_NAMESPACE avx512
#define PIE_LANES 16
#include "attention.inc"
