"""Conversations -> token ids, where only the template itself can write a control token."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from pie_xla.errors import PieError, UsageError
from pie_xla.hub.store import ModelEntry
from pie_xla.hub.template import Message, render_chat
from pie_xla.hub.tokenizer import Tokenizer

_ROLE = re.compile(r"[A-Za-z][A-Za-z0-9_.-]*")
_PRIVATE = range(0xE000, 0xF900)  # Unicode's private use area


class Chat:
    """A model's chat template with its tokenizer.

    Args:
        entry: the model.
        tokenizer: its tokenizer.
    """

    def __init__(self, entry: ModelEntry, tokenizer: Tokenizer) -> None:
        self._entry, self._tokenizer = entry, tokenizer

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
    ) -> str:
        """The conversation as text, equal to transformers' `apply_chat_template(..., tokenize=False)`.

        Raises:
            PieError: the model has no chat template, or its template refuses the conversation.
            UsageError: a message without a role, or of a wrong shape.
        """
        template = self._entry.chat_template
        if template is None:
            raise PieError(
                f"model {self._entry.name!r} has no chat template: it is a base model",
                "give it plain text with model.encode, or import an instruction-tuned model",
            )
        _check(messages, tools)
        return render_chat(
            template,
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            special=self._entry.generation.special,
        )

    def encode(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
    ) -> list[int]:
        """Token ids of the conversation.

        On ordinary text they equal those of `apply_chat_template`. Text that spells a control token stays text: it is
        broken by a private character before rendering, so whatever the template then does, only the control tokens that
        the template wrote itself are whole.
        """
        _check(messages, tools)
        mark = _unused_character(messages, tools)
        marked_tools = (
            None if tools is None else [self._marked(tool, mark, self._tokenizer.control_pattern) for tool in tools]
        )
        text = self.render([self._marked_message(m, mark) for m in messages], marked_tools, add_generation_prompt)
        if mark not in text:
            return self._tokenizer.encode(text, specials=True)
        ids: list[int] = []
        for piece, control in self._split(text):
            if control is not None:
                ids.append(control)
            elif piece:
                ids += self._tokenizer.encode(piece.replace(mark, ""), specials=False)
        return ids

    def _marked_message(self, message: Message, mark: str) -> Message:
        # An assistant's turn is the model's own: its <think> and <tool_call> are read by templates and stay tokens.
        pattern = self._special_pattern if message.get("role") == "assistant" else self._tokenizer.control_pattern
        return {key: value if key == "role" else self._marked(value, mark, pattern) for key, value in message.items()}

    @property
    def _special_pattern(self) -> re.Pattern[str]:
        longest_first = sorted(self._tokenizer.special_tokens, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def _marked(self, value: Any, mark: str, pattern: re.Pattern[str]) -> Any:
        match value:
            case str():
                broken = pattern.sub(lambda found: found[0][0] + mark + found[0][1:], value)
                # "<|im_" here and "end|>" in the next part would meet in the rendered text
                return broken + mark if self._starts_control(broken) else broken
            case Mapping():
                return {
                    self._marked(key, mark, pattern): self._marked(item, mark, pattern) for key, item in value.items()
                }
            case list() | tuple():
                return [self._marked(item, mark, pattern) for item in value]
            case _:
                return value

    def _starts_control(self, text: str) -> bool:
        """Whether the end of `text` is the beginning, not the whole, of a control token."""
        return any(
            text.endswith(token[:size]) for token in self._tokenizer.control_tokens for size in range(1, len(token))
        )

    def _split(self, text: str) -> list[tuple[str, int | None]]:
        """Text between control tokens, and the tokens; a token that eats the spaces beside it does so here as well."""
        pieces: list[tuple[str, int | None]] = []
        at, strip = 0, False
        for match in self._tokenizer.control_pattern.finditer(text):
            left, right = self._tokenizer.eaten[match[0]]
            piece = text[at : match.start()]
            piece = piece.lstrip() if strip else piece
            pieces.append((piece.rstrip() if left else piece, None))
            pieces.append(("", self._tokenizer.control_tokens[match[0]]))
            at, strip = match.end(), right
        rest = text[at:]
        pieces.append((rest.lstrip() if strip else rest, None))
        return pieces


def _check(messages: Any, tools: Any) -> None:
    if not isinstance(messages, (list, tuple)) or not messages:
        raise UsageError(
            "the conversation is empty" if messages == [] else "messages are not a list", "give at least one message"
        )
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise UsageError(f"message {number} is a {type(message).__name__}, not an object with role and content")
        role = message.get("role")
        # Templates paste the role between control characters ('<|' + role + '|>'): it must be a bare word.
        if not isinstance(role, str) or not _ROLE.fullmatch(role):
            raise UsageError(
                f"message {number} has the role {role!r}", "a role is a word: system, user, assistant, tool"
            )
    if tools is not None and not (
        isinstance(tools, (list, tuple)) and all(isinstance(tool, Mapping) for tool in tools)
    ):
        raise UsageError("tools are not a list of JSON schemas")


def _unused_character(*values: Any) -> str:
    text = repr(values)
    used = {character for character in text if ord(character) in _PRIVATE} | set(re.findall(r"\\u([0-9a-f]{4})", text))
    free = next((chr(code) for code in _PRIVATE if chr(code) not in used and f"{code:04x}" not in used), None)
    if free is None:
        raise UsageError("the conversation uses every character of Unicode's private use area")
    return free
