"""The device mesh: two named axes, from a list of devices."""

from __future__ import annotations

import enum
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from pie_xla.errors import UsageError


class MeshAxis(enum.StrEnum):
    """The mesh's axes. `data` holds copies of the model (rows may be split over it), `tensor` parts of each layer."""

    DATA = "data"
    TENSOR = "tensor"


def make_mesh(devices: Sequence[jax.Device], tensor: int | None = None) -> Mesh:
    """A mesh of shape (data, tensor) over `devices`, in their order: neighbours in the list share a tensor group.

    Args:
        devices: real devices, or those of a topology description.
        tensor: devices per copy of the model; all of them by default. Must divide the number of devices.

    Raises:
        UsageError: no devices, or `tensor` does not divide their number.
    """
    count = len(devices)
    if count == 0:
        raise UsageError("a mesh needs at least one device", "check which devices JAX sees with `pie-xla doctor`")
    width = count if tensor is None else tensor
    if width < 1 or count % width:
        divisors = ", ".join(str(n) for n in range(1, count + 1) if count % n == 0)
        raise UsageError(f"{count} devices cannot be split into tensor groups of {width}", f"choose one of {divisors}")
    # Auto: the compiler places intermediate values; parameters, state and a few constraints pin the rest.
    grid = np.array(devices, dtype=object).reshape(count // width, width)
    return Mesh(grid, tuple(axis.value for axis in MeshAxis), axis_types=(AxisType.Auto, AxisType.Auto))
