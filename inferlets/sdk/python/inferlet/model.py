"""The model the program runs beside: its tokenizer and its facts."""

from __future__ import annotations

from collections.abc import Iterable

from inferlet._errors import UsageError
from inferlet._host import runtime


def encode(text: str, specials: bool = False) -> list[int]:
    """Token ids of `text`, nothing added.

    Args:
        specials: read the names of special tokens in `text` as those tokens. Off, user text never becomes one.
    """
    if not isinstance(text, str):
        raise UsageError(f"model.encode takes a str, not {type(text).__name__}")
    return list(runtime().transport.encode(text, specials))


def decode(ids: int | Iterable[int], skip_specials: bool = True) -> str:
    """The text of token ids; bytes that are no UTF-8 (yet) come as U+FFFD."""
    tokens = [ids] if isinstance(ids, int) else list(ids)
    vocab = vocab_size()
    for at, token in enumerate(tokens):
        if type(token) is not int or not 0 <= token < vocab:
            raise UsageError(f"model.decode: entry {at} is {token!r:.60}, not a token id (0 to {vocab - 1})")
    return runtime().transport.decode(tokens, skip_specials)


def vocab_size() -> int:
    """Number of token ids, V."""
    return runtime().facts.vocab_size


def stop_tokens() -> list[int]:
    """Tokens that end the model's answer."""
    return list(runtime().facts.stop_tokens)


def context_length() -> int:
    """Longest sequence, in tokens."""
    return runtime().facts.max_context


def outputs() -> dict[str, tuple[tuple[int, ...], str]]:
    """What `intrinsics.output(row, name)` can name: name -> (shape of one position, dtype)."""
    return dict(runtime().facts.outputs)


def name() -> str:
    """The model's name, as the server's users call it."""
    return runtime().facts.name


class TextStream:
    """Tokens in, whole characters out: `push(token)` gives the text that is certain now, "" while a character is
    open.
    """

    _LONGEST_OPEN = 8  # tokens; a character has at most 4 bytes, so what stays open longer is no UTF-8

    def __init__(self, skip_specials: bool = True) -> None:
        self._skip = skip_specials
        self._ids: list[int] = []  # the last emitted tokens, as context, and the open ones
        self._emitted = 0

    def push(self, token: int) -> str:
        self._ids.append(token)
        return self._advance(final=False)

    def finish(self) -> str:
        """What is left, with U+FFFD for a character that never closed."""
        return self._advance(final=True) if len(self._ids) > self._emitted else ""

    def _advance(self, final: bool) -> str:
        # Tokenizers may drop a space at a text's start: the tokens before are decoded along to keep that out of here.
        before = decode(self._ids[: self._emitted], self._skip)
        text = decode(self._ids, self._skip)
        is_open = text.endswith("\ufffd") and len(self._ids) - self._emitted < self._LONGEST_OPEN
        if is_open and not final:
            return ""
        self._ids = self._ids[self._emitted :]
        self._emitted = len(self._ids)
        return text[len(before) :]
