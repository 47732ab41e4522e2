"""Token embedding and vocabulary head, one table [V, D] when they are tied."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from poem.blocks.linear import matmul
from poem.blocks.parameter import parameter


class Embedding(nnx.Module):
    """`weight` [V, D]; rows are looked up, and `attend` scores hidden states against all of them."""

    def __init__(self, dtype: str, vocab: int, embed: int) -> None:
        self.weight = parameter(dtype, vocab=vocab, embed=embed)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """tokens i32[B, Q] -> [B, Q, D]. An id outside the vocabulary gives NaN, which the caller can see."""
        # unsigned, because a negative index would count from the end
        return self.weight[...].at[tokens.astype(jnp.uint32)].get(mode="fill", fill_value=jnp.nan)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """hidden [R, D] -> f32[R, V]."""
        return matmul(hidden, self.weight[...])
