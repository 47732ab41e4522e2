"""Qwen3.5, text: gated delta-net layers with a gated full-attention layer among them (Qwen Team 2026).

Of a multimodal checkpoint (`qwen3_5`) the `text_config` is read; its vision tower and the heads for multi-token
prediction are left out by name. Text tokens have one position, so the three sections of its multimodal rope are the
same, and it is the plain rope over the first `partial_rotary_factor` of each head.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from poem.blocks.decoder import Decoder, decoder_rules
from poem.blocks.linear import Linear
from poem.blocks.linear_attention import GatedDeltaNet, delta_state
from poem.blocks.mlp import Activation, GatedMLP
from poem.blocks.norms import NormScale, RMSNorm
from poem.blocks.rope import Rope, read_rope, rope_parameters
from poem.config import read_config
from poem.context import Context
from poem.family import paged_group
from poem.spec import KV, Attention, Ops, PoemError, StateGroup, StateKind, Transform, WeightRule

LAYER_TYPES = {"full_attention": "full", "linear_attention": "recurrent"}


@dataclass(frozen=True)
class Config:
    """config.json's text part, in its own names; `layer_groups` is `layer_types` in the words of state groups."""

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
    linear_conv_kernel_dim: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_num_key_heads: int
    linear_num_value_heads: int
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    attn_output_gate: Literal[True] = True
    mamba_ssm_dtype: Literal["float32"] = "float32"

    @classmethod
    def from_json(cls, config: Mapping[str, Any]) -> Config:
        """`tie_word_embeddings` is the outer config's; layer types are given, or follow from the interval."""
        text: Mapping[str, Any] = config.get("text_config", config)
        rope = rope_parameters(text, 10000.0)
        factor = rope.get("partial_rotary_factor", text.get("partial_rotary_factor", 0.25))
        settings = read_config(
            cls,
            text,
            rope=read_rope(rope, int(text.get("head_dim", 0) * factor)),
            layer_groups=_layer_groups(text),
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        )
        if settings.linear_num_value_heads % settings.linear_num_key_heads:
            raise PoemError(
                f"linear_num_value_heads {settings.linear_num_value_heads} is not a multiple of "
                f"linear_num_key_heads {settings.linear_num_key_heads}"
            )
        return settings

    @property
    def linear_sizes(self) -> tuple[int, int, int, int]:
        """Key heads, value heads, their widths."""
        return (
            self.linear_num_key_heads,
            self.linear_num_value_heads,
            self.linear_key_head_dim,
            self.linear_value_head_dim,
        )


def _layer_groups(text: Mapping[str, Any]) -> tuple[str, ...]:
    layers = text.get("num_hidden_layers", 0)
    interval = text.get("full_attention_interval", 4)
    types = text.get("layer_types") or [
        "linear_attention" if (i + 1) % interval else "full_attention" for i in range(layers)
    ]
    if unknown := sorted(set(types) - LAYER_TYPES.keys()):
        raise PoemError(f"layer type {unknown[0]!r} is not supported", f"supported: {', '.join(LAYER_TYPES)}")
    if len(types) != layers:
        raise PoemError(f"layer_types names {len(types)} layers, num_hidden_layers is {layers}")
    return tuple(LAYER_TYPES[kind] for kind in types)


class GatedAttention(nnx.Module):
    """Self-attention whose output is gated: each head's q_proj gives a query and, after it, a gate."""

    def __init__(self, c: Config, dtype: str) -> None:
        heads, kv_heads = {"heads": c.num_attention_heads}, {"kv_heads": c.num_key_value_heads}
        embed, width = {"embed": c.hidden_size}, {"head_dim": c.head_dim}
        self.q_proj = Linear(dtype, embed, heads | {"head_dim": 2 * c.head_dim}, c.attention_bias)
        self.k_proj = Linear(dtype, embed, kv_heads | width, c.attention_bias)
        self.v_proj = Linear(dtype, embed, kv_heads | width, c.attention_bias)
        self.o_proj = Linear(dtype, heads | width, embed, c.attention_bias)
        self.q_norm = RMSNorm(dtype, c.rms_norm_eps, NormScale.ONE_PLUS_WEIGHT, head_dim=c.head_dim)
        self.k_norm = RMSNorm(dtype, c.rms_norm_eps, NormScale.ONE_PLUS_WEIGHT, head_dim=c.head_dim)
        self.how = Attention(scale=c.head_dim**-0.5)

    def __call__(self, x: jax.Array, context: Context) -> jax.Array:
        """x [B, Q, D] -> [B, Q, D]."""
        with jax.named_scope("self_attn"):
            q, gate = jnp.split(self.q_proj(x), 2, axis=-1)
            q = context.constrain(context.rotate(self.q_norm(q, context.ops)), None, None, "heads", "head_dim")
            k = context.constrain(
                context.rotate(self.k_norm(self.k_proj(x), context.ops)), None, None, "kv_heads", "head_dim"
            )
            return self.o_proj(context.attend(q, k, self.v_proj(x), self.how) * jax.nn.sigmoid(gate))


