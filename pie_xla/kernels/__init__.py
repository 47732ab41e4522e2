"""Attention kernels behind one enum; they build the `Ops` that Poem's layers call."""
