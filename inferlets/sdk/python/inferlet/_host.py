"""The one seam between this package and the host that runs it.

A `Transport` carries calls (the WIT world's functions, in the sandbox; a Python object, natively). A `Runtime` is one
process's side of it: what the model is, the tickets in flight, and the garbage to hand back with the next call.
"""

from __future__ import annotations

import asyncio
import json
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol

from inferlet._errors import InferletError, PassError, UsageError
from inferlet._memo import Memo
from inferlet._version import version, world

Event = tuple[
    int, int, Any
]  # ticket, 0 and the value or 1 and {"message", "line", "undone"}: see `session.wait` in the WIT


class Transport(Protocol):
    """Calls to the host. A refused call raises `RefusedError` with the host's words."""

    def facts(self) -> dict[str, Any]: ...
    def new_set(self) -> int: ...
    def fork_set(self, ws: int) -> int: ...
    def truncate_set(self, ws: int, length: int) -> None: ...
    def drop_set(self, ws: int) -> None: ...
    def new_pipeline(self, seed: int | None) -> int: ...
    def close_pipeline(self, pipeline: int, cancel: bool) -> None: ...
    def new_channel(self, dtype: str, shape: tuple[int, ...], capacity: int) -> int: ...
    def channel(self, channel: int, op: str, value: Any) -> int: ...

    def prepare(self, fixed: dict[str, Any]) -> object:
        """What stays the same between submits of a pass, in the form that is cheapest to send again."""

    def submit(
        self, pipeline: int, rows: list[dict[str, Any]], prepared: object, line: str, drop: list[int], times: int
    ) -> int:
        """The ticket of the first of `times` equal submits; each next one's is 2 more."""

    def send(self, text: str) -> None: ...
    def receive(self) -> int: ...
    def log(self, level: int, text: str) -> None: ...
    def encode(self, text: str, specials: bool) -> list[int]: ...
    def decode(self, ids: list[int], skip_specials: bool) -> str: ...
    def chat(self, request: dict[str, Any]) -> list[int]: ...

    def call(self, name: str, request: dict[str, Any]) -> Any:
        """Ask the host by name; it answers at once (docs/host-calls.md)."""

    def start(self, name: str, request: dict[str, Any]) -> int:
        """Ask the host by name for what takes time: a ticket."""

    def trace(self, fn: Callable[[], Any], rows: tuple[int | None, ...], facts: Facts, stages: Any = None) -> Traced:
        """Run an epilogue, and the `inferlet.eta._stages.Stages` before it, once and record them.

        `rows` holds each row's number of readout positions, None for the last.
        """


@dataclass(frozen=True)
class Traced:
    """An epilogue, recorded: what a pass needs to know of it."""

    program: object  # canonical JSON text, or a native program
    params: tuple[Any, ...]
    channels: tuple[Any, ...]  # `Channel` objects in order of first use
    results: tuple[tuple[str, tuple[int, ...]], ...]  # (dtype, shape)
    scalar: bool  # one Output, not a tuple of them


@dataclass(frozen=True)
class Attention:
    """What layer stages see of a model: how many attention layers it has, and each one's query heads."""

    layers: int
    heads: int
    head_dim: int


@dataclass(frozen=True)
class Facts:
    """What a model is. `outputs` maps a name to (shape of one position, dtype); `models`: those beside the default one."""

    name: str
    vocab_size: int
    max_context: int
    page_size: int
    outputs: dict[str, tuple[tuple[int, ...], str]]
    stop_tokens: tuple[int, ...]
    prefix: tuple[int, ...]
    seed: int
    models: dict[str, Facts] = field(default_factory=dict)
    attention: Attention | None = None

    def of(self, name: str | None) -> Facts:
        """The facts of a model by its name; None is the default one.

        Raises:
            UsageError: there is none of this name.
        """
        if name is None or name == self.name:
            return self
        found = self.models.get(name) if isinstance(name, str) else None
        if found is None:
            raise UsageError(f"there is no model {name!r:.60} here; there is {', '.join([self.name, *self.models])}")
        return found

    @classmethod
    def from_json(cls, facts: dict[str, Any]) -> Facts:
        spoken = str(facts.get("world", ""))
        if spoken.rpartition(".")[0] != world.rpartition(".")[0]:
            raise InferletError(f"the host speaks {spoken or 'no named world'}, but inferlet {version} needs {world}")
        others = facts.get("models", {})
        return cls._model(
            facts, facts["seed"], {name: cls._model(own, facts["seed"], {}) for name, own in others.items()}
        )

    @classmethod
    def _model(cls, facts: dict[str, Any], seed: int, models: dict[str, Facts]) -> Facts:
        outputs = {name: (tuple(shape), dtype) for name, (shape, dtype) in facts["outputs"].items()}
        return cls(
            facts["name"],
            facts["vocab_size"],
            facts["max_context"],
            facts["page_size"],
            outputs,
            tuple(facts["stop_tokens"]),
            tuple(facts["prefix"]),
            seed,
            models,
            None if facts.get("attention") is None else Attention(*facts["attention"]),
        )


