"""Messages from one source, each to one receiver."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from typing import Any

from inferlet._host import Shot


class Inbox:
    """A receive that is given up (its wait timed out, its task was cancelled) leaves its place to the next one, and so loses no message.

    Args:
        ask: asks the host for the next message.
    """

    def __init__(self, ask: Callable[[], Shot]) -> None:
        self._ask = ask
        self._left: deque[Shot] = deque()  # asked for and given up, oldest first

    def receive(self) -> Message:
        return Message(self, self.take())

    def take(self) -> Shot:
        return self._left.popleft() if self._left else self._ask()

    def leave(self, shot: Shot) -> None:
        """Nobody waits for this one any more."""
        self._left.append(shot)
        self._left = deque(sorted(self._left, key=lambda one: one.ticket))


class Message:
    """`await` it for the text, or None when none can come any more; awaiting again gives the same."""

    __slots__ = ("_inbox", "_shot", "_text", "_whole")

    def __init__(self, inbox: Inbox, shot: Shot) -> None:
        self._inbox = inbox
        self._shot: Shot | None = shot
        self._text: str | None = None
        self._whole = False

    def __await__(self) -> Generator[Any, None, str | None]:
        if not self._whole:
            shot, self._shot = self._shot or self._inbox.take(), None
            try:
                if not shot.done:
                    yield from shot.arrived().__await__()
            except BaseException:
                self._inbox.leave(shot)
                raise
            self._text, self._whole = shot.value(), True
        return self._text

    def __del__(self) -> None:
        if self._shot is not None:  # nobody has awaited it
            self._inbox.leave(self._shot)
