"""Conversations as tokens, by the model's own chat template: the default model's, or that of the one `model` names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from inferlet._errors import UsageError
from inferlet._host import runtime


def prefix(*, model: str | None = None) -> list[int]:
    """What a text starts with: the model's begin-of-sequence token where it has one, else nothing."""
    return list(runtime().facts.of(model).prefix)


def render(
    messages: Sequence[dict[str, Any]],
    tools: Sequence[dict[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    *,
    model: str | None = None,
) -> list[int]:
    """Token ids of a conversation. What users wrote never becomes a special token.

    Args:
        messages: `{"role": "user", "content": "..."}` and so on, oldest first.
        tools: function descriptions for templates that take them.
        add_generation_prompt: end with the words that open the assistant's answer.
    """
    for at, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise UsageError(f"chat.render: message {at} is {message!r:.80}; it needs a dict with role and content")
    if not messages:
        raise UsageError("chat.render: no messages")
    request = {
        "messages": list(messages),
        "add_generation_prompt": add_generation_prompt,
        "tools": None if tools is None else list(tools),
    }
    here = runtime()
    facts = here.facts.of(model)
    if facts is here.facts:
        return list(here.transport.chat(request))
    return list(here.transport.call("model.chat", {**request, "model": facts.name}))


def stop_tokens(*, model: str | None = None) -> list[int]:
    """Tokens that end the assistant's turn."""
    return list(runtime().facts.of(model).stop_tokens)
