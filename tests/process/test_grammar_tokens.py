"""Masks over SentencePiece-like tokens (spaces as a letter of their own, byte fallback): what is drawn decodes to what is allowed."""

from __future__ import annotations

import json
import re

import jsonschema
import numpy as np
import pytest
from tokenizers import Tokenizer

from pie_xla.process.grammar import Kind, Matcher, Vocabulary, Workers

STOP = 1
LETTERS = 'abcdefghijklmnopqrstuvwxyz0123456789{}[]":,.-\\é'
MERGES = [
    ("▁", "a"),
    ("▁", "b"),
    ('"', ":"),
    ('":', "▁"),
    ("t", "r"),
    ("tr", "u"),
    ("tru", "e"),
    ("{", '"'),
    ("n", "a"),
]


def tokenizer_json() -> str:
    specials = ["<pad>", "<eos>", "<bos>", "<unk>"]
    words = [*specials, *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *LETTERS, *("".join(pair) for pair in MERGES)]
    added = [
        {"id": i, "content": text, "special": True, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        for i, text in enumerate(specials)
    ]  # fmt: skip
    replace = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    return json.dumps({
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "pre_tokenizer": None,
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}, "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": [replace, {"type": "ByteFallback"}, {"type": "Fuse"}]},
        "model": {"type": "BPE", "dropout": None, "unk_token": "<unk>", "continuing_subword_prefix": None,
                  "end_of_word_suffix": None, "fuse_unk": True, "byte_fallback": True, "ignore_merges": False,
                  "vocab": {word: i for i, word in enumerate(words)}, "merges": [list(pair) for pair in MERGES]},
    })  # fmt: skip


SPELLED = tokenizer_json()
BACK = Tokenizer.from_str(SPELLED)
V = BACK.get_vocab_size() + 5  # the model has more rows than the tokenizer has tokens


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        (Kind.REGEX, " a b( [a-c]|é|日){3,6}"),
        (Kind.REGEX, "(na)+ (true|b)"),
        (Kind.JSON_SCHEMA, json.dumps({"type": "object", "additionalProperties": False, "required": ["a", "na"], "properties": {
            "a": {"type": "boolean"}, "na": {"type": "string", "maxLength": 9}}})),
    ],
)  # fmt: skip
def test_what_is_drawn_decodes_to_what_is_allowed(kind: Kind, source: str) -> None:
    vocabulary, workers = Vocabulary(lambda: SPELLED, V, (STOP,)), Workers()
    start = vocabulary.compile(kind, source)
    seen: set[int] = set()
    for seed in range(20):
        rng, matcher, tokens = np.random.default_rng(seed), Matcher(vocabulary, start.deep_copy(), workers), []
        while True:
            bits = np.unpackbits(matcher.mask().result(5).view(np.uint8), bitorder="little")
            token = int(rng.choice(np.flatnonzero(bits)))
            assert token < V and matcher.accept([token]) == 1 and len(tokens) < 200
            if token == STOP:
                break
            tokens.append(token)
        seen.update(tokens)
        text = BACK.decode(tokens, skip_special_tokens=False)
        if kind is Kind.REGEX:
            assert re.fullmatch(source, text), text
        else:
            jsonschema.validate(json.loads(text), json.loads(source))
    assert any(len(BACK.id_to_token(token)) > 1 for token in seen)
    workers.close()
