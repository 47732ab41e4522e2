"""Text <-> token ids of a stored model."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any

from pie_xla.errors import PieError, UsageError
from pie_xla.hub.store import ModelEntry

_REPLACEMENT = "\ufffd"
_MAX_HELD = 64  # tokens; a model that emits invalid bytes for ever must not make the stream quadratic


class Tokenizer:
    """The tokenizer of a stored model. Safe to share between threads.

    Control tokens are its special tokens and the other added tokens that its chat template writes (`<tool_call>`): what
    must not come out of a user's text.

    Args:
        entry: the model.
    """

    def __init__(self, entry: ModelEntry) -> None:
        from tokenizers import Tokenizer as Backend

        self._path = entry.tokenizer_path
        try:
            self._main = Backend.from_str(self.backend_json())
        except Exception as error:  # the binding raises bare Exception
            raise PieError(
                f"{entry.tokenizer_path} cannot be read: {error}", "remove the model and import it again"
            ) from error
        self._main.no_padding()
        self._main.no_truncation()
        self.generation = entry.generation
        template = entry.chat_template or ""
        self.special_tokens: dict[str, int] = {}
        self.control_tokens: dict[str, int] = {}
        self.eaten: dict[str, tuple[bool, bool]] = {}
        for index, token in self._main.get_added_tokens_decoder().items():
            if token.special:
                self.special_tokens[token.content] = index
            if token.special or (token.content.strip() and token.content in template):
                self.control_tokens[token.content] = index
                self.eaten[token.content] = (token.lstrip, token.rstrip)
        longest_first = sorted(self.control_tokens, key=len, reverse=True)
        self.control_pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def backend_json(self) -> str:
        """The text of its `tokenizer.json`."""
        return self._path.read_text(encoding="utf-8")  # not kept: 4 to 20 MB

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        """Ids that end a turn or a text."""
        return self.generation.stop_tokens

    @property
    def bos(self) -> int | None:
        """The beginning-of-sequence token, or None."""
        return self.generation.bos

    @property
    def prefix(self) -> tuple[int, ...]:
        """What a plain prompt starts with: BOS where the model wants one."""
        return (self.generation.bos,) if self.generation.add_bos and self.generation.bos is not None else ()

    def encode(self, text: str, specials: bool) -> list[int]:
        """Token ids of `text`; none are added around it.

        Args:
            text: any text; lone surrogates are refused.
            specials: True: text that spells a control token becomes it. False: it is encoded as the plain text it is.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise UsageError(f"the text is not valid Unicode: a lone surrogate at character {error.start}") from None
        if specials or self.control_pattern.search(text) is None:
            return list(self._main.encode(text, add_special_tokens=False).ids)
        return self._encode_plain(text)

    def decode(self, ids: Sequence[int], skip_specials: bool = True) -> str:
        """The text of `ids`; bytes that are no valid UTF-8 become U+FFFD, ids that name no token become nothing."""
        for index in ids:
            if not 0 <= index < 1 << 32:
                raise UsageError(f"{index} is not a token id")
        return str(self._main.decode(list(ids), skip_special_tokens=skip_specials))

    def token_to_id(self, token: str) -> int | None:
        """The id of the token spelled exactly `token`, or None."""
        index = self._main.token_to_id(token)
        return None if index is None else int(index)

    @cached_property
    def _plain(self) -> Any:
        """The same tokenizer without its control tokens; built when a text first spells one."""
        from tokenizers import Tokenizer as Backend

        data = json.loads(self.backend_json())
        data["added_tokens"] = [token for token in data["added_tokens"] if token["content"] not in self.control_tokens]
        data["padding"] = data["truncation"] = None
        return Backend.from_str(json.dumps(data))

    def _encode_plain(self, text: str) -> list[int]:
        ids = list(self._plain.encode(text, add_special_tokens=False).ids)
        if self._harmless(ids):
            return ids
        # The vocabulary itself spells a control token (unigram pieces): cut each occurrence after its first character.
        cuts = [0, *(match.start() + 1 for match in self.control_pattern.finditer(text)), len(text)]
        pieces = [text[start:end] for start, end in pairwise(cuts)]
        ids = [index for piece in pieces for index in self._plain.encode(piece, add_special_tokens=False).ids]
        if not self._harmless(ids):
            raise PieError(
                "this tokenizer makes a control token out of plain text",
                "refuse the text, or encode it with specials=True",
            )
        return ids

    def _harmless(self, ids: Iterable[int]) -> bool:
        unknown = self.special_tokens.get(self.generation.special.get("unk_token", ""))
        return not (set(ids) & set(self.control_tokens.values()) - {unknown})

    def stream(self, skip_specials: bool = True) -> TextStream:
        """A decoder for tokens that arrive one by one."""
        return TextStream(self, skip_specials)


class TextStream:
    """Decodes tokens as they come and never cuts a character: its bytes are held until the last one is there.

    The pieces joined equal `decode` of all ids.
    """

    def __init__(self, tokenizer: Tokenizer, skip_specials: bool) -> None:
        self._tokenizer, self._skip = tokenizer, skip_specials
        self._context: list[int] = []  # tokens already said; SentencePiece decoders treat the first token otherwise
        self._held: list[int] = []
        self._said = 0  # characters of the held tokens that were already said

    def push(self, ids: Iterable[int]) -> str:
        """The text that `ids` complete."""
        self._held += ids
        before, text = self._texts()
        whole = text.rstrip(_REPLACEMENT)
        if len(self._held) > _MAX_HELD:
            whole = text
        new = whole[before + self._said :]
        self._said += len(new)
        if len(whole) == len(text):
            self._context, self._held, self._said = self._held[-8:], [], 0
        return new

    def finish(self) -> str:
        """What is still held; an unfinished character becomes U+FFFD."""
        before, text = self._texts()
        new = text[before + self._said :]
        self._context, self._held, self._said = self._held[-8:], [], 0
        return new

    def _texts(self) -> tuple[int, str]:
        before = self._tokenizer.decode(self._context, self._skip)
        return len(before), self._tokenizer.decode([*self._context, *self._held], self._skip)
