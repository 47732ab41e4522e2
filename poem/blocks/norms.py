"""Root-mean-square norms (Zhang and Sennrich 2019), computed in float32."""

from __future__ import annotations

import enum

import jax
import jax.numpy as jnp
from flax import nnx

from poem.blocks.parameter import parameter


class NormScale(enum.Enum):
    """What the stored weight multiplies by."""

    WEIGHT = "weight"  # llama, qwen: rounded to x's dtype before the weight
    ONE_PLUS_WEIGHT = "one_plus_weight"  # gemma: all in float32


class RMSNorm(nnx.Module):
    """x / rms(x) over the last axis, times the weight [width]."""

    def __init__(self, dtype: str, eps: float, scale: NormScale = NormScale.WEIGHT, **width: int) -> None:
        self.weight = parameter(dtype, **width)
        self.eps = eps
        self.scale = scale

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [..., width] -> the same shape and dtype."""
        wide = x.astype(jnp.float32)
        normed = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        weight = jnp.broadcast_to(self.weight[...], x.shape)
        match self.scale:
            case NormScale.WEIGHT:
                return weight * normed.astype(x.dtype)
            case NormScale.ONE_PLUS_WEIGHT:
                return (normed * (1.0 + weight.astype(jnp.float32))).astype(x.dtype)
