"""Llama 2, 3.x, SmolLM: pre-norm decoder with grouped-query attention and a SiLU-gated MLP (Touvron et al. 2023)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx

from poem.blocks.attention import SelfAttention
from poem.blocks.embedding import Embedding
from poem.blocks.mlp import Activation, GatedMLP
from poem.blocks.norms import RMSNorm
from poem.blocks.rope import Rope, read_rope, rope_parameters
from poem.config import read_config
from poem.context import Context
from poem.family import paged_group
from poem.spec import KV, Attention, Batch, Ops, StateGroup, Transform, WeightRule


@dataclass(frozen=True)
class Config:
    """config.json, in its own names."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: Rope
    hidden_act: Activation
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False

    @property
    def layer_groups(self) -> tuple[str, ...]:
        """All layers attend to everything."""
        return ("full",) * self.num_hidden_layers


def read(config: Mapping[str, Any]) -> Config:
    """config.json; older files leave out head_dim and num_key_value_heads."""
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    return read_config(
        Config,
        config,
        num_key_value_heads=config.get("num_key_value_heads") or heads,
        head_dim=head_dim,
        rope=read_rope(rope_parameters(config, 10000.0), head_dim, "rope_scaling"),
        hidden_act=Activation.read(config.get("hidden_act", "silu")),
    )


class DecoderLayer(nnx.Module):
    """Norm, attention, residual, norm, MLP, residual."""

    def __init__(self, config: Config, dtype: str) -> None:
        c = config
        self.input_layernorm = RMSNorm(dtype, c.rms_norm_eps, embed=c.hidden_size)
        self.self_attn = SelfAttention(
            dtype,
            embed=c.hidden_size,
            heads=c.num_attention_heads,
            kv_heads=c.num_key_value_heads,
            head_dim=c.head_dim,
            how=Attention(scale=c.head_dim**-0.5),
            bias=c.attention_bias,
            out_bias=c.attention_bias,
        )
        self.post_attention_layernorm = RMSNorm(dtype, c.rms_norm_eps, embed=c.hidden_size)
        self.mlp = GatedMLP(dtype, c.hidden_size, c.intermediate_size, c.hidden_act, c.mlp_bias)

    def __call__(self, x: jax.Array, context: Context) -> jax.Array:
        """x [B, Q, D] -> [B, Q, D]."""
        x = x + self.self_attn(self.input_layernorm(x), context)
        return x + self.mlp(self.post_attention_layernorm(x))


class Model(nnx.Module):
    """Embedding, layers, norm, head."""

    def __init__(self, config: Config, dtype: str) -> None:
        self.embed_tokens = Embedding(dtype, config.vocab_size, config.hidden_size)
        self.layers = nnx.List([DecoderLayer(config, dtype) for _ in range(config.num_hidden_layers)])
        self.norm = RMSNorm(dtype, config.rms_norm_eps, embed=config.hidden_size)
        tied = config.tie_word_embeddings
        self.lm_head = None if tied else Embedding(dtype, config.vocab_size, config.hidden_size)
        self.rope = config.rope

    def embed(self, batch: Batch) -> tuple[jax.Array, dict[str, tuple[jax.Array, ...]]]:
        """x [B, Q, D] and the rope table."""
        return self.embed_tokens(batch.tokens), {"full": self.rope.table(batch.positions)}

    def hidden(self, x: jax.Array) -> jax.Array:
        """[R, D] -> [R, D]."""
        return self.norm(x)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """[R, D] -> f32[R, V]."""
        return (self.embed_tokens if self.lm_head is None else self.lm_head).logits(hidden)


def build(config: Config, dtype: str) -> Model:
    """The model; called under `nnx.eval_shape`."""
    return Model(config, dtype)


def state(config: Config, ops: Ops, page_size: int, dtype: str) -> tuple[StateGroup, ...]:
    """One group of pages."""
    kv = KV(config.num_key_value_heads, config.head_dim, page_size, dtype)
    return (paged_group("full", config.num_hidden_layers, ops, kv, config.num_attention_heads),)


def weight_map(config: Config) -> tuple[WeightRule, ...]:
    """Checkpoint tensors -> parameters."""
    return decoder_rules(config.tie_word_embeddings)


def decoder_rules(tied: bool, norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")) -> tuple[WeightRule, ...]:
    """The rules of every llama-like decoder; a rule without a tensor in the model (biases, q_norm) is simply not used."""
    layer = "layers.{i}."
    rules = [
        WeightRule("model.embed_tokens.weight", "embed_tokens.weight"),
        WeightRule("model.norm.weight", "norm.weight"),
    ]
    for name in ("q_proj", "k_proj", "v_proj"):
        at = f"{layer}self_attn.{name}."
        rules.append(WeightRule(f"model.{at}weight", f"{at}kernel", Transform.SPLIT_OUT))
        rules.append(WeightRule(f"model.{at}bias", f"{at}bias", Transform.FLAT))
    at = f"{layer}self_attn.o_proj."
    rules.append(WeightRule(f"model.{at}weight", f"{at}kernel", Transform.SPLIT_IN))
    rules.append(WeightRule(f"model.{at}bias", f"{at}bias"))
    for name in ("self_attn.q_norm", "self_attn.k_norm", *norms):
        rules.append(WeightRule(f"model.{layer}{name}.weight", f"{layer}{name}.weight"))
    for name in ("gate_proj", "up_proj", "down_proj"):
        at = f"{layer}mlp.{name}."
        rules.append(WeightRule(f"model.{at}weight", f"{at}kernel"))
        rules.append(WeightRule(f"model.{at}bias", f"{at}bias"))
    if tied:
        rules.append(WeightRule("lm_head.weight", None, reason="tied to model.embed_tokens.weight"))
    else:
        rules.append(WeightRule("lm_head.weight", "lm_head.weight"))
    rotary = "model.layers.{i}.self_attn.rotary_emb.inv_freq"
    rules.append(WeightRule(rotary, None, reason="rope frequencies are computed"))
    return tuple(rules)
