"""An asyncio event loop that waits in one host call.

asyncio's own selectors need sockets, which the sandbox does not give. Here the loop's "selector" is `session.wait`: it
blocks the guest until a ticket of the host has an event or the loop's next timer is due.
"""

from __future__ import annotations

import asyncio
import asyncio.base_events
import asyncio.events
import inspect
import json
import time
from collections.abc import Callable
from typing import Any

from inferlet import _host
from wit_world.imports import session

_MAX_MS = 0x7FFF_FFFF
# While callbacks are ready the loop asks the host for events only now and then: the call is dearer than most callbacks.
_ASK_EVERY = 8


class _HostSelector:
    """Stands where `BaseEventLoop` expects a selector; its events are the host's `[ticket, 0|1, value]` entries."""

    def __init__(self, loop: HostEventLoop) -> None:
        self._loop = loop
        self._skipped = 0

    def select(self, timeout: float | None = None) -> list[Any]:
        waiting = _host.outstanding()
        if timeout is not None and timeout <= 0:
            self._skipped += 1
            if not waiting or self._skipped < _ASK_EVERY:
                return []
        elif timeout is None and not waiting:
            raise DeadlockError(
                "every task waits for what nothing in this program can bring about: no pass, message or timer is "
                f"outstanding{_waiting(self._loop)}"
            )
        self._skipped = 0
        return json.loads(session.wait(None if timeout is None else _milliseconds(timeout)))

    def close(self) -> None:
        return None


def _milliseconds(seconds: float) -> int:
    return min(max(0, int(seconds * 1000 + 0.999)), _MAX_MS)


class DeadlockError(RuntimeError):
    """The program can never go on."""

    __module__ = "builtins"  # its report is for the author, who knows nothing of this module


def _waiting(loop: asyncio.AbstractEventLoop) -> str:
    """Where each task is waiting, one line for each."""
    places = []
    for task in asyncio.all_tasks(loop):
        coroutine: Any = task.get_coro()
        chain = []
        while coroutine is not None and inspect.iscoroutine(coroutine) and coroutine.cr_frame is not None:
            if not coroutine.cr_code.co_filename.startswith("/python/"):  # the standard library
                chain.append(
                    f"{coroutine.cr_code.co_filename}:{coroutine.cr_frame.f_lineno} in {coroutine.cr_code.co_name}"
                )
            coroutine = coroutine.cr_await
        if chain:
            places.append("\n  waiting: " + " > ".join(chain))
    return "".join(sorted(places)[:20])


class HostEventLoop(asyncio.base_events.BaseEventLoop):
    """The loop of `asyncio.run`: gather, TaskGroup, Queue, wait_for and sleep work; sockets and subprocesses do not."""

    def __init__(self) -> None:
        super().__init__()
        self._selector = _HostSelector(self)

    def _process_events(self, event_list: list[Any]) -> None:
        if event_list:
            _host.deliver(event_list)

    def _write_to_self(self) -> None:
        return None  # one thread: nobody else can wake this loop

    def call_soon_threadsafe(self, callback: Callable[..., object], *args: Any, context: Any = None) -> Any:
        return self.call_soon(callback, *args, context=context)

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> Any:
        # There are no threads: the function runs here and now, so `asyncio.to_thread` works and overlaps nothing.
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future


def sleep(seconds: float) -> None:
    """`time.sleep` on the host's clock: blocks this inferlet only."""
    if seconds < 0:
        raise ValueError("sleep length must be non-negative")
    left = float(seconds)
    while left > _MAX_MS / 1000:
        session.sleep_ms(_MAX_MS)
        left -= _MAX_MS / 1000
    session.sleep_ms(_milliseconds(left))


def install() -> None:
    asyncio.new_event_loop = asyncio.events.new_event_loop = HostEventLoop  # type: ignore[assignment]
    time.sleep = sleep