class Shot:
    """One ticket's result, shared by the Outputs of one submit (or one take, read or receive)."""

    __slots__ = ("__weakref__", "_error", "_values", "_waiters", "done", "runtime", "ticket")

    def __init__(self, runtime: Runtime, ticket: int) -> None:
        self.runtime, self.ticket = runtime, ticket
        self.done = False
        self._values: Any = None
        self._error: tuple[str, str] | None = None
        self._waiters: list[asyncio.Future[None]] = []

    def settle(self, ok: bool, value: Any) -> None:
        self.done = True
        if ok:
            self._values = value
        else:
            self._error = (value["message"], value.get("line", ""))
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._waiters.clear()

    def arrived(self) -> asyncio.Future[None]:
        """A future that ends when the result is here; one per waiter: cancelling a task cancels what it waits for."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        return waiter

    def value(self) -> Any:
        """The result; a fresh `PassError` each time, so that tracebacks do not pile up."""
        if self._error is not None:
            raise PassError(*self._error)
        return self._values

    def __del__(self) -> None:
        self.runtime.forget(self.ticket)


class Runtime:
    """One process's side of the host."""

    def __init__(self, transport: Transport, args: Any = None) -> None:
        self.transport = transport
        self.args = args
        self._facts: Facts | None = None
        self.recordings = Memo()
        self.inbox: Any = None  # messages of whoever launched the program, once it asks for any
        self._shots: dict[int, weakref.ref[Shot]] = {}
        self._sets: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        # deques: natively a collector may run on any thread, and append/popleft are atomic
        self._dropped: deque[int] = deque()
        self._garbage: deque[Callable[[], object]] = deque()

    @property
    def facts(self) -> Facts:
        if self._facts is None:
            self._facts = Facts.from_json(self.transport.facts())
        return self._facts

    def shot(self, ticket: int) -> Shot:
        shot = Shot(self, ticket)
        self._shots[ticket] = weakref.ref(shot)
        return shot

    def forget(self, ticket: int) -> None:
        """Nobody can ask for this ticket any more; the host hears of it with the next submit."""
        self._shots.pop(ticket, None)
        self._dropped.append(ticket)

    def dropped(self) -> list[int]:
        """Tickets forgotten since the last call."""
        gone = []
        while self._dropped:
            gone.append(self._dropped.popleft())
        return gone

    def discard(self, call: Callable[[], object]) -> None:
        """Remember a host call that frees something; `__del__` must not call the host itself."""
        self._garbage.append(call)

    def sweep(self) -> None:
        """Make the freeing calls that are due."""
        while self._garbage:
            self._garbage.popleft()()

    def know_set(self, handle: int, owner: Any) -> None:
        self._sets[handle] = owner

    @property
    def outstanding(self) -> int:
        """Tickets that have not arrived and that somebody still holds."""
        return len(self._shots)

    def deliver(self, events: Iterable[Event]) -> None:
        """Hand finished tickets to whoever waits; a failure also shortens the sets it did not extend."""
        for ticket, failed, value in events:
            if failed:
                for handle, count in value.get("undone", ()):
                    owner = self._sets.get(handle)
                    if owner is not None:
                        owner._undo(count)
            ref = self._shots.pop(ticket, None)
            shot = ref() if ref is not None else None
            if shot is not None:
                shot.settle(not failed, value)
        self.sweep()


_current: ContextVar[Runtime] = ContextVar("inferlet_runtime")
_guest: Runtime | None = None  # the sandbox holds one process, so a global serves it


def set_runtime(runtime: Runtime) -> None:
    """Make `runtime` the one of this context and of every task started from it (native processes share an
    interpreter).
    """
    _current.set(runtime)


def runtime() -> Runtime:
    """The running process's side of the host."""
    global _guest
    found = _current.get(None) or _guest
    if found is None:
        found = _guest = Runtime(_guest_transport())
    return found


def _guest_transport() -> Transport:
    try:
        from inferlet._guest import GuestTransport
    except ImportError as error:
        message = "inferlet works only inside a running inferlet: start the file with `pie-xla run FILE`"
        raise UsageError(message) from error
    return GuestTransport()


def begin(args: Any) -> None:
    """The language component says what the program was launched with, before it calls `main`."""
    runtime().args = args


def forget() -> None:
    """The program has ended; the next one is a stranger."""
    global _guest
    _guest = None


def deliver(events: Iterable[Event]) -> None:
    """The language component hands over what `session.wait` returned."""
    runtime().deliver(events)


def outstanding() -> int:
    """How many tickets the program can still wait for."""
    return runtime().outstanding


def finite_json(value: Any) -> Any:
    """JSON has no infinities: they travel as "nan", "inf" and "-inf"."""
    match value:
        case float():
            if value != value:
                return "nan"
            if value in (float("inf"), float("-inf")):
                return "inf" if value > 0 else "-inf"
            return value
        case list() | tuple():
            return [finite_json(item) for item in value]
        case dict():
            return {key: finite_json(item) for key, item in value.items()}
        case _:
            return value


_encode = json.JSONEncoder(separators=(",", ":")).encode


def compact(value: Any) -> str:
    """JSON without spaces."""
    return _encode(value)


def quoted(text: str) -> str:
    """A JSON string."""
    return (
        f'"{text}"' if text.isascii() and text.isprintable() and '"' not in text and "\\" not in text else _encode(text)
    )
