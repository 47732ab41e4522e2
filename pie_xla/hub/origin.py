"""A checkpoint as found, whatever its format: tensors, config, tokenizer, template, how generation starts and ends."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from pie_xla.errors import PieError
from pie_xla.hub.gguf_file import GgufFile
from pie_xla.hub.gguf_model import GgufCheckpoint
from pie_xla.hub.gguf_tokenizer import tokenizer_json
from pie_xla.hub.safetensors_file import SafetensorsCheckpoint, read_json
from pie_xla.hub.store import Generation

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
# Tokens that end a turn or a text wherever they are in a vocabulary; llama.cpp stops at the same.
_ENDS = ("<|im_end|>", "<|eot_id|>", "<|end_of_text|>", "<|endoftext|>", "<end_of_turn>", "<|end|>", "<|eom_id|>")


class Checkpoint(Protocol):
    """Tensors under their Hugging Face names, read one at a time."""

    @property
    def config(self) -> dict[str, Any]: ...
    @property
    def shapes(self) -> dict[str, tuple[int, ...]]: ...
    @property
    def dtype(self) -> str: ...
    def read(self, name: str) -> np.ndarray[Any, Any]: ...


@dataclass(frozen=True)
class Origin:
    """Everything an import takes from its source.

    Args:
        label: the file, version or commit, for the manifest.
        name: a fitting name for the model.
        license: id, or None.
        documents: licence texts.
    """

    label: str
    name: str
    checkpoint: Checkpoint
    tokenizer: str
    chat_template: str | None
    generation: Generation
    license: str | None
    documents: tuple[Path, ...]


@contextmanager
def _naming_damage(path: Path) -> Iterator[None]:
    """Values of a wrong type or out of range, wherever they are met, mean a damaged file."""
    try:
        yield
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError, MemoryError) as error:
        raise PieError(
            f"{path} is damaged: {type(error).__name__}: {error}", "download or copy it again; nothing was imported"
        ) from error


def from_gguf(path: Path) -> Origin:
    """A .gguf file."""
    with _naming_damage(path):
        return _from_gguf(path)


def from_directory(path: Path) -> Origin:
    """A Hugging Face checkpoint directory."""
    with _naming_damage(path):
        return _from_directory(path)


def _from_gguf(path: Path) -> Origin:
    file = GgufFile(path)
    checkpoint = GgufCheckpoint(file)
    metadata = file.metadata
    tokens: list[str] = metadata.get("tokenizer.ggml.tokens", [])
    tokenizer = tokenizer_json(metadata, path)
    ids = {name: metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in _gguf_specials()}
    special = {
        name: tokens[index] for name, index in ids.items() if isinstance(index, int) and 0 <= index < len(tokens)
    }
    bos = ids["bos_token"]
    ends = [metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
    template = metadata.get("tokenizer.chat_template")
    generation = Generation(
        bos=bos,
        # llama.cpp's default: SentencePiece models want BOS, byte-level ones do not
        add_bos=bos is not None
        and bool(metadata.get("tokenizer.ggml.add_bos_token", metadata.get("tokenizer.ggml.model") == "llama")),
        stop_tokens=_stops(ends, tokenizer, template),
        special=special,
    )
    return Origin(
        path.name,
        gguf_model_name(path),
        checkpoint,
        tokenizer,
        template,
        generation,
        metadata.get("general.license"),
        (),
    )


def _from_directory(path: Path) -> Origin:
    checkpoint = SafetensorsCheckpoint(path)
    try:
        tokenizer = (path / "tokenizer.json").read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise PieError(
            f"{path} has no readable tokenizer.json: {error}",
            "tokenizer.model and vocab.json are not read; save it with transformers' AutoTokenizer first",
        ) from error
    settings = read_json(path / "tokenizer_config.json") if (path / "tokenizer_config.json").exists() else {}
    special = {name: _content(settings[name]) for name in _SPECIAL_NAMES if settings.get(name)}
    template = _directory_template(path, settings)
    ids = _added_ids(tokenizer)
    bos = ids.get(special["bos_token"]) if "bos_token" in special else None
    ends: list[Any] = [ids.get(special["eos_token"])] if "eos_token" in special else []
    for file in ("config.json", "generation_config.json"):
        if (path / file).exists():
            value = read_json(path / file).get("eos_token_id")
            ends += value if isinstance(value, list) else [value]
    generation = Generation(bos, _adds_bos(tokenizer, settings, bos), _stops(ends, tokenizer, template), special)
    documents = tuple(
        sorted(file for file in path.iterdir() if re.match(r"LICEN[CS]E|NOTICE|USE_POLICY", file.name, re.IGNORECASE))
    )
    return Origin(
        path.name,
        model_name(path.name),
        checkpoint,
        tokenizer,
        template,
        generation,
        _readme_license(path),
        documents,
    )


def _gguf_specials() -> tuple[tuple[str, str], ...]:
    return ("bos_token", "bos"), ("eos_token", "eos"), ("unk_token", "unknown"), ("pad_token", "padding")


def model_name(text: str) -> str:
    """`text` as a model's name: "Qwen3-0.6B" -> "qwen3-0.6b"."""
    return re.sub(r"[^a-z0-9._-]+", "-", text.lower()).strip("-._") or "model"


