"""Grouped-query self-attention over paged keys and values."""

from __future__ import annotations

import jax
from flax import nnx

from poem.blocks.linear import Linear
from poem.blocks.norms import NormScale, RMSNorm
from poem.context import Context
from poem.spec import Attention


class SelfAttention(nnx.Module):
    """q, k, v projections, optional norm over each head, rope, attention, output projection.

    Args:
        heads, kv_heads, head_dim: H, K, d; H is a multiple of K.
        bias: whether q, k, v (and with `out_bias` o) have one.
        norm_eps: epsilon of the per-head q and k norms; None: no such norms.
        how: scale, window and soft cap.
    """

    def __init__(
        self,
        dtype: str,
        *,
        embed: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        how: Attention,
        bias: bool = False,
        out_bias: bool = False,
        norm_eps: float | None = None,
        norm_scale: NormScale = NormScale.WEIGHT,
    ) -> None:
        self.q_proj = Linear(dtype, {"embed": embed}, {"heads": heads, "head_dim": head_dim}, bias)
        self.k_proj = Linear(dtype, {"embed": embed}, {"kv_heads": kv_heads, "head_dim": head_dim}, bias)
        self.v_proj = Linear(dtype, {"embed": embed}, {"kv_heads": kv_heads, "head_dim": head_dim}, bias)
        self.o_proj = Linear(dtype, {"heads": heads, "head_dim": head_dim}, {"embed": embed}, out_bias)
        self.q_norm = RMSNorm(dtype, norm_eps, norm_scale, head_dim=head_dim) if norm_eps is not None else None
        self.k_norm = RMSNorm(dtype, norm_eps, norm_scale, head_dim=head_dim) if norm_eps is not None else None
        self.how = how

    def __call__(self, x: jax.Array, context: Context) -> jax.Array:
        """x [B, Q, D] -> [B, Q, D]; this layer's keys and values are appended to the context's state."""
        with jax.named_scope("self_attn"):
            q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
            if self.q_norm is not None and self.k_norm is not None:
                q, k = self.q_norm(q, context.ops), self.k_norm(k, context.ops)
            q = context.constrain(context.rotate(q), None, None, "heads", "head_dim")
            k = context.constrain(context.rotate(k), None, None, "kv_heads", "head_dim")
            return self.o_proj(context.attend(q, k, v, self.how))
