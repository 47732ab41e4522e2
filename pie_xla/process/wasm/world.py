"""The functions of the WIT world, defined on one wasmtime linker that all guests share.

A callback finds its guest in `World.current`: one thread runs all guests, so there is exactly one while wasm runs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import wasmtime
from wasmtime.component import Linker

from pie_xla.errors import PieError
from pie_xla.process.wasm import cabi
from pie_xla.process.wasm.hostapi import HostApi, Pending

_log = logging.getLogger(__name__)

PACKAGE = "pie:inferlet"
VERSION = "0.1.0"
# wasmtime 50's own version of the interface: definitions under any other version do not replace its sleeping functions.
WASI_CLOCK = "wasi:clocks/monotonic-clock@0.2.12"


class Caller(Protocol):
    """What the world needs of the guest that is running."""

    @property
    def host(self) -> HostApi: ...
    def charge_output(self, text: str) -> None: ...
    def block(self, pending: Pending[Any]) -> cabi.Blocking: ...
    def set_fault(self, error: BaseException) -> None: ...


@dataclass(frozen=True)
class _Function:
    """A host function that returns at once. `result` writes the ok case of a `result<T, string>`; None: no T."""

    name: str
    params: Sequence[cabi.Reader]
    result: cabi.Writer | None
    call: Callable[..., Any]


_U32, _TEXT = cabi.read_u32, cabi.read_string

_ENGINE = (
    _Function("new-set", (), cabi.write_u32, lambda host: host.new_set()),
    _Function("fork-set", (_U32,), cabi.write_u32, lambda host, ws: host.fork_set(ws)),
    _Function("truncate-set", (_U32, _U32), None, lambda host, ws, n: host.truncate_set(ws, n)),
    _Function("drop-set", (_U32,), None, lambda host, ws: host.drop_set(ws)),
    _Function(
        "new-pipeline", (cabi.read_option(cabi.read_u64),), cabi.write_u32, lambda host, seed: host.new_pipeline(seed)
    ),
    _Function("close-pipeline", (_U32, cabi.read_bool), None, lambda host, p, cancel: host.close_pipeline(p, cancel)),
    _Function("new-channel", (_TEXT,), cabi.write_u32, lambda host, spec: host.new_channel(spec)),
    _Function("channel", (_U32, _TEXT, _TEXT), cabi.write_u64, lambda host, ch, op, value: host.channel(ch, op, value)),
    _Function("submit", (_U32, _TEXT), cabi.write_u64, lambda host, pipe, request: host.submit(pipe, request)),
)
_MODEL = (
    _Function(
        "encode", (_TEXT, cabi.read_bool), cabi.write_u32_list, lambda host, text, specials: host.encode(text, specials)
    ),
    _Function(
        "decode",
        (cabi.read_u32_list, cabi.read_bool),
        cabi.write_string,
        lambda host, ids, skip: host.decode(ids, skip),
    ),
    _Function("chat", (_TEXT,), cabi.write_u32_list, lambda host, request: host.chat(request)),
)
_HOST = (
    _Function("call", (_TEXT, _TEXT), cabi.write_string, lambda host, name, request: host.call(name, request)),
    _Function("start", (_TEXT, _TEXT), cabi.write_u64, lambda host, name, request: host.start(name, request)),
)
_SESSION = (_Function("receive", (), cabi.write_u64, lambda host: host.receive()),)


class World:
    """Everything a guest can call: the WIT world, and WASI without files, network, environment or sleep."""

    def __init__(self, engine: wasmtime.Engine) -> None:
        self.current: Caller | None = None
        self.functions = cabi.Functions(self._fault)
        self.linker = Linker(engine)
        self.linker.allow_shadowing = True
        # The synchronous WASI: the asynchronous one wants a tokio reactor, and aborts the whole server without one.
        self.linker.add_wasip2()
        with self.linker.root() as root:
            with root.add_instance(f"{PACKAGE}/engine@{VERSION}") as instance:
                self.functions.add(instance, "facts", (), cabi.write_string, lambda: self._host().facts())
                self._add_all(instance, _ENGINE)
            with root.add_instance(f"{PACKAGE}/session@{VERSION}") as instance:
                self._add_all(instance, _SESSION)
                self.functions.add(
                    instance, "send", (_TEXT,), cabi.write_result(None), self._refusable(self._send), refusable=True
                )
                self.functions.add(instance, "log", (_U32, _TEXT), None, self._write_log)
                self.functions.add_blocking(
                    instance,
                    "wait",
                    (cabi.read_option(_U32),),
                    cabi.write_string,
                    lambda timeout_ms: self._wait(timeout_ms),
                )
                self.functions.add_blocking(
                    instance, "sleep-ms", (_U32,), None, lambda ms: self._caller().block(Pending(lambda: None, ms))
                )
            with root.add_instance(f"{PACKAGE}/model@{VERSION}") as instance:
                self._add_all(instance, _MODEL)
            with root.add_instance(f"{PACKAGE}/host@{VERSION}") as instance:
                self._add_all(instance, _HOST)
            # WASI's own sleep would block the thread that runs all guests.
            with root.add_instance(WASI_CLOCK) as instance:
                for name in ("subscribe-duration", "subscribe-instant"):
                    self.functions.add(instance, name, (cabi.read_u64,), None, _refuse_sleep)

    def _caller(self) -> Caller:
        if self.current is None:
            raise RuntimeError("a host function was called while no guest runs")
        return self.current

    def _host(self) -> HostApi:
        return self._caller().host

    def _add_all(self, instance: Any, functions: Sequence[_Function]) -> None:
        for function in functions:
            call = self._refusable(self._for_host(function.call))
            self.functions.add(
                instance, function.name, function.params, cabi.write_result(function.result), call, refusable=True
            )

    def _for_host(self, call: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: call(self._host(), *args)

    def _refusable(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """A `PieError` becomes the err string of the WIT function."""

        def guarded(*args: Any) -> Any:
            try:
                return call(*args)
            except PieError as error:
                return cabi.Refused(str(error))

        return guarded

    def _send(self, text: str) -> None:
        caller = self._caller()
        caller.charge_output(text)
        caller.host.send(text)

    def _write_log(self, level: int, text: str) -> None:
        caller = self._caller()
        caller.charge_output(text)
        caller.host.log(level, text)

    def _wait(self, timeout_ms: int | None) -> cabi.Blocking:
        caller = self._caller()
        answer = caller.host.wait(timeout_ms)
        return caller.block(answer) if isinstance(answer, Pending) else cabi.Ready(answer)

    def _fault(self, error: BaseException) -> str:
        """Remember what an exception in a host function was; the text goes into the trap."""
        if self.current is not None:
            self.current.set_fault(error)
        else:
            _log.error("host function failed outside of a guest", exc_info=error)
        return f"host: {type(error).__name__}: {error}"


class SleepRefused(Exception):
    """A guest asked WASI to sleep, instead of `session.sleep-ms`."""


def _refuse_sleep(_time: int) -> None:
    raise SleepRefused("this way of sleeping is not available in the sandbox; use time.sleep or asyncio.sleep")
