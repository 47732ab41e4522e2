"""Whoever launched this program: messages, logs and arguments."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from inferlet._errors import UsageError
from inferlet._host import Shot, runtime

_LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}


def send(text: str) -> None:
    """Send text to the launcher at once; `pie-xla run` writes it to standard output as it comes."""
    if not isinstance(text, str):
        raise UsageError(f"session.send takes a str, not {type(text).__name__}")
    runtime().transport.send(text)


class _Message:
    __slots__ = ("_shot",)

    def __init__(self, shot: Shot) -> None:
        self._shot = shot

    def __await__(self) -> Generator[Any, None, str | None]:
        if not self._shot.done:
            yield from self._shot.arrived().__await__()
        return self._shot.value()


def receive() -> _Message:
    """`await session.receive()`: the next message sent to this program, or None when none can come any more."""
    owner = runtime()
    owner.sweep()
    return _Message(owner.shot(owner.transport.receive()))


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
