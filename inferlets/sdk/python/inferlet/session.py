"""Whoever launched this program: messages, logs and arguments."""

from __future__ import annotations

from typing import Any

from inferlet._errors import UsageError
from inferlet._host import runtime
from inferlet._inbox import Inbox, Message

_LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}


def send(text: str) -> None:
    """Send text to the launcher at once; `pie-xla run` writes it to standard output as it comes."""
    if not isinstance(text, str):
        raise UsageError(f"session.send takes a str, not {type(text).__name__}")
    runtime().transport.send(text)


def receive() -> Message:
    """`await session.receive()`: the next message sent to this program, or None when none can come any more."""
    owner = runtime()
    owner.sweep()
    if owner.inbox is None:
        owner.inbox = Inbox(lambda: owner.shot(owner.transport.receive()))
    return owner.inbox.receive()


def log(text: str, level: str = "info") -> None:
    """A line for the program's log. `level`: debug, info, warning or error."""
    if level not in _LEVELS:
        raise UsageError(f"session.log level {level!r} is not one of {', '.join(_LEVELS)}")
    runtime().transport.log(_LEVELS[level], f"{text}\n")


def args() -> Any:
    """What the program was launched with; the same value `main` gets."""
    return runtime().args


def seed() -> int:
    """What pipelines without a seed of their own draw from; give it to `pie-xla run --seed` to see the same again."""
    return runtime().facts.seed
