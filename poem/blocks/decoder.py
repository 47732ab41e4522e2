"""What all decoder families share around their layers: embedding, rope tables, last norm, vocabulary head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from poem.blocks.attention import SelfAttention
from poem.blocks.embedding import Embedding
from poem.blocks.mlp import GatedMLP
from poem.blocks.norms import NormScale, RMSNorm
from poem.blocks.rope import Rope
from poem.context import Context
from poem.spec import Batch, Transform, WeightRule


class PreNormLayer(nnx.Module):
    """Norm, attention, residual; norm, MLP, residual. The layer of llama, qwen2 and qwen3."""

    def __init__(self, dtype: str, embed: int, eps: float, self_attn: SelfAttention, mlp: GatedMLP) -> None:
        self.input_layernorm = RMSNorm(dtype, eps, embed=embed)
        self.self_attn = self_attn
        self.post_attention_layernorm = RMSNorm(dtype, eps, embed=embed)
        self.mlp = mlp

    def __call__(self, x: jax.Array, context: Context) -> jax.Array:
        """x [B, Q, D] -> [B, Q, D]."""
        x = x + self.self_attn(self.input_layernorm(x, context.ops), context)
        return x + self.mlp(self.post_attention_layernorm(x, context.ops))


class Decoder(nnx.Module):
    """A decoder apart from its layer loop (see `poem.family.Model`).

    Args:
        layers: all layers, first to last.
        ropes: rope by state group; groups without attention have none.
        tied: the vocabulary head is the embedding.
        norm_scale: what the last norm's weight means.
        embed_scale: the embedding is multiplied by this, rounded to its dtype first.
        logit_cap: logits become cap * tanh(logits / cap).
    """

    def __init__(
        self,
        dtype: str,
        *,
        vocab: int,
        embed: int,
        eps: float,
        layers: Sequence[Any],
        ropes: Mapping[str, Rope],
        tied: bool,
        norm_scale: NormScale = NormScale.WEIGHT,
        embed_scale: float | None = None,
        logit_cap: float | None = None,
    ) -> None:
        self.embed_tokens = Embedding(dtype, vocab, embed)
        self.layers = nnx.List(layers)
        self.norm = RMSNorm(dtype, eps, norm_scale, embed=embed)
        self.lm_head = None if tied else Embedding(dtype, vocab, embed)
        self.ropes = tuple(ropes.items())
        self.embed_scale = embed_scale
        self.logit_cap = logit_cap

    def embed(self, batch: Batch) -> tuple[jax.Array, dict[str, tuple[jax.Array, ...]]]:
        """x [B, Q, D], and the rope table of each group."""
        x = self.embed_tokens(batch.tokens)
        if self.embed_scale is not None:
            x = x * jnp.asarray(self.embed_scale, x.dtype)
        return x, {group: rope.table(batch.positions) for group, rope in self.ropes}

    def hidden(self, x: jax.Array) -> jax.Array:
        """[R, D] -> [R, D], normed."""
        return self.norm(x)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """[R, D] -> f32[R, V]."""
        logits = (self.embed_tokens if self.lm_head is None else self.lm_head).logits(hidden)
        return logits if self.logit_cap is None else jnp.tanh(logits / self.logit_cap) * self.logit_cap


def decoder_rules(
    tied: bool,
    norms: Sequence[str] = ("input_layernorm", "post_attention_layernorm"),
    prefix: str = "model.",
    head: str = "lm_head.",
) -> tuple[WeightRule, ...]:
    """Checkpoint tensors -> parameters of a decoder with self-attention and gated MLP.

    Rules whose parameter a configuration lacks (a bias, a q_norm) are there all the same: a tensor without a parameter
    is refused when weights are assigned.

    Args:
        tied: the head is the embedding; some checkpoints store it twice.
        norms: names of each layer's norms over D.
        prefix: of all names but the head's.
        head: of the head's.
    """
    rules = [
        WeightRule(f"{prefix}embed_tokens.weight", "embed_tokens.weight"),
        WeightRule(f"{prefix}norm.weight", "norm.weight"),
    ]
    layer = "layers.{i}."
    kernels = {
        "self_attn.q_proj": Transform.SPLIT_OUT,
        "self_attn.k_proj": Transform.SPLIT_OUT,
        "self_attn.v_proj": Transform.SPLIT_OUT,
        "self_attn.o_proj": Transform.SPLIT_IN,
        "mlp.gate_proj": Transform.COPY,
        "mlp.up_proj": Transform.COPY,
        "mlp.down_proj": Transform.COPY,
    }
    for name, transform in kernels.items():
        at = f"{layer}{name}."
        rules.append(WeightRule(f"{prefix}{at}weight", f"{at}kernel", transform))
        rules.append(WeightRule(f"{prefix}{at}bias", f"{at}bias", Transform.FLAT))
    for name in ("self_attn.q_norm", "self_attn.k_norm", *norms):
        rules.append(WeightRule(f"{prefix}{layer}{name}.weight", f"{layer}{name}.weight"))
    rotary = f"{prefix}{layer}self_attn.rotary_emb.inv_freq"
    rules.append(WeightRule(rotary, None, reason="rope frequencies are computed"))
    if tied:
        rules.append(WeightRule(f"{head}weight", None, reason="the same as the embedding (tie_word_embeddings)"))
    else:
        rules.append(WeightRule(f"{head}weight", "lm_head.weight"))
    return tuple(rules)
