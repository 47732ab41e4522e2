"""Gemma 3, text: five sliding layers to one full, norms around each sublayer, scaled embedding (Gemma Team 2025).

The vision tower of the larger checkpoints is left out by name; their `text_config` is what is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import jax
from flax import nnx

from poem.blocks.attention import SelfAttention
from poem.blocks.decoder import Decoder, decoder_rules
from poem.blocks.mlp import Activation, GatedMLP
from poem.blocks.norms import NormScale, RMSNorm
from poem.blocks.rope import Rope, read_rope
from poem.config import read_config, window_groups
from poem.context import Context
from poem.family import window_state
from poem.spec import KV, Attention, Ops, StateGroup, WeightRule

NORMS = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")


@dataclass(frozen=True)
class Config:
    """config.json's text part, in its own names; defaults are those of the 4b model, whose file leaves them out."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    layer_groups: tuple[str, ...]
    full_rope: Rope
    window_rope: Rope
    vocab_size: int = 262208
    num_attention_heads: int = 8
    num_key_value_heads: int = 4
    head_dim: int = 256
    hidden_activation: Activation = Activation.GELU_TANH
    max_position_embeddings: int = 131072
    rms_norm_eps: float = 1e-6
    query_pre_attn_scalar: float = 256.0
    sliding_window: int = 4096
    tie_word_embeddings: bool = True
    attention_bias: bool = False
    final_logit_softcapping: float | None = None
    attn_logit_softcapping: Literal[None] = None
    use_bidirectional_attention: Literal[False] = False

    @classmethod
    def from_json(cls, config: Mapping[str, Any]) -> Config:
        """Rope thetas in either spelling: nested by layer type, or `rope_theta` and `rope_local_base_freq`."""
        text = config.get("text_config", config)
        width = text.get("head_dim") or 256
        nested = text.get("rope_parameters") or {}
        full = {"rope_theta": text.get("rope_theta", 1e6), **(text.get("rope_scaling") or {})}
        window = {"rope_theta": text.get("rope_local_base_freq", 1e4)}
        pattern = text.get("sliding_window_pattern", text.get("_sliding_window_pattern", 6))
        types = [
            "full_attention" if (i + 1) % pattern == 0 else "sliding_attention"
            for i in range(text.get("num_hidden_layers", 0))
        ]
        return read_config(
            cls,
            text,
            layer_groups=window_groups(text, types),
            full_rope=read_rope(full | (nested.get("full_attention") or {}), width),
            window_rope=read_rope(window | (nested.get("sliding_attention") or {}), width),
        )


class DecoderLayer(nnx.Module):
    """Four norms: before and after attention, before and after the MLP."""

    def __init__(self, c: Config, group: str, dtype: str) -> None:
        self.self_attn = SelfAttention(
            dtype,
            embed=c.hidden_size,
            heads=c.num_attention_heads,
            kv_heads=c.num_key_value_heads,
            head_dim=c.head_dim,
            how=Attention(c.query_pre_attn_scalar**-0.5, c.sliding_window if group == "window" else None),
            bias=c.attention_bias,
            out_bias=c.attention_bias,
            norm_eps=c.rms_norm_eps,
            norm_scale=NormScale.ONE_PLUS_WEIGHT,
        )
        self.mlp = GatedMLP(dtype, c.hidden_size, c.intermediate_size, c.hidden_activation)
        self.input_layernorm = self._norm(c, dtype)
        self.post_attention_layernorm = self._norm(c, dtype)
        self.pre_feedforward_layernorm = self._norm(c, dtype)
        self.post_feedforward_layernorm = self._norm(c, dtype)

    @staticmethod
    def _norm(c: Config, dtype: str) -> RMSNorm:
        return RMSNorm(dtype, c.rms_norm_eps, NormScale.ONE_PLUS_WEIGHT, embed=c.hidden_size)

    def __call__(self, x: jax.Array, context: Context) -> jax.Array:
        """x [B, Q, D] -> [B, Q, D]."""
        ops = context.ops
        x = x + self.post_attention_layernorm(self.self_attn(self.input_layernorm(x, ops), context), ops)
        return x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x, ops)), ops)


class Model(Decoder):
    """Scaled embedding, layers, norm, tied head."""

    def __init__(self, c: Config, dtype: str) -> None:
        super().__init__(
            dtype,
            vocab=c.vocab_size,
            embed=c.hidden_size,
            eps=c.rms_norm_eps,
            layers=[DecoderLayer(c, group, dtype) for group in c.layer_groups],
            ropes={"full": c.full_rope, "window": c.window_rope},
            tied=c.tie_word_embeddings,
            norm_scale=NormScale.ONE_PLUS_WEIGHT,
            embed_scale=c.hidden_size**0.5,
            logit_cap=c.final_logit_softcapping,
        )


def state_groups(config: Config, ops: Ops, page_size: int, dtype: str) -> tuple[StateGroup, ...]:
    """Pages of the full layers, and of the sliding ones, which keep a window only."""
    kv = KV(config.num_key_value_heads, config.head_dim, page_size, dtype)
    return window_state(config.layer_groups, ops, kv, config.num_attention_heads, config.sliding_window)


def weight_map(config: Config) -> tuple[WeightRule, ...]:
    """Checkpoint tensors -> parameters; text-only, and both spellings of the multimodal checkpoints."""
    tied = config.tie_word_embeddings
    text = decoder_rules(tied, NORMS)
    older = decoder_rules(tied, NORMS, "language_model.model.", "language_model.lm_head.")
    newer = decoder_rules(tied, NORMS, "model.language_model.")[:-1]
    vision = [
        WeightRule(f"{prefix}{part}.*", None, reason="images are not read by the text model")
        for prefix in ("", "model.")
        for part in ("vision_tower", "multi_modal_projector")
    ]
    return (*text, *older, *newer, *vision)
