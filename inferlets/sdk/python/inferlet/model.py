"""The models the program runs beside: their tokenizers and facts.

Each function is about the default model, or the one that `model` names: `model.encode(text, model="draft")`. `get("draft")` gives an
object with the same functions, all about that model.
"""

from __future__ import annotations

from collections.abc import Iterable

from inferlet._errors import UsageError
from inferlet._host import Attention, runtime


def encode(text: str, specials: bool = False, *, model: str | None = None) -> list[int]:
    """Token ids of `text`, nothing added.

    Args:
        specials: read the names of special tokens in `text` as those tokens. Off, user text never becomes one.
    """
    if not isinstance(text, str):
        raise UsageError(f"model.encode takes a str, not {type(text).__name__}")
    here, other = runtime(), _other(model)
    if other is None:
        return list(here.transport.encode(text, specials))
    return list(here.transport.call("model.encode", {"model": other, "text": text, "specials": specials}))


def decode(ids: int | Iterable[int], skip_specials: bool = True, *, model: str | None = None) -> str:
    """The text of token ids; bytes that are no UTF-8 (yet) come as U+FFFD."""
    tokens = [ids] if isinstance(ids, int) else list(ids)
    vocab = vocab_size(model=model)
    for at, token in enumerate(tokens):
        if type(token) is not int or not 0 <= token < vocab:
            raise UsageError(f"model.decode: entry {at} is {token!r:.60}, not a token id (0 to {vocab - 1})")
    here, other = runtime(), _other(model)
    if other is None:
        return here.transport.decode(tokens, skip_specials)
    return str(here.transport.call("model.decode", {"model": other, "ids": tokens, "skip_specials": skip_specials}))


def vocab_size(*, model: str | None = None) -> int:
    """Number of token ids, V."""
    return runtime().facts.of(model).vocab_size


def stop_tokens(*, model: str | None = None) -> list[int]:
    """Tokens that end the model's answer."""
    return list(runtime().facts.of(model).stop_tokens)


def context_length(*, model: str | None = None) -> int:
    """Longest sequence, in tokens."""
    return runtime().facts.of(model).max_context


def outputs(*, model: str | None = None) -> dict[str, tuple[tuple[int, ...], str]]:
    """What `intrinsics.output(row, name)` can name: name -> (shape of one position, dtype)."""
    return dict(runtime().facts.of(model).outputs)


def attention(*, model: str | None = None) -> Attention | None:
    """What layer stages (`ForwardPass.on_attn`) see: `layers`, `heads`, `head_dim`; None where the model or the backend shows nothing."""
    return runtime().facts.of(model).attention


def name() -> str:
    """The default model's name, as the server's users call it."""
    return runtime().facts.name


def names() -> list[str]:
    """The names of all models, the default one first."""
    facts = runtime().facts
    return [facts.name, *facts.models]


def get(name: str) -> Model:
    """A model by its name.

    Raises:
        UsageError: there is none of this name.
    """
    return Model(runtime().facts.of(name).name)


def _other(name: str | None) -> str | None:
    """A known model's name, None where it is the default one's."""
    facts = runtime().facts
    found = facts.of(name)
    return None if found is facts else found.name


class Model:
    """One of the models, by its name: `model.get(name)`. Its functions are this module's."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def encode(self, text: str, specials: bool = False) -> list[int]:
        """See `model.encode`."""
        return encode(text, specials, model=self.name)

    def decode(self, ids: int | Iterable[int], skip_specials: bool = True) -> str:
        """See `model.decode`."""
        return decode(ids, skip_specials, model=self.name)

    def vocab_size(self) -> int:
        """Number of token ids, V."""
        return vocab_size(model=self.name)

    def stop_tokens(self) -> list[int]:
        """Tokens that end the model's answer."""
        return stop_tokens(model=self.name)

    def context_length(self) -> int:
        """Longest sequence, in tokens."""
        return context_length(model=self.name)

    def outputs(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """See `model.outputs`."""
        return outputs(model=self.name)

    def attention(self) -> Attention | None:
        """See `model.attention`."""
        return attention(model=self.name)

    def __repr__(self) -> str:
        return f"model.get({self.name!r})"


class TextStream:
    """Tokens in, whole characters out: `push(token)` gives the text that is certain now, "" while a character is
    open. The tokens are the default model's, or those of the one that `model` names.
    """

    _LONGEST_OPEN = 8  # tokens; a character has at most 4 bytes, so what stays open longer is no UTF-8

    def __init__(self, skip_specials: bool = True, *, model: str | None = None) -> None:
        self._skip = skip_specials
        self._model = model
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
        before = decode(self._ids[: self._emitted], self._skip, model=self._model)
        text = decode(self._ids, self._skip, model=self._model)
        is_open = text.endswith("\ufffd") and len(self._ids) - self._emitted < self._LONGEST_OPEN
        if is_open and not final:
            return ""
        self._ids = self._ids[self._emitted :]
        self._emitted = len(self._ids)
        return text[len(before) :]
