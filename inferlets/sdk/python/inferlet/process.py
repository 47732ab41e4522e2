"""Other programs: start one from its text, talk with it, await what it returns, or kill it.

A child runs where its parent runs, under the same limits, and dies with it.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from inferlet._errors import ProcessError, UsageError
from inferlet._host import Shot, runtime
from inferlet._inbox import Inbox


class Process:
    """A started program. `await` it for what its `main` returned; awaiting again gives the same."""

    def __init__(self, handle: int) -> None:
        self._runtime, self._handle = runtime(), handle
        self._end: Shot | None = None
        owner = self._runtime  # not the process itself: it is dropped when nobody holds it
        self._inbox = Inbox(lambda: owner.shot(owner.transport.start("process.receive", {"process": handle})))

    def __await__(self) -> Generator[Any, None, Any]:
        """What `main` returned.

        Raises:
            ProcessError: it failed or was killed.
        """
        if self._end is None:
            self._runtime.sweep()
            self._end = self._runtime.shot(self._runtime.transport.start("process.wait", {"process": self._handle}))
        if not self._end.done:
            yield from self._end.arrived().__await__()
        end = self._end.value()
        if "failed" in end:
            raise ProcessError(end["failed"])
        return end["result"]

    def send(self, text: str) -> None:
        """A message that the child gets from `session.receive`; refused when it has ended or leaves too many unread."""
        if not isinstance(text, str):
            raise UsageError(f"send takes a str, not {type(text).__name__}")
        self._runtime.transport.call("process.send", {"process": self._handle, "text": text})

    async def receive(self) -> str | None:
        """The next text that the child gave to `session.send`; None when it has ended and none is left."""
        return await self._inbox.receive()

    def kill(self, reason: str = "killed by the program that started it") -> None:
        """End it now; what it has in flight is discarded. Awaiting it raises `ProcessError` with the reason."""
        self._runtime.transport.call("process.kill", {"process": self._handle, "reason": reason})

    def __del__(self) -> None:
        owner, handle = self._runtime, self._handle
        owner.discard(lambda: owner.transport.call("process.drop", {"process": handle}))


def spawn(source: str, input: Any = None, *, file: str = "child.py", seed: int | None = None) -> Process:
    """Start a program.

    Args:
        source: its text, a file that defines `async def main(input)`.
        input: what its `main` gets; anything with a JSON form.
        file: its name, for tracebacks.
        seed: of its random streams; None takes one from the system.

    Raises:
        RefusedError: too many programs run, or this one is too many spawns deep.
    """
    if not isinstance(source, str):
        raise UsageError(f"spawn takes the program's text, not {type(source).__name__}")
    request = {"source": source, "file": file, "input": input, "seed": seed}
    owner = runtime()
    owner.sweep()
    return Process(owner.transport.call("process.spawn", {key: v for key, v in request.items() if v is not None}))
