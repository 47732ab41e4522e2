"""The tokenizer inside a .gguf file, rebuilt as a Hugging Face tokenizer.json.

llama.cpp keeps tokens, types, merges or scores, and the NAME of a pre-tokenizer; the rest is known per name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pie_xla.errors import PieError

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6

_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = _QWEN2.replace(r"\p{N}|", r"\p{N}{1,3}|")
# pre-tokenizer -> (individual digits, split pattern or None for GPT-2's own, NFC, a token found whole skips the merges)
_BYTE_LEVEL = {
    "gpt-2": (False, None, False, False),
    "smollm": (True, None, False, False),
    "qwen2": (False, _QWEN2, True, False),
    "llama-bpe": (False, _LLAMA3, False, True),
}
# Gemma's converter calls all 6249 <unusedN> and <mask> control tokens; upstream's tokenizer.json calls these special.
_GEMMA_SPECIAL = re.compile(
    r"<(pad|eos|bos|unk|start_of_turn|end_of_turn|start_of_image|end_of_image|image_soft_token)>"
)


def tokenizer_json(metadata: Mapping[str, Any], path: Path) -> str:
    """The text of tokenizer.json for the metadata of the .gguf file at `path`.

    Raises:
        PieError: no tokenizer inside, or one of a kind that cannot be rebuilt faithfully.
    """
    tokens, types = metadata.get("tokenizer.ggml.tokens"), metadata.get("tokenizer.ggml.token_type")
    if not tokens or not types or len(tokens) != len(types):
        raise PieError(
            f"{path} holds no complete tokenizer (tokenizer.ggml.tokens and token_type)",
            "import the model's checkpoint directory",
        )
    match metadata.get("tokenizer.ggml.model"):
        case "gpt2":
            return _byte_level(metadata, tokens, types, path)
        case "llama" if metadata.get("general.architecture") == "gemma3":
            return _gemma(metadata, tokens, types, path)
        case kind:
            raise PieError(
                f"{path}: a tokenizer of kind {kind!r} for {metadata.get('general.architecture')!r} cannot be rebuilt",
                "import the model's checkpoint directory, which has a tokenizer.json",
            )


def _byte_level(metadata: Mapping[str, Any], tokens: list[str], types: list[int], path: Path) -> str:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    name = metadata.get("tokenizer.ggml.pre", "gpt-2")
    if name not in _BYTE_LEVEL:
        raise PieError(
            f"{path}: the pre-tokenizer {name!r} is not known, so text would be cut wrongly",
            f"known: {', '.join(_BYTE_LEVEL)}; or import the model's checkpoint directory",
        )
    digits, pattern, nfc, whole = _BYTE_LEVEL[name]
    merges = [tuple(merge.split(" ")) for merge in metadata.get("tokenizer.ggml.merges", ())]
    if not merges or any(len(merge) != 2 for merge in merges):
        raise PieError(f"{path}: tokenizer.ggml.merges is missing or damaged")
    added = [index for index, kind in enumerate(types) if kind in (_CONTROL, _USER_DEFINED, _UNKNOWN)]
    # Padding tokens ([PAD151936]) are no text; added tokens stay outside of the vocabulary, as upstream has them.
    vocab = {
        token: index for index, (token, kind) in enumerate(zip(tokens, types, strict=True)) if kind in (_NORMAL, _BYTE)
    }
    if name in ("gpt-2", "smollm"):
        vocab |= {tokens[index]: index for index in added}  # upstream keeps them in the model's vocabulary as well
    try:
        tokenizer = Tokenizer(
            models.BPE(vocab=vocab, merges=merges, fuse_unk=False, byte_fallback=False, ignore_merges=whole)
        )
    except Exception as error:  # the binding raises bare Exception
        raise PieError(f"{path}: the tokenizer's vocabulary and merges do not fit together: {error}") from error
    if nfc:
        tokenizer.normalizer = normalizers.NFC()
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if digits else []
    if pattern:
        steps.append(pre_tokenizers.Split(Regex(pattern), behavior="isolated", invert=False))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return _with_added(tokenizer, [(index, tokens[index], types[index] != _USER_DEFINED) for index in added], path)


def _gemma(metadata: Mapping[str, Any], tokens: list[str], types: list[int], path: Path) -> str:
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    scores = metadata.get("tokenizer.ggml.scores")
    if not scores or len(scores) != len(tokens):
        raise PieError(f"{path}: tokenizer.ggml.scores is missing or damaged")
    # The file spells the tokens of several spaces with spaces; the vocabulary spells a space "▁".
    tokens = [token.replace(" ", "▁") if token.strip(" ") == "" else token for token in tokens]
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=merges_from_scores(tokens, types, scores),
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", behavior="merged_with_previous", invert=False)
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    added = [
        (index, token, _GEMMA_SPECIAL.fullmatch(token) is not None)
        for index, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind in (_CONTROL, _USER_DEFINED, _UNKNOWN)
    ]
    return _with_added(tokenizer, added, path)


def merges_from_scores(tokens: list[str], types: list[int], scores: list[float]) -> list[tuple[str, str]]:
    """BPE merges of a SentencePiece vocabulary: every split of every token into two tokens, best score first.

    Ties are ordered as transformers' converter orders them (longer left part first), or ids would differ.
    """
    vocab = {token: index for index, token in enumerate(tokens)}
    found: list[tuple[float, int, int, str, str]] = []
    for token, kind, score in zip(tokens, types, scores, strict=True):
        # SentencePiece gives control and user-defined tokens score 0; the GGUF converter writes -1000 for them.
        score = 0.0 if kind in (_CONTROL, _USER_DEFINED, _UNKNOWN) else score
        splits = [
            (score, cut, len(token) - cut, token[:cut], token[cut:])
            for cut in range(1, len(token))
            if token[:cut] in vocab and token[cut:] in vocab
        ]
        found += sorted(splits, key=lambda split: (vocab[split[3]], vocab[split[4]]))
    found.sort(key=lambda split: split[:3], reverse=True)
    return [(left, right) for *_, left, right in found]


def _with_added(tokenizer: Any, added: list[tuple[int, str, bool]], path: Path) -> str:
    """tokenizer.json of `tokenizer` with added tokens (id, content, special) at the file's own ids.

    `Tokenizer.add_tokens` would number tokens that are not in the vocabulary itself, so they are written into the JSON.
    """
    if len({content for _, content, _ in added}) != len(added):
        raise PieError(f"{path}: a token stands in the vocabulary twice; the file is damaged")
    data = json.loads(tokenizer.to_str())
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    data["added_tokens"] = [
        {"id": index, "content": content, **flags, "special": special} for index, content, special in added
    ]
    return json.dumps(data, ensure_ascii=False)
