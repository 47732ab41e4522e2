"""What is done to each token alone, in plain XLA: the reference of every backend. It imports no flax: kernels need not wait for it."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from poem.spec import NormScale


def rotate(x: jax.Array, table: tuple[jax.Array, ...]) -> jax.Array:
    """x [B, Q, H, d] rotated; with a table of dim < d the rest of each head is left alone."""
    cos, sin = table[0][:, :, None, :], table[1][:, :, None, :]
    half = cos.shape[-1]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    a32, b32 = a.astype(jnp.float32), b.astype(jnp.float32)
    turned = (a32 * cos - b32 * sin, b32 * cos + a32 * sin)
    return jnp.concatenate([t.astype(x.dtype) for t in turned] + [rest], axis=-1)


def rms_norm(x: jax.Array, weight: jax.Array, eps: float, scale: NormScale) -> jax.Array:
    """x [..., D] -> the same shape and dtype, computed in float32."""
    wide = x.astype(jnp.float32)
    normed = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    weight = jnp.broadcast_to(weight, x.shape)
    match scale:
        case NormScale.WEIGHT:
            return weight * normed.astype(x.dtype)
        case NormScale.ONE_PLUS_WEIGHT:
            return (normed * (1.0 + weight.astype(jnp.float32))).astype(x.dtype)
