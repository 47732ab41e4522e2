"""A .gguf file as a Hugging Face checkpoint: config, tensor names, and llama.cpp's changes to the weights undone.

Converter: https://github.com/ggml-org/llama.cpp/blob/master/convert_hf_to_gguf.py
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from pie_xla.errors import PieError
from pie_xla.hub.gguf_file import GgufFile

MODEL_TYPES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma3": "gemma3_text",
}  # GGUF architecture -> model_type

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA_LAYER = _LAYER | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_BLOCK = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


class GgufCheckpoint:
    """A .gguf file read under its Hugging Face names.

    Args:
        file: the open file.

    Raises:
        PieError: an architecture without a converter here, or a metadata key the architecture needs is missing.
    """

    def __init__(self, file: GgufFile) -> None:
        self._file = file
        self.path = file.path
        self.architecture = self._architecture()
        self._names = {self._hf_name(name): name for name in file.tensors}
        self.config = self._config()

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Hugging Face tensor name -> shape."""
        return {name: self._file.tensors[stored].shape for name, stored in self._names.items()}

    @property
    def dtype(self) -> str:
        """What `read` returns."""
        return "float32"

    def read(self, name: str) -> np.ndarray[Any, Any]:
        """The tensor with the Hugging Face name `name`, float32, as transformers would hold it."""
        tensor = self._file.read(self._names[name])
        if self.architecture == "llama" and re.search(r"\.self_attn\.[qk]_proj\.", name):
            heads = self.config["num_attention_heads" if ".q_proj." in name else "num_key_value_heads"]
            return unpermute(tensor, heads)
        if self.architecture == "gemma3" and name.endswith("norm.weight"):
            return tensor - np.float32(1)  # the converter stores 1 + w, the checkpoint w
        return tensor

    def _architecture(self) -> str:
        name = self._file.metadata.get("general.architecture")
        if name in MODEL_TYPES:
            return str(name)
        near = difflib.get_close_matches(str(name), MODEL_TYPES, 1, 0.5)
        raise PieError(
            f"{self.path}: GGUF architecture {name!r} is not known" + (f"; the nearest is {near[0]!r}" if near else ""),
            f"known architectures: {', '.join(MODEL_TYPES)}",
        )

    def _hf_name(self, name: str) -> str:
        layer = _GEMMA_LAYER if self.architecture == "gemma3" else _LAYER
        if (match := _BLOCK.fullmatch(name)) and match[2] in layer:
            return f"model.layers.{match[1]}.{layer[match[2]]}.{match[3]}"
        stem, _, kind = name.rpartition(".")
        return f"{_TOP[stem]}.{kind}" if stem in _TOP else name  # a strange name is kept: the weight rules refuse it

    def _get(self, key: str, default: Any = None, required: bool = True) -> Any:
        full = f"{self.architecture}.{key}"
        value = self._file.metadata.get(full, default)
        if value is None and required:
            raise PieError(
                f"{self.path}: metadata key {full} is missing",
                "the file is damaged or was written by an unusual converter",
            )
        # float32 metadata: 9.999999974752427e-07 was written as 1e-06
        return float(str(np.float32(value))) if isinstance(value, float) else value

    def _config(self) -> dict[str, Any]:
        heads, width = self._get("attention.head_count"), self._get("embedding_length")
        if not isinstance(heads, int):
            raise PieError(
                f"{self.path}: {self.architecture}.attention.head_count differs by layer, which is not supported"
            )
        config: dict[str, Any] = {
            "model_type": MODEL_TYPES[self.architecture],
            "vocab_size": self._vocab(),
            "hidden_size": width,
            "intermediate_size": self._get("feed_forward_length"),
            "num_hidden_layers": self._get("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": self._get("attention.head_count_kv", heads),
            "head_dim": self._get("attention.key_length", width // heads),
            "max_position_embeddings": self._get("context_length"),
            "rms_norm_eps": self._get("attention.layer_norm_rms_epsilon"),
            "rope_theta": self._get("rope.freq_base", 10000.0),
            "tie_word_embeddings": "output.weight" not in self._file.tensors,
            "attention_bias": "blk.0.attn_q.bias" in self._file.tensors,
            "bos_token_id": self._file.metadata.get("tokenizer.ggml.bos_token_id"),
            "eos_token_id": self._file.metadata.get("tokenizer.ggml.eos_token_id"),
        }
        match self.architecture:
            case "gemma3":
                return config | self._gemma3(config)
            case "llama":
                return config | {"hidden_act": "silu", "mlp_bias": False} | self._rope_scaling()
            case _:
                return config | {"hidden_act": "silu", "use_sliding_window": False} | self._rope_scaling()

    def _vocab(self) -> int:
        embedding = self._file.tensors.get("token_embd.weight")
        if embedding is None:
            raise PieError(
                f"{self.path}: tensor token_embd.weight is missing", "the file holds no language model, or is damaged"
            )
        return embedding.shape[0]

    def _rope_scaling(self) -> dict[str, Any]:
        kind = self._get("rope.scaling.type", "none")
        if "rope_freqs.weight" in self._file.tensors:
            kind = "llama3"  # the factors are a tensor there, their parameters are lost
        if kind == "none":
            return {"rope_scaling": None}
        if kind == "linear":
            return {"rope_scaling": {"rope_type": "linear", "factor": self._get("rope.scaling.factor")}}
        raise PieError(
            f"{self.path}: rope scaling {kind!r} cannot be taken from a GGUF file",
            "import the model's safetensors checkpoint, whose config.json says it in full",
        )

    def _gemma3(self, config: Mapping[str, Any]) -> dict[str, Any]:
        layers = config["num_hidden_layers"]
        scaling = self._rope_scaling()
        # llama.cpp: the 27B model alone (62 layers) scales queries by hidden / heads, not by head_dim
        query = config["hidden_size"] // config["num_attention_heads"] if layers == 62 else config["head_dim"]
        return {
            "hidden_activation": "gelu_pytorch_tanh",
            "sliding_window": self._get("attention.sliding_window"),
            "layer_types": ["full_attention" if index % 6 == 5 else "sliding_attention" for index in range(layers)],
            "rope_local_base_freq": self._get("rope.freq_base_swa", 10000.0),
            "query_pre_attn_scalar": query,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": self._get("final_logit_softcapping", required=False),
            **scaling,
        }


def unpermute(tensor: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Rows of a llama q or k projection [heads * d, ...] back from GGUF's interleaved rope order to halves.

    Per head the file holds rows (0, d/2, 1, d/2 + 1, ...); the checkpoint holds (0, 1, ..., d/2, d/2 + 1, ...).
    """
    rows = tensor.shape[0]
    return tensor.reshape(heads, rows // heads // 2, 2, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape)
