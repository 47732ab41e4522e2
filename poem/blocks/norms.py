"""Root-mean-square norms (Zhang and Sennrich 2019)."""

from __future__ import annotations

import jax
from flax import nnx

from poem.blocks.parameter import parameter
from poem.plain import rms_norm
from poem.spec import NormScale, Ops

__all__ = ["NormScale", "RMSNorm"]


class RMSNorm(nnx.Module):
    """x / rms(x) over the last axis, times the weight [width]."""

    def __init__(self, dtype: str, eps: float, scale: NormScale = NormScale.WEIGHT, **width: int) -> None:
        self.weight = parameter(dtype, **width)
        self.eps = eps
        self.scale = scale

    def __call__(self, x: jax.Array, ops: Ops | None = None) -> jax.Array:
        """x [..., width] -> the same shape and dtype; by the backend's kernel where it is given."""
        norm = rms_norm if ops is None else ops.rms_norm
        return norm(x, self.weight[...], self.eps, self.scale)
