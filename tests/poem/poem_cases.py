"""Tiny configurations of each family, their seeded weights and prompts: the same here and where references are made."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np

SEED = 2026
LENGTHS = (40, 17, 1)  # tokens of the prompts; longer than every window below

_BASE: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
_GEMMA: dict[str, Any] = _BASE | {
    "hidden_activation": "gelu_pytorch_tanh",
    "num_hidden_layers": 8,
    "layer_types": (["sliding_attention"] * 2 + ["full_attention"]) * 2 + ["sliding_attention"] * 2,
    "sliding_window": 8,
    "query_pre_attn_scalar": 11,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 1000000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    },
}
_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}

CASES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **_BASE, **_ROPE},
    "llama_untied_bias": {
        "model_type": "llama",
        **_BASE,
        **_ROPE,
        "tie_word_embeddings": False,
        "attention_bias": True,
        "mlp_bias": True,
    },
    "llama_llama3_rope": {"model_type": "llama", **_BASE, "rope_parameters": _LLAMA3},
    "llama_one_kv_head": {
        "model_type": "llama",
        **_BASE,
        **_ROPE,
        "hidden_size": 36,
        "head_dim": 12,
        "num_key_value_heads": 1,
        "num_attention_heads": 3,
    },
    "qwen2": {"model_type": "qwen2", **_BASE, **_ROPE},
    "qwen2_untied_window": {
        "model_type": "qwen2",
        **_BASE,
        **_ROPE,
        "tie_word_embeddings": False,
        "use_sliding_window": True,
        "sliding_window": 8,
        "max_window_layers": 1,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
    },
    "qwen3": {"model_type": "qwen3", **_BASE, **_ROPE, "head_dim": 12, "rms_norm_eps": 1e-6},
    "qwen3_untied": {"model_type": "qwen3", **_BASE, **_ROPE, "tie_word_embeddings": False, "attention_bias": True},
    "gemma3": {"model_type": "gemma3_text", **_GEMMA},
    "gemma3_linear_rope": {
        "model_type": "gemma3_text",
        **_GEMMA,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    },
}


def tensor(name: str, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """The seeded value of the checkpoint tensor `name`: norms near 1 (though gemma adds 1 itself), others spread."""
    rng = np.random.default_rng([SEED, zlib.crc32(name.encode())])
    value = rng.standard_normal(shape)
    if "norm" in name:
        return (1.0 + 0.2 * value).astype(np.float32)
    if name.endswith("bias"):
        return (0.3 * value).astype(np.float32)
    if name.endswith("embed_tokens.weight"):
        return value.astype(np.float32)
    return (value * 1.5 / np.sqrt(shape[-1])).astype(np.float32)


def prompts(vocab: int) -> list[np.ndarray[Any, Any]]:
    """Token ids i32[T] of each prompt."""
    rng = np.random.default_rng(SEED)
    return [rng.integers(0, vocab, length).astype(np.int32) for length in LENGTHS]
