"""The gated feed-forward layer (Shazeer 2020)."""

from __future__ import annotations

import enum

import jax
from flax import nnx

from poem.blocks.linear import Linear


class Activation(enum.Enum):
    """`hidden_act` of a checkpoint's config."""

    SILU = "silu"
    GELU_TANH = "gelu_pytorch_tanh"
    GELU = "gelu"

    def __call__(self, x: jax.Array) -> jax.Array:
        match self:
            case Activation.SILU:
                return jax.nn.silu(x)
            case Activation.GELU_TANH:
                return jax.nn.gelu(x, approximate=True)
            case Activation.GELU:
                return jax.nn.gelu(x, approximate=False)


class GatedMLP(nnx.Module):
    """down(act(gate(x)) * up(x))."""

    def __init__(self, dtype: str, embed: int, ffn: int, act: Activation, bias: bool = False) -> None:
        self.gate_proj = Linear(dtype, {"embed": embed}, {"ffn": ffn}, bias)
        self.up_proj = Linear(dtype, {"embed": embed}, {"ffn": ffn}, bias)
        self.down_proj = Linear(dtype, {"ffn": ffn}, {"embed": embed}, bias)
        self.act = act

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [B, Q, D] -> [B, Q, D]."""
        with jax.named_scope("mlp"):
            return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))
