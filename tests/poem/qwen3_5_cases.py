"""Tiny Qwen3.5 configurations and prompts, the same here and where references are made (`tensor` gives the weights)."""

from __future__ import annotations

from typing import Any

import numpy as np

LENGTHS = (72, 37, 1)  # the first crosses two chunks of the chunked rule

_BASE: dict[str, Any] = {
    "model_type": "qwen3_5_text",
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 5,
    "full_attention_interval": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 80,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
        "mrope_section": [1, 1, 0],
        "mrope_interleaved": True,
    },
}

CASES: dict[str, dict[str, Any]] = {
    "qwen3_5": _BASE,  # layers r f r f r
    "qwen3_5_untied": _BASE
    | {
        "num_hidden_layers": 3,
        "layer_types": ["full_attention", "linear_attention", "linear_attention"],
        "tie_word_embeddings": False,
        "attention_bias": True,
        "linear_num_key_heads": 3,
        "linear_num_value_heads": 3,
        "linear_conv_kernel_dim": 3,
        "rope_parameters": _BASE["rope_parameters"] | {"partial_rotary_factor": 0.5, "rope_theta": 500.0},
    },
}


def prompts() -> list[np.ndarray[Any, Any]]:
    """Token ids i32[T] of each prompt."""
    rng = np.random.default_rng(35)
    return [rng.integers(0, 97, length).astype(np.int32) for length in LENGTHS]
