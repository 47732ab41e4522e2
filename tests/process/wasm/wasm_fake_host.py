"""A `HostApi` without an engine: tickets are resolved by hand or by timers, everything sent is recorded."""

from __future__ import annotations

import json
import queue
import threading
from dataclasses import dataclass, field
from typing import Any

from pie_xla.errors import PieError
from pie_xla.process.wasm import GuestExit, GuestHandle, Limits, Pending, Sandbox


class FakeHost:
    def __init__(self) -> None:
        self.sent: list[str] = []
        self.logs: list[tuple[int, str]] = []
        self.calls: list[tuple[Any, ...]] = []
        self.waiting = threading.Event()  # set when the guest blocks without events
        self._lock = threading.Lock()
        self._events: list[list[Any]] = []
        self._waiter: Pending[str] | None = None
        self._next = 0

    # -- the test's side --

    def finish(self, ticket: int, value: Any, failed: bool = False) -> None:
        with self._lock:
            self._events.append([ticket, int(failed), value])
            waiter, self._waiter = self._waiter, None
        if waiter is not None:
            waiter.wake()

    def text(self, level: int) -> str:
        return "".join(text for at, text in self.logs if at == level)

    def _collect(self) -> str:
        with self._lock:
            events, self._events = self._events, []
            self._waiter = None
        return json.dumps(events)

    def _call(self, *call: Any) -> int:
        self.calls.append(call)
        self._next += 1
        return self._next

    # -- the guest's side: a timer finishes a submit's ticket after `pipe` milliseconds, with the request's length --

    def facts(self) -> str:
        return '{"vocab_size":7}'

    def new_set(self) -> int:
        return self._call("new_set")

    def fork_set(self, ws: int) -> int:
        if ws == 404:
            raise PieError(f"no working set {ws}", "make one first")
        if ws == 500:
            raise KeyError("a bug of the host")
        return self._call("fork_set", ws)

    def truncate_set(self, ws: int, n: int) -> None:
        self._call("truncate_set", ws, n)

    def drop_set(self, ws: int) -> None:
        self._call("drop_set", ws)

    def new_pipeline(self, seed: int | None) -> int:
        return self._call("new_pipeline", seed)

    def close_pipeline(self, p: int, cancel: bool) -> None:
        self._call("close_pipeline", p, cancel)

    def new_channel(self, spec: str) -> int:
        return self._call("new_channel", spec)

    def channel(self, ch: int, op: str, value: str) -> int:
        return self._call("channel", ch, op, value)

    def submit(self, pipe: int, request: str) -> int:
        ticket = self._call("submit", pipe, request)
        if pipe:
            timer = threading.Timer(pipe / 1000, self.finish, (ticket, len(request)))
            timer.daemon = True
            timer.start()
        return ticket

    def wait(self, timeout_ms: int | None) -> str | Pending[str]:
        with self._lock:
            if not self._events:
                self._waiter = Pending(self._collect, timeout_ms)
                self.waiting.set()
                return self._waiter
        return self._collect()

    def send(self, text: str) -> None:
        self.sent.append(text)

    def receive(self) -> int:
        return self._call("receive")

    def log(self, level: int, text: str) -> None:
        self.logs.append((level, text))

    def encode(self, text: str, specials: bool) -> list[int]:
        return [*([1] if specials else []), *text.encode()]

    def decode(self, ids: list[int], skip_specials: bool) -> str:
        return bytes(ids).decode("latin-1")

    def chat(self, request: str) -> list[int]:
        return [len(request)]

    def call(self, name: str, request: str) -> str:
        return request

    def start(self, name: str, request: str) -> int:
        return 0


@dataclass
class Run:
    """A started guest."""

    host: FakeHost
    handle: GuestHandle
    exits: queue.SimpleQueue[GuestExit] = field(default_factory=queue.SimpleQueue)

    def exit(self, timeout: float = 60.0) -> GuestExit:
        return self.exits.get(timeout=timeout)


class Guests:
    """Starts programs in one sandbox."""

    def __init__(self, sandbox: Sandbox) -> None:
        self.sandbox = sandbox

    def start(self, source: str, value: Any = None, limits: Limits | None = None, host: FakeHost | None = None) -> Run:
        host = host or FakeHost()
        exits: queue.SimpleQueue[GuestExit] = queue.SimpleQueue()
        handle = self.sandbox.spawn(source, "main.py", value, host, exits.put, limits or Limits())
        return Run(host, handle, exits)

    def run(
        self, source: str, value: Any = None, limits: Limits | None = None, host: FakeHost | None = None
    ) -> GuestExit:
        return self.start(source, value, limits, host).exit()
