"""Moves wasmtime's epoch on while guests run: a guest that passes its deadline yields."""

from __future__ import annotations

import threading
import time

import wasmtime

TICK_SECONDS = 0.005


class EpochTicker:
    """A thread that ticks while a guest runs or has just run, and sleeps otherwise."""

    def __init__(self, engine: wasmtime.Engine) -> None:
        self._engine = engine
        self._running = False
        self._used = False
        self._parked = False
        self._closed = False
        self._unpark = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pie-epoch", daemon=True)
        self._thread.start()

    def begin(self) -> None:
        """A guest is about to run. Two flags, unless the thread is parked."""
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
                time.sleep(TICK_SECONDS)
                self._engine.increment_epoch()
                if not (self._used or self._running):
                    break
