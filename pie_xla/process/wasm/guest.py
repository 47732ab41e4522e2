"""One guest: a wasmtime store and the fiber that runs in it, as a state machine the scheduler polls."""

from __future__ import annotations

import ctypes
import enum
import json
import logging
import time
from collections.abc import Callable
from ctypes import addressof, c_size_t, c_void_p
from typing import Any, Protocol

import wasmtime
from wasmtime import _ffi as ffi
from wasmtime.component import Component, Instance

from pie_xla.errors import PieError
from pie_xla.process.wasm import cabi
from pie_xla.process.wasm.hostapi import HostApi, Pending
from pie_xla.process.wasm.limits import ExitKind, GuestExit, Limits, OutputLimitReached, size_text
from pie_xla.process.wasm.world import SleepRefused, World

_log = logging.getLogger(__name__)
_dll = ffi.dll
# CFUNCTYPE gives up the GIL while wasm runs.
_poll = ctypes.CFUNCTYPE(ctypes.c_bool, c_void_p)(("wasmtime_call_future_poll", _dll))
_poll_holding_gil = ctypes.PYFUNCTYPE(ctypes.c_bool, c_void_p)(("wasmtime_call_future_poll", _dll))
_future_delete = ctypes.CFUNCTYPE(None, c_void_p)(("wasmtime_call_future_delete", _dll))
_instantiate_async = ctypes.CFUNCTYPE(c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p)(
    ("wasmtime_component_linker_instantiate_async", _dll)
)
_call_async = ctypes.CFUNCTYPE(c_void_p, c_void_p, c_void_p, c_void_p, c_size_t, c_void_p, c_size_t, c_void_p)(
    ("wasmtime_component_func_call_async", _dll)
)
# wasmtime-py declares an error as its result; in C it returns nothing, and what ctypes would read is garbage.
_yield_at_epoch = ctypes.CFUNCTYPE(None, c_void_p, ctypes.c_uint64)(
    ("wasmtime_context_epoch_deadline_async_yield_and_update", _dll)
)
_set_deadline = ctypes.PYFUNCTYPE(None, c_void_p, ctypes.c_uint64)(("wasmtime_context_set_epoch_deadline", _dll))

_CRASH_TAIL = 2000  # characters of the runtime's own last words in a crash report


class Poll(enum.Enum):
    """Why a guest stopped running."""

    BLOCKED = enum.auto()
    PREEMPTED = enum.auto()
    FINISHED = enum.auto()


class _Stage(enum.Enum):
    NEW = enum.auto()
    INSTANTIATING = enum.auto()
    RUNNING = enum.auto()
    ENDED = enum.auto()


class Waker(Protocol):
    """What a guest needs of its scheduler."""

    def wake(self, guest: Guest) -> None: ...
    def arm_timer(self, guest: Guest, seconds: float) -> None: ...