def gguf_model_name(path: Path) -> str:
    """The name of a file without its quantization: "Tiny.Q4_1.gguf" -> "tiny"."""
    return model_name(re.sub(r"[._-](i?q\d\w*|f16|f32|bf16)$", "", path.stem, flags=re.IGNORECASE))


def _content(token: Any) -> str:
    return str(token["content"] if isinstance(token, dict) else token)


def _added_ids(tokenizer: str) -> dict[str, int]:
    try:
        return {token["content"]: token["id"] for token in json.loads(tokenizer)["added_tokens"]}
    except (ValueError, KeyError, TypeError) as error:
        raise PieError(f"tokenizer.json is damaged: {error}", "download the checkpoint again") from error


def _stops(ends: list[Any], tokenizer: str, template: str | None) -> tuple[int, ...]:
    ids = _added_ids(tokenizer)
    known = [ids[text] for text in _ENDS if text in ids]
    if template is None:  # a base model never closes a turn; <end_of_turn> in its vocabulary means nothing to it
        known = [ids[text] for text in ("<|endoftext|>", "<|end_of_text|>") if text in ids]
    return tuple(dict.fromkeys([index for index in ends if isinstance(index, int)] + known))


def _adds_bos(tokenizer: str, settings: Mapping[str, Any], bos: int | None) -> bool:
    """Whether the tokenizer's own post-processor puts BOS before a text, or the (older) config says so."""
    if bos is None:
        return False
    from tokenizers import Tokenizer

    try:
        ids = Tokenizer.from_str(tokenizer).encode("a", add_special_tokens=True).ids
    except Exception as error:  # the binding raises bare Exception
        raise PieError(f"tokenizer.json is damaged: {error}", "download the checkpoint again") from error
    return ids[:1] == [bos] or bool(settings.get("add_bos_token"))


def _directory_template(path: Path, settings: Mapping[str, Any]) -> str | None:
    if (file := path / "chat_template.jinja").exists():
        return file.read_text(encoding="utf-8")
    value = settings.get("chat_template")
    if value is None and (file := path / "chat_template.json").exists():
        value = read_json(file).get("chat_template")
    if isinstance(value, list):  # several by name; the default one serves
        named = {entry.get("name"): entry.get("template") for entry in value}
        value = named.get("default")
    return value


def _readme_license(path: Path) -> str | None:
    """`license:` of the model card's front matter."""
    readme = path / "README.md"
    if not readme.exists():
        return None
    front = re.match(r"---\n(.*?)\n---", readme.read_text(encoding="utf-8", errors="replace"), re.DOTALL)
    match = re.search(r"^license:\s*([^\s#]+)", front[1], re.MULTILINE) if front else None
    name = re.search(r"^license_name:\s*([^\s#]+)", front[1], re.MULTILINE) if front else None
    return (name[1] if match and match[1] == "other" and name else match[1]) if match else None
