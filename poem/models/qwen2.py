"""Qwen2 and Qwen2.5: llama with biases on q, k and v, maybe a sliding window in upper layers (Yang et al. 2024)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from poem.blocks.attention import SelfAttention
from poem.blocks.decoder import Decoder, PreNormLayer, decoder_rules
from poem.blocks.mlp import Activation, GatedMLP
from poem.blocks.rope import Rope, read_rope, rope_parameters
from poem.config import head_dim, read_config, window_groups
from poem.family import window_state
from poem.spec import KV, Attention, Ops, StateGroup, WeightRule


@dataclass(frozen=True)
class Config:
    """config.json, in its own names; `layer_groups` is read from `layer_types`, or the window fields."""

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
    layer_groups: tuple[str, ...]
    tie_word_embeddings: bool = False
    sliding_window: int | None = None

    @classmethod
    def from_json(cls, config: Mapping[str, Any]) -> Config:
        """`use_sliding_window` false makes `sliding_window` mean nothing."""
        width = head_dim(config)
        window = config.get("sliding_window") if config.get("use_sliding_window") else None
        lower = config.get("max_window_layers", 28)
        types = [
            "full_attention" if window is None or i < lower else "sliding_attention"
            for i in range(config.get("num_hidden_layers", 0))
        ]
        return read_config(
            cls,
            config,
            head_dim=width,
            rope=read_rope(rope_parameters(config, 10000.0), width),
            sliding_window=window,
            layer_groups=window_groups(config, types),
        )


class DecoderLayer(PreNormLayer):
    """Biases on q, k and v only."""

    def __init__(self, c: Config, group: str, dtype: str) -> None:
        attention = SelfAttention(
            dtype,
            embed=c.hidden_size,
            heads=c.num_attention_heads,
            kv_heads=c.num_key_value_heads,
            head_dim=c.head_dim,
            how=Attention(scale=c.head_dim**-0.5, window=c.sliding_window if group == "window" else None),
            bias=True,
        )
        mlp = GatedMLP(dtype, c.hidden_size, c.intermediate_size, c.hidden_act)
        super().__init__(dtype, c.hidden_size, c.rms_norm_eps, attention, mlp)


class Model(Decoder):
    """Embedding, layers, norm, head."""

    def __init__(self, c: Config, dtype: str) -> None:
        super().__init__(
            dtype,
            vocab=c.vocab_size,
            embed=c.hidden_size,
            eps=c.rms_norm_eps,
            layers=[DecoderLayer(c, group, dtype) for group in c.layer_groups],
            ropes=dict.fromkeys(c.layer_groups, c.rope),
            tied=c.tie_word_embeddings,
        )


def state_groups(config: Config, ops: Ops, page_size: int, dtype: str) -> tuple[StateGroup, ...]:
    """Pages of the full layers and of the sliding ones, where there are any."""
    kv = KV(config.num_key_value_heads, config.head_dim, page_size, dtype)
    return window_state(config.layer_groups, ops, kv, config.num_attention_heads, config.sliding_window)


def weight_map(config: Config) -> tuple[WeightRule, ...]:
    """Checkpoint tensors -> parameters."""
    return decoder_rules(config.tie_word_embeddings)
