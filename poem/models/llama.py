"""Llama 2 and 3.x, SmolLM: pre-norm decoder with grouped-query attention and a gated MLP (Touvron et al. 2023)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from poem.blocks.attention import SelfAttention
from poem.blocks.decoder import Decoder, PreNormLayer, decoder_rules
from poem.blocks.mlp import Activation, GatedMLP
from poem.blocks.rope import Rope, read_rope, rope_parameters
from poem.config import head_dim, read_config
from poem.family import paged_group
from poem.spec import KV, Attention, Ops, StateGroup, WeightRule


@dataclass(frozen=True)
class Config:
    """config.json, in its own names; `rope` is read from `rope_parameters`, or `rope_theta` and `rope_scaling`."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    hidden_act: Activation
    rope: Rope
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False

    @classmethod
    def from_json(cls, config: Mapping[str, Any]) -> Config:
        """Older files leave out head_dim and num_key_value_heads."""
        width = head_dim(config)
        heads = config.get("num_key_value_heads") or config.get("num_attention_heads")
        rope = read_rope(rope_parameters(config, 10000.0), width)
        return read_config(cls, config, head_dim=width, num_key_value_heads=heads, rope=rope)

    @property
    def layer_groups(self) -> tuple[str, ...]:
        """All layers attend to everything."""
        return ("full",) * self.num_hidden_layers


class DecoderLayer(PreNormLayer):
    """Biases on all projections, or on none."""

    def __init__(self, c: Config, dtype: str) -> None:
        attention = SelfAttention(
            dtype,
            embed=c.hidden_size,
            heads=c.num_attention_heads,
            kv_heads=c.num_key_value_heads,
            head_dim=c.head_dim,
            how=Attention(scale=c.head_dim**-0.5),
            bias=c.attention_bias,
            out_bias=c.attention_bias,
        )
        mlp = GatedMLP(dtype, c.hidden_size, c.intermediate_size, c.hidden_act, c.mlp_bias)
        super().__init__(dtype, c.hidden_size, c.rms_norm_eps, attention, mlp)


class Model(Decoder):
    """Embedding, layers, norm, head."""

    def __init__(self, c: Config, dtype: str) -> None:
        super().__init__(
            dtype,
            vocab=c.vocab_size,
            embed=c.hidden_size,
            eps=c.rms_norm_eps,
            layers=[DecoderLayer(c, dtype) for _ in c.layer_groups],
            ropes={"full": c.rope},
            tied=c.tie_word_embeddings,
        )


def state_groups(config: Config, ops: Ops, page_size: int, dtype: str) -> tuple[StateGroup, ...]:
    """Pages of keys and values, one group."""
    kv = KV(config.num_key_value_heads, config.head_dim, page_size, dtype)
    return (paged_group("full", config.num_hidden_layers, ops, kv, config.num_attention_heads),)


def weight_map(config: Config) -> tuple[WeightRule, ...]:
    """Checkpoint tensors -> parameters."""
    return decoder_rules(config.tie_word_embeddings)