class Guest:
    """One running inferlet. All methods are for the scheduler's thread.

    Args:
        request: the JSON argument of `run`.
        on_exit: called once, after everything the guest held is freed.
    """

    def __init__(
        self,
        world: World,
        component: Component,
        request: str,
        host: HostApi,
        limits: Limits,
        on_exit: Callable[[GuestExit], None],
        scheduler: Waker,
    ) -> None:
        self.host = host
        self.limits = limits
        self.on_exit = on_exit
        self.cpu_ns = 0
        self.slices = 0  # used up one after the other, without blocking
        self.deadline: float | None = None  # of the timer that is armed, in time.monotonic() seconds
        self._world = world
        self._component = component
        self._request = request
        self._scheduler = scheduler
        self._pending: Pending[Any] | None = None
        self._fault: BaseException | None = None
        self._output_bytes = 0
        self._crash_text = b""
        self._stage = _Stage.NEW
        self._store: wasmtime.Store | None = None
        self._context = 0
        self._future: int | None = None
        self._error = c_void_p()
        self._instance = ffi.wasmtime_component_instance_t()
        self._argument = cabi.Val()  # an empty value owns nothing
        self._result = cabi.Val()

    # -- what host functions see (world.Caller) ---------------------------------------------------------------------

    def charge_output(self, text: str) -> None:
        """Count text against the output limit, in UTF-8 bytes.

        Raises:
            OutputLimitReached: it is used up; the guest ends.
        """
        self._output_bytes += len(text) if text.isascii() else len(text.encode("utf-8", "backslashreplace"))
        if self._output_bytes > self.limits.output_bytes:
            raise OutputLimitReached

    def block(self, pending: Pending[Any]) -> cabi.Blocking:
        self._pending = pending
        pending.waiter = lambda: self._scheduler.wake(self)
        if pending.timeout_ms is not None and not pending.woken:
            if pending.timeout_ms <= 0:
                pending.waiter = None
                pending.wake()
            else:
                self._scheduler.arm_timer(self, pending.timeout_ms / 1000)
        return _PendingCall(self, pending)

    def unblock(self, pending: Pending[Any]) -> Any:
        self._pending = None
        self.deadline = None
        return pending.collect()

    def set_fault(self, error: BaseException) -> None:
        if self._fault is None:
            self._fault = error

    # -- what the scheduler does -------------------------------------------------------------------------------------

    @property
    def started(self) -> bool:
        return self._stage is not _Stage.NEW

    @property
    def ended(self) -> bool:
        return self._stage is _Stage.ENDED

    @property
    def runnable(self) -> bool:
        """A blocked guest is not, until its call is woken; a late wake-up of an earlier call changes nothing."""
        return not self.ended and (self._pending is None or self._pending.woken)

    def time_out(self) -> None:
        if self._pending is not None:
            self._pending.wake()

    def poll(self, ticks: int, *, holding_gil: bool) -> tuple[Poll, GuestExit | None]:
        """Run until it blocks, the epoch has moved on by `ticks`, or it ends; an end comes with its exit, all freed.

        Args:
            holding_gil: keep other Python threads out meanwhile; somebody else must be able to move the epoch.
        """
        self._poll_future = _poll_holding_gil if holding_gil else _poll
        self._ticks = ticks
        started = time.thread_time_ns()
        self._world.current = self
        ended: GuestExit | None = None
        try:
            if self._stage is _Stage.NEW:
                self._instantiate()
            finished = self._advance()
        except BaseException as error:  # a guest must not take the scheduler with it
            finished = True
            ended = self._exit(ExitKind.CRASHED, f"the sandbox could not run the program: {error}")
        finally:
            self._world.current = None
            self.cpu_ns += time.thread_time_ns() - started
        if finished or isinstance(self._fault, OutputLimitReached):
            ended = ended or self._outcome()
            self.free()
            return Poll.FINISHED, ended
        if self.cpu_ns > self.limits.cpu_seconds * 1e9:
            return Poll.FINISHED, self.end(
                ExitKind.CPU_TIME,
                f"the program used more than {self.limits.cpu_seconds:g} s of processor time, its limit."
                "\n  hint: an endless loop? Waiting does not count",
            )
        return (Poll.PREEMPTED if self._pending is None else Poll.BLOCKED), None

    def end(self, kind: ExitKind, message: str) -> GuestExit:
        """End it from outside, whatever it is doing."""
        ended = self._exit(kind, message)
        self.free()
        return ended

    def free(self) -> None:
        """Give back the fiber, the store and the values."""
        if self._stage is _Stage.ENDED:
            return
        self._stage = _Stage.ENDED
        self.deadline = None
        if self._pending is not None:
            self._pending.waiter = None
            self._pending = None
        if self._future is not None:
            _future_delete(self._future)
            self._future = None
        if self._error.value:
            cabi.take_error_message(self._error.value)
            self._error = c_void_p()
        cabi.delete(self._argument)
        cabi.delete(self._result)
        if self._store is not None:
            self._store.close()
            self._store = None

    # -- the state machine ------------------------------------------------------------------------------------------

    def _instantiate(self) -> None:
        store = wasmtime.Store(self._world.linker.engine)
        self._store = store
        store.set_limits(memory_size=self.limits.memory_bytes)
        wasi = wasmtime.WasiConfig()  # no files, no network, no environment, no arguments
        wasi.stdout_custom = self._write_raw
        wasi.stderr_custom = self._write_raw
        store.set_wasi(wasi)
        context = ctypes.cast(store._context(), c_void_p)
        self._context = context.value or 0
        _yield_at_epoch(context, 1)  # what it moves the deadline by does not matter: each poll sets it
        self._future = _instantiate_async(
            ctypes.cast(self._world.linker.ptr(), c_void_p),
            context,
            ctypes.cast(self._component.ptr(), c_void_p),
            addressof(self._instance),
            addressof(self._error),
        )
        self._stage = _Stage.INSTANTIATING

    def _advance(self) -> bool:
        """Poll the fiber; True when nothing is left to run. `_error` then holds why it failed, if it did."""
        if not self._resume():
            return False
        if self._stage is _Stage.INSTANTIATING and not self._error.value:
            self._call_run()
            if not self._resume():
                return False
        return True

    def _resume(self) -> bool:
        _set_deadline(self._context, self._ticks)
        if not self._poll_future(self._future):
            return False
        _future_delete(self._future)
        self._future = None
        return True

    def _call_run(self) -> None:
        assert self._store is not None
        function = Instance._from_raw(self._instance).get_func(self._store, "run")
        if function is None:
            raise ValueError("the component exports no `run`")
        self._function = function._func  # the future refers to it
        self._argument = cabi.new_string(self._request)
        self._future = _call_async(
            addressof(self._function),
            self._context,
            addressof(self._argument),
            1,
            addressof(self._result),
            1,
            addressof(self._error),
        )
        self._stage = _Stage.RUNNING

    # -- how it ended -----------------------------------------------------------------------------------------------

    def _exit(self, kind: ExitKind, message: str, result: str | None = None) -> GuestExit:
        return GuestExit(kind, result, message, self.cpu_ns / 1e9)

    def _outcome(self) -> GuestExit:
        if isinstance(self._fault, OutputLimitReached):
            return self._output_exit()
        if self._error.value:
            message = cabi.take_error_message(self._error.value)
            self._error = c_void_p()
            return self._trapped(message)
        ok, text = cabi.read_result_string(addressof(self._result))
        if not ok:
            memory = text.endswith("\nMemoryError")  # the language component's own report
            return self._exit(ExitKind.MEMORY if memory else ExitKind.FAILED, text)
        try:
            self.charge_output(text)
        except OutputLimitReached:
            return self._output_exit()
        return self._exit(ExitKind.RETURNED, "", text)

    def _output_exit(self) -> GuestExit:
        limit = size_text(self.limits.output_bytes)
        return self._exit(
            ExitKind.OUTPUT, f"the program sent, printed and returned more than {limit}, its output limit"
        )

    def _trapped(self, message: str) -> GuestExit:
        match self._fault:
            case None:
                return self._crashed(message)
            case PieError():  # of a function without an err string
                return self._exit(ExitKind.FAILED, str(self._fault))
            case SleepRefused() | cabi.TooLarge():
                return self._exit(ExitKind.FAILED, f"the program was stopped: {self._fault}")
            case fault:
                _log.error("a host function failed", exc_info=fault)
                return self._exit(ExitKind.HOST_FAULT, f"a host function failed: {type(fault).__name__}: {fault}")

    def _crashed(self, message: str) -> GuestExit:
        """What a trap means to the author; the interpreter's own last words go with it."""
        reason = message.rpartition("Caused by:")[2].strip()
        tail = self._crash_text.decode("utf-8", "replace")[-_CRASH_TAIL:].strip()
        words = f"\n{tail}" if tail else ""
        memory = size_text(self.limits.memory_bytes)
        if "call stack exhausted" in reason:
            kind, text = ExitKind.STACK, "the program's calls are nested too deeply for the sandbox's stack"
        elif "MemoryError" in tail or "out of memory" in tail.lower():
            kind, text = ExitKind.MEMORY, f"the program used more than {memory}, its memory limit"
        elif "too much data" in reason:
            kind, text = ExitKind.FAILED, "the program passed too much data to the host in one call"
        elif "exit status" in reason:
            kind, text = ExitKind.FAILED, "the program ended its own process, as os._exit does"
        else:
            kind, text = ExitKind.CRASHED, f"the program crashed the sandbox's interpreter ({reason})"
            words += f"\n  hint: the interpreter may crash when memory runs out; this program's limit is {memory}"
        return self._exit(kind, text + words)

    def _write_raw(self, data: bytes) -> int:
        """Output that bypasses the language's own streams: `os.write`, or an interpreter's last words."""
        self._crash_text = (self._crash_text + data)[-4 * _CRASH_TAIL :]
        try:
            text = data.decode("utf-8", "backslashreplace")
            self.charge_output(text)
            self.host.log(30, text)
        except BaseException as error:
            self.set_fault(error)
            return -5  # EIO: the guest's write fails
        return len(data)


class _PendingCall(cabi.Blocking):
    def __init__(self, guest: Guest, pending: Pending[Any]) -> None:
        self._guest = guest
        self._pending = pending

    def done(self) -> bool:
        return self._pending.woken

    def value(self) -> Any:
        return self._guest.unblock(self._pending)


def run_request(source: str, file: str, value: Any, limits: Limits) -> str:
    """The JSON argument of `run`."""
    memory_mib = limits.memory_bytes >> 20
    return json.dumps({"source": source, "file": file, "input": value, "memory_mib": memory_mib}, separators=(",", ":"))
