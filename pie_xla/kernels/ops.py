"""Which kernels a backend uses."""

from __future__ import annotations

import enum

from jax.sharding import Mesh

from poem.spec import Ops


class Kernel(enum.Enum):
    """A set of attention kernels."""

    XLA = "xla"  # plain XLA, everywhere
    CPU = "cpu"  # C++ through XLA's foreign function interface
    TPU = "tpu"  # JAX's Pallas ragged paged attention


def ops_for(kernel: Kernel, mesh: Mesh | None = None) -> Ops:
    """The kernels of one kind. XLA splits its own operations over `mesh`; a Pallas kernel has to know it."""
    match kernel:
        case Kernel.XLA:
            from pie_xla.kernels.xla import XlaOps

            return XlaOps()
        case Kernel.CPU:
            from pie_xla.kernels.cpu import CpuOps

            return CpuOps()
        case Kernel.TPU:
            # imported late: Pallas takes 0.3 s to import, and only a TPU needs it
            from pie_xla.kernels.tpu import TpuOps

            return TpuOps(mesh)