class DecoderLayer(nnx.Module):
    """Norm, linear or full attention, residual; norm, MLP, residual."""

    def __init__(self, c: Config, group: str, dtype: str) -> None:
        self.input_layernorm = RMSNorm(dtype, c.rms_norm_eps, NormScale.ONE_PLUS_WEIGHT, embed=c.hidden_size)
        self.self_attn = GatedAttention(c, dtype) if group == "full" else None
        self.linear_attn = _linear_attention(c, dtype) if group == "recurrent" else None
        self.post_attention_layernorm = RMSNorm(dtype, c.rms_norm_eps, NormScale.ONE_PLUS_WEIGHT, embed=c.hidden_size)
        self.mlp = GatedMLP(dtype, c.hidden_size, c.intermediate_size, c.hidden_act)

    def __call__(self, x: jax.Array, context: Context) -> jax.Array:
        """x [B, Q, D] -> [B, Q, D]."""
        mixer = self.linear_attn if self.self_attn is None else self.self_attn
        assert mixer is not None
        x = x + mixer(self.input_layernorm(x, context.ops), context)
        return x + self.mlp(self.post_attention_layernorm(x, context.ops))


def _linear_attention(c: Config, dtype: str) -> GatedDeltaNet:
    key_heads, value_heads, key_dim, value_dim = c.linear_sizes
    return GatedDeltaNet(
        dtype,
        embed=c.hidden_size,
        key_heads=key_heads,
        value_heads=value_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        conv_width=c.linear_conv_kernel_dim,
        act=c.hidden_act,
        eps=c.rms_norm_eps,
    )


class Model(Decoder):
    """Embedding, layers, norm, head."""

    def __init__(self, c: Config, dtype: str) -> None:
        super().__init__(
            dtype,
            vocab=c.vocab_size,
            embed=c.hidden_size,
            eps=c.rms_norm_eps,
            layers=[DecoderLayer(c, group, dtype) for group in c.layer_groups],
            ropes={"full": c.rope},
            tied=c.tie_word_embeddings,
            norm_scale=NormScale.ONE_PLUS_WEIGHT,
        )


def state_groups(config: Config, ops: Ops, page_size: int, dtype: str) -> tuple[StateGroup, ...]:
    """Pages of the full layers, one slot per sequence for all linear ones; each where there are such layers."""
    kv = KV(config.num_key_value_heads, config.head_dim, page_size, dtype)
    unit = delta_state(dtype, *config.linear_sizes, config.linear_conv_kernel_dim)
    full, linear = (config.layer_groups.count(name) for name in ("full", "recurrent"))
    groups = (
        paged_group("full", full, ops, kv, config.num_attention_heads),
        StateGroup("recurrent", StateKind.RECURRENT, linear, unit),
    )
    return tuple(group for group in groups if group.layers)


def weight_map(config: Config) -> tuple[WeightRule, ...]:
    """Checkpoint tensors -> parameters: text checkpoints, and the text part of multimodal ones."""
    linear = {
        "in_proj_qkv.weight": ("in_proj_qkv.kernel", Transform.COPY),
        "in_proj_z.weight": ("in_proj_z.kernel", Transform.SPLIT_OUT),
        "in_proj_b.weight": ("in_proj_b.kernel", Transform.COPY),
        "in_proj_a.weight": ("in_proj_a.kernel", Transform.COPY),
        "conv1d.weight": ("conv1d.kernel", Transform.DEPTHWISE),
        "A_log": ("A_log", Transform.COPY),
        "dt_bias": ("dt_bias", Transform.COPY),
        "norm.weight": ("norm.weight", Transform.COPY),
        "out_proj.weight": ("out_proj.kernel", Transform.SPLIT_IN),
    }
    rules: list[WeightRule] = []
    for prefix in ("model.", "model.language_model."):
        rules += [rule for rule in decoder_rules(config.tie_word_embeddings, prefix=prefix) if rule not in rules]
        at = "layers.{i}.linear_attn."
        rules += [WeightRule(f"{prefix}{at}{s}", f"{at}{target}", how) for s, (target, how) in linear.items()]
    rules.append(WeightRule("model.visual.*", None, reason="images are not read by the text model"))
    rules.append(WeightRule("mtp.*", None, reason="multi-token prediction is not used"))
    return tuple(rules)
