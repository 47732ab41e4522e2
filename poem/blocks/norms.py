"""Root-mean-square norms (Zhang and Sennrich 2019), computed in float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from poem.blocks.parameter import parameter
from poem.spec import NormScale, Ops

__all__ = ["NormScale", "RMSNorm", "rms_norm"]


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


def rms_norm(x: jax.Array, weight: jax.Array, eps: float, scale: NormScale) -> jax.Array:
    """x [..., D] -> the same shape and dtype, in plain XLA."""
    wide = x.astype(jnp.float32)
    normed = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    weight = jnp.broadcast_to(weight, x.shape)
    match scale:
        case NormScale.WEIGHT:
            return weight * normed.astype(x.dtype)
        case NormScale.ONE_PLUS_WEIGHT:
            return (normed * (1.0 + weight.astype(jnp.float32))).astype(x.dtype)
