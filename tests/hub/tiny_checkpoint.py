"""Tiny random checkpoints in every format that an import reads, with the tensors they hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SPECIALS = ["<unk>", "<s>", "</s>"]
TEMPLATE = (
    "{% for m in messages %}<s>{{ m['role'] }}\n{{ m['content'] }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)


def tensors(seed: int = 0, layers: int = 2) -> dict[str, np.ndarray[Any, Any]]:
    """A llama checkpoint's tensors, float32."""
    rng = np.random.default_rng(seed)
    D, F, V, H, K, d = 32, 64, 48, 4, 2, 8
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (V, D), "model.norm.weight": (D,)}
    for i in range(layers):
        at = f"model.layers.{i}."
        shapes |= {
            f"{at}input_layernorm.weight": (D,),
            f"{at}post_attention_layernorm.weight": (D,),
            f"{at}self_attn.q_proj.weight": (H * d, D),
            f"{at}self_attn.k_proj.weight": (K * d, D),
            f"{at}self_attn.v_proj.weight": (K * d, D),
            f"{at}self_attn.o_proj.weight": (D, H * d),
            f"{at}mlp.gate_proj.weight": (F, D),
            f"{at}mlp.up_proj.weight": (F, D),
            f"{at}mlp.down_proj.weight": (D, F),
        }
    return {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}


def tokenizer_text() -> str:
    """A byte-fallback BPE over a few letters, with three special tokens at ids 0, 1, 2."""
    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)] + ["Ġ", "Ċ", ".", "<", ">", "/", "Ã", "©"]
    vocab = {token: i for i, token in enumerate([*SPECIALS, *letters, "he", "ll", "hell", "hello"])}
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIALS])
    return str(tokenizer.to_str())


def write_safetensors(path: Path, arrays: dict[str, np.ndarray[Any, Any]]) -> None:
    """A .safetensors file, by the format's specification."""
    kinds = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "float64": "F64", "int32": "I32"}
    header, at = {}, 0
    for name, array in arrays.items():
        header[name] = {
            "dtype": kinds[array.dtype.name],
            "shape": list(array.shape),
            "data_offsets": [at, at + array.nbytes],
        }
        at += array.nbytes
    text = json.dumps(header | {"__metadata__": {"format": "pt"}}).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(array.tobytes() for array in arrays.values()))


def write_directory(
    path: Path,
    arrays: dict[str, np.ndarray[Any, Any]] | None = None,
    config: dict[str, Any] | None = None,
    shards: int = 1,
    dtype: str = "float32",
    template: str | None = TEMPLATE,
) -> Path:
    """A checkpoint directory as `save_pretrained` leaves it."""
    path.mkdir(parents=True, exist_ok=True)
    kind = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    arrays = {name: array.astype(kind) for name, array in (arrays or tensors()).items()}
    names = list(arrays)
    if shards == 1:
        write_safetensors(path / "model.safetensors", arrays)
    else:
        where = {}
        for shard in range(shards):
            file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
            part = {name: arrays[name] for name in names[shard::shards]}
            write_safetensors(path / file, part)
            where |= dict.fromkeys(part, file)
        (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    (path / "config.json").write_text(json.dumps(config or CONFIG))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2]}))
    (path / "tokenizer.json").write_text(tokenizer_text(), encoding="utf-8")
    settings: dict[str, Any] = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "unk_token": "<unk>"}
    if template is not None:
        settings["chat_template"] = template
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    (path / "README.md").write_text("---\nlicense: apache-2.0 # free\n---\n# Tiny\n")
    (path / "LICENSE").write_text("Apache License")
    return path


def permute(tensor: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """What llama.cpp's converter does to the rows of q and k of a llama checkpoint (LlamaModel.permute)."""
    return (
        tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape)
    )


_GGUF_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(
    path: Path,
    arrays: dict[str, np.ndarray[Any, Any]] | None = None,
    architecture: str = "llama",
    extra: dict[str, Any] | None = None,
    quantize: dict[str, Any] | None = None,
    drop: tuple[str, ...] = (),
) -> Path:
    """A .gguf file made with the `gguf` package's writer.

    Args:
        extra: more string or integer metadata.
        quantize: GGUF tensor name -> GGMLQuantizationType.
        drop: GGUF tensor names to leave out.
    """
    import gguf

    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(2)
    writer.add_context_length(128)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_key_length(8)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    tokenizer = json.loads(tokenizer_text())
    tokens = list(tokenizer["model"]["vocab"])
    tokens += [f"[PAD{i}]" for i in range(len(tokens), 48)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if i < 3 else 5 if token.startswith("[PAD") else 1 for i, token in enumerate(tokens)])
    writer.add_token_merges([" ".join(merge) for merge in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for key, value in (extra or {}).items():
        (writer.add_uint32 if isinstance(value, int) else writer.add_string)(key, value)
    for name, array in (arrays or tensors()).items():
        if architecture == "llama" and name.endswith("q_proj.weight"):
            array = permute(array, 4)
        if architecture == "llama" and name.endswith("k_proj.weight"):
            array = permute(array, 2)
        stem, _, kind = name.rpartition(".")
        _, _, rest = stem.partition("model.layers.")
        layer, _, module = rest.partition(".")
        top = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
        stored = f"blk.{layer}.{_GGUF_NAMES[module]}.{kind}" if layer else f"{top.get(stem, stem)}.{kind}"
        if stored in drop:
            continue
        if (how := (quantize or {}).get(stored)) is not None:
            writer.add_tensor(stored, gguf.quants.quantize(array, how), raw_dtype=how)
        else:
            writer.add_tensor(stored, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
