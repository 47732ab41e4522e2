"""End a guest's slice: move wasmtime's epoch on a while after the guest began to run, and it yields.

Where the C library can call a function from a timer, it calls wasmtime's own, and no Python code is in the way: a guest
can then run while its thread holds the GIL. Otherwise other Python threads that are busy (tracing a program, say) take
the GIL at each host call of each guest, and give it back 5 ms later: 600 ms instead of 30 for a step of 100 guests.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from typing import Protocol

import wasmtime
from wasmtime import _ffi as ffi

_SIGEV_THREAD = 2
_CLOCK_MONOTONIC = 1


class SliceTimer(Protocol):
    @property
    def native(self) -> bool:
        """It needs no GIL."""

    @property
    def ticks(self) -> int:
        """How many steps of the epoch end a slice."""

    def begin(self, seconds: float) -> None:
        """A guest is about to run; its slice ends after about `seconds`."""

    def end(self) -> None:
        """It has stopped."""

    def close(self) -> None: ...


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _Itimerspec(ctypes.Structure):
    _fields_ = (("interval", _Timespec), ("value", _Timespec))


class _Sigevent(ctypes.Structure):
    _fields_ = (
        ("value", ctypes.c_void_p),
        ("signal", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("function", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("padding", ctypes.c_char * 64),
    )


# A notification may still be on its way when its timer is deleted: the engines it names stay.
_engines: list[wasmtime.Engine] = []


class NativeTimer:
    """A POSIX timer that is armed while a guest runs; it fires only when one overruns.

    It fires again and again: a single shot would be lost when it comes before the guest's deadline is set, or when the
    system has no thread for it, and the guest would run for ever.

    Raises:
        OSError, AttributeError: the system has no such timers.
    """

    native = True
    ticks = 1

    def __init__(self, engine: wasmtime.Engine) -> None:
        library = ctypes.CDLL(None, use_errno=True)
        self._set = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)(
            ("timer_settime", library)
        )
        self._delete = library.timer_delete
        increment = ctypes.cast(ffi.dll.wasmtime_engine_increment_epoch, ctypes.c_void_p).value
        event = _Sigevent(ctypes.cast(engine.ptr(), ctypes.c_void_p).value, 0, _SIGEV_THREAD, increment, None)
        timer = ctypes.c_void_p()
        if library.timer_create(_CLOCK_MONOTONIC, ctypes.byref(event), ctypes.byref(timer)):
            raise OSError(ctypes.get_errno(), "timer_create")
        _engines.append(engine)
        self._timer = timer.value
        self._off = _Itimerspec(_Timespec(0, 0), _Timespec(0, 0))
        self._shots: dict[float, _Itimerspec] = {}

    def begin(self, seconds: float) -> None:
        shot = self._shots.get(seconds)
        if shot is None:
            period = _Timespec(0, int(seconds * 1e9))
            shot = self._shots[seconds] = _Itimerspec(period, period)
        self._set(self._timer, 0, ctypes.addressof(shot), None)

    def end(self) -> None:
        self._set(self._timer, 0, ctypes.addressof(self._off), None)

    def close(self) -> None:
        self._delete(ctypes.c_void_p(self._timer))


class ThreadTimer:
    """A Python thread that ticks while a guest runs or has just run, and sleeps otherwise."""

    native = False
    ticks = 2  # a guest may begin just before a tick
    _TICK_SECONDS = 0.005

    def __init__(self, engine: wasmtime.Engine) -> None:
        self._engine = engine
        self._running = False
        self._used = False
        self._parked = False
        self._closed = False
        self._unpark = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pie-epoch", daemon=True)
        self._thread.start()

    def begin(self, seconds: float) -> None:
        self._running = True
        self._used = True
        if self._parked:
            self._unpark.set()

    def end(self) -> None:
        self._running = False

    def close(self) -> None:
        self._closed = True
        self._unpark.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closed:
            self._parked = True
            # No start is missed: the flag goes up, then `_used` is read; `begin` sets `_used`, then reads the flag.
            if not self._used:
                self._unpark.wait()
            self._parked = False
            self._unpark.clear()
            while not self._closed:
                self._used = False
                time.sleep(self._TICK_SECONDS)
                self._engine.increment_epoch()
                if not (self._used or self._running):
                    break


def new_timer(engine: wasmtime.Engine) -> SliceTimer:
    """The best this system has."""
    if os.name == "posix":
        try:
            return NativeTimer(engine)
        except (OSError, AttributeError):
            pass
    return ThreadTimer(engine)
