"""The vocabulary that families share. Parameters carry their logical axes; kernels are [*out, *in]."""
