"""What the sandbox asks of the process it hosts: one method per function of the WIT world `pie:inferlet@0.1.0`.

Every method is called on the `pie-fibers` thread, while the guest that called it is suspended inside the call, and must
return at once. A `PieError` becomes the err string of a WIT function that has one (all but `facts`, `wait` and `log`);
any other exception ends the guest and is reported as a fault of the host.

The guest's side, in `inferlet._host`, is what the language component calls: `begin(input)` before `main`,
`deliver(events)` with the parsed list that `session.wait` returned, and `outstanding() -> int`, the number of tickets
whose event has not come yet (0 and no timer: the program would wait for ever, and the loop says so).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

T = TypeVar("T")


class Pending(Generic[T]):
    """A blocked host call: resolved by `wake()` from any thread, or by its timeout.

    The value is computed by `collect()` on the `pie-fibers` thread when the guest resumes, not by the thread that wakes
    it: events that arrive in between are delivered together, and a wake-up that races with a timeout loses nothing.

    Args:
        collect: gives the call's value; called once. After a timeout it is called too ("[]" for a wait without events).
        timeout_ms: milliseconds after which the scheduler wakes the guest by itself, or None.
    """

    __slots__ = ("_woken", "collect", "timeout_ms", "waiter")

    def __init__(self, collect: Callable[[], T], timeout_ms: int | None = None) -> None:
        self.collect = collect
        self.timeout_ms = timeout_ms
        self.waiter: Callable[[], None] | None = None  # set by the scheduler: puts the guest in the ready queue
        self._woken = False

    @property
    def woken(self) -> bool:
        return self._woken

    def wake(self) -> None:
        """Let the guest go on; from any thread, any number of times (only the first counts)."""
        # No wake is lost: the flag is set, then the waiter read; the scheduler sets the waiter, then reads the flag.
        if self._woken:
            return
        self._woken = True
        waiter = self.waiter
        if waiter is not None:
            waiter()


class HostApi(Protocol):
    """One process as its guest sees it. Handles and tickets are plain ints; JSON is compact text."""

    # interface engine
    def facts(self) -> str: ...
    def new_set(self) -> int: ...
    def fork_set(self, ws: int) -> int: ...
    def truncate_set(self, ws: int, n: int) -> None: ...
    def drop_set(self, ws: int) -> None: ...
    def new_pipeline(self, seed: int | None) -> int: ...
    def close_pipeline(self, p: int, cancel: bool) -> None: ...
    def new_channel(self, spec: str) -> int: ...
    def channel(self, ch: int, op: str, value: str) -> int: ...
    def submit(self, pipe: int, request: str) -> int: ...

    # interface session (`sleep-ms` is the scheduler's own)
    def wait(self, timeout_ms: int | None) -> str | Pending[str]:
        """JSON of the events that are there, at once; else a Pending with this timeout whose `collect` gives them."""

    def send(self, text: str) -> None: ...
    def receive(self) -> int: ...
    def log(self, level: int, text: str) -> None: ...

    # interface model
    def encode(self, text: str, specials: bool) -> Sequence[int]: ...
    def decode(self, ids: list[int], skip_specials: bool) -> str: ...
    def chat(self, request: str) -> Sequence[int]: ...

    # interface host
    def call(self, name: str, request: str) -> str: ...
    def start(self, name: str, request: str) -> int: ...
