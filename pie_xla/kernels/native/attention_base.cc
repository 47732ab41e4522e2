#define PIE_NAMESPACE base
#define PIE_LANES 4
#include "attention.inc"
