"""The sandbox's front door: author's source in, a `GuestExit` out."""

from __future__ import annotations

import atexit
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pie_xla.errors import PieError, UsageError
from pie_xla.process.wasm.build import Sources
from pie_xla.process.wasm.cache import ensure_component
from pie_xla.process.wasm.engine_config import new_engine
from pie_xla.process.wasm.guest import Guest, run_request
from pie_xla.process.wasm.hostapi import HostApi
from pie_xla.process.wasm.limits import MIN_MEMORY_BYTES, GuestExit, Limits
from pie_xla.process.wasm.scheduler import FiberScheduler
from pie_xla.process.wasm.selftest import self_test
from pie_xla.process.wasm.world import World
from pie_xla.progress import Progress, Silent


class GuestHandle:
    """A started guest."""

    def __init__(self, scheduler: FiberScheduler, guest: Guest) -> None:
        self._scheduler = scheduler
        self._guest = guest

    def kill(self, reason: str = "the program was killed") -> None:
        """End it, whether it is blocked or spinning; from any thread.

        Its exit is KILLED with this reason, if it has not ended before.
        """
        self._scheduler.kill(self._guest, reason)


class Sandbox:
    """Runs many guests on one thread. Making one loads the language component, and builds it the first time (20 s).

    Args:
        cache_dir: where the compiled component is kept.
        on_quiescent: called on the sandbox's thread whenever no guest has anything to do any more.

    Raises:
        PieError: the component cannot be built, stored or run on this machine.
    """

    def __init__(
        self,
        cache_dir: Path,
        progress: Progress | None = None,
        *,
        sources: Sources | None = None,
        on_quiescent: Callable[[], None] | None = None,
    ) -> None:
        if sys.version_info >= (3, 14):
            raise PieError(
                "the sandbox does not run on Python 3.14 or later yet: its stack check does not know guests' stacks",
                "use Python 3.11 to 3.13, or run the file with --native",
            )
        engine = new_engine()
        self._world = World(engine)
        self._scheduler = FiberScheduler(engine, on_quiescent)
        try:
            self._component = ensure_component(
                engine,
                cache_dir,
                progress or Silent(),
                sources,
                verify=lambda component: self_test(self._scheduler, self._world, component),
            )
        except BaseException:
            self._scheduler.close()
            raise
        atexit.register(self.close)  # a thread inside wasm must be gone before the interpreter is

    def spawn(
        self,
        source: str,
        file: str,
        value: Any,
        host: HostApi,
        on_exit: Callable[[GuestExit], None],
        limits: Limits | None = None,
    ) -> GuestHandle:
        """Start a program; from any thread.

        Args:
            source: its text.
            file: the name that its tracebacks show.
            value: what `main` receives; anything with a JSON form.
            host: the process it belongs to, called on the sandbox's thread.
            on_exit: called once on the sandbox's thread, after everything the guest held is freed.

        Raises:
            UsageError: the memory limit is too small for any program. PieError: the sandbox is closed.
        """
        limits = limits or Limits()
        if limits.memory_bytes < MIN_MEMORY_BYTES:
            raise UsageError(
                f"a memory limit of {limits.memory_bytes >> 20} MiB is too small for the Python language component",
                f"give at least {MIN_MEMORY_BYTES >> 20} MiB",
            )
        request = run_request(source, file, value, limits)
        guest = Guest(self._world, self._component, request, host, limits, on_exit, self._scheduler)
        self._scheduler.start(guest)
        return GuestHandle(self._scheduler, guest)

    @property
    def idle(self) -> bool:
        """No guest is runnable, except those that have been computing for a while; from any thread."""
        return self._scheduler.idle

    @property
    def guests(self) -> int:
        """How many guests live."""
        return self._scheduler.guests

    def close(self) -> None:
        """Kill every guest and stop the thread."""
        atexit.unregister(self.close)
        self._scheduler.close()
