"""The thread that runs every guest: `pie-fibers`.

Its inbox is also its ready queue: whatever other threads want (a start, a wake-up, a kill) is posted there and done in
order. A guest that blocks costs nothing; one that keeps computing is preempted at the end of its slice and moved behind
the others.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable

import wasmtime

from pie_xla.errors import PieError
from pie_xla.process.wasm.guest import Guest, Poll
from pie_xla.process.wasm.limits import ExitKind, GuestExit
from pie_xla.process.wasm.slices import SliceTimer, new_timer

_log = logging.getLogger(__name__)

# Guests run on their own fibers' stacks; below 768 KiB here, a guest's deep recursion still kills the server.
_THREAD_STACK_BYTES = 16 << 20
_SLICE_SECONDS = 0.005
_SHORT_SLICE_SECONDS = 0.002  # of a guest that blocked before, while the GIL is held
_SHUTTING_DOWN = "the server is shutting down"
# A guest that used this many slices without blocking is computing, and `idle` no longer waits for it.
_SLICES_UNTIL_BUSY = 4
# Computing guests run when no other is ready, and at least this often.
_BUSY_TURN_SECONDS = 0.02


class FiberScheduler:
    """Runs guests on one thread.

    Args:
        on_quiescent: called on the scheduler's thread when the last guest that had something to do blocked or ended.
    """

    def __init__(
        self,
        engine: wasmtime.Engine,
        on_quiescent: Callable[[], None] | None = None,
        timer: SliceTimer | None = None,
    ) -> None:
        self._on_quiescent = on_quiescent
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._unhandled = 0  # posted and not yet done, the one being done included
        self._busy: deque[Guest] = deque()
        self._guests: set[Guest] = set()
        self._timers: list[tuple[float, int, Guest]] = []
        self._timer_ids = itertools.count()
        self._closing = False
        self._timer = timer or new_timer(engine)
        previous = threading.stack_size(_THREAD_STACK_BYTES)
        try:
            self._thread = threading.Thread(target=self._run, name="pie-fibers", daemon=True)
            self._thread.start()
        finally:
            threading.stack_size(previous)

    # -- from any thread --------------------------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """No guest is runnable, except those that have been computing for a while."""
        return self._unhandled == 0

    @property
    def guests(self) -> int:
        """How many guests live."""
        return len(self._guests)

    def post(self, work: Callable[[], None]) -> None:
        """Have `work` done on the scheduler's thread, after what was posted before."""
        with self._lock:
            self._put(work)

    def _put(self, work: Callable[[], None]) -> None:
        self._unhandled += 1
        self._inbox.put(work)

    def wake(self, guest: Guest) -> None:
        self.post(lambda: self._turn(guest))

    def start(self, guest: Guest) -> None:
        """Run a guest.

        Raises:
            PieError: the scheduler is closed.
        """
        with self._lock:  # what is put before the closing is known is still done, or ended
            if self._closing:
                raise PieError("the sandbox is closed; no program can start")
            self._put(lambda: self._start(guest))

    def kill(self, guest: Guest, reason: str) -> None:
        self.post(lambda: self._kill(guest, reason))

    def close(self) -> None:
        """Kill every guest and stop the thread; returns when it has stopped."""
        with self._lock:
            if not self._closing:
                self._closing = True
                self._put(lambda: None)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    # -- on the scheduler's thread ----------------------------------------------------------------------------------

    def arm_timer(self, guest: Guest, seconds: float) -> None:
        """Wake the guest's call after `seconds`. A guest has one blocked call, so it has one timer."""
        guest.deadline = time.monotonic() + seconds
        heapq.heappush(self._timers, (guest.deadline, next(self._timer_ids), guest))
        if len(self._timers) > 64 + 2 * len(self._guests):  # timers of calls that were woken in time
            self._timers = [timer for timer in self._timers if timer[2].deadline == timer[0]]
            heapq.heapify(self._timers)

    def _run(self) -> None:
        busy_turn = time.monotonic()
        while not self._closing:
            timeout = self._fire_timers()
            now = time.monotonic()
            if self._busy and (now - busy_turn >= _BUSY_TURN_SECONDS or self._inbox.empty()):
                self._turn(self._busy.popleft())
                busy_turn = time.monotonic()
                continue
            try:
                work = self._inbox.get(timeout=timeout)
            except queue.Empty:
                continue
            try:
                work()
            except Exception:
                _log.exception("the fiber scheduler failed at a piece of work")
            with self._lock:
                self._unhandled -= 1
                quiet = self._unhandled == 0
            if quiet:
                self._tell(self._on_quiescent)
        while not self._inbox.empty():  # starts that nobody will run
            self._inbox.get()()
        for guest in list(self._guests):
            self._kill(guest, _SHUTTING_DOWN)
        self._timer.close()

    def _fire_timers(self) -> float | None:
        """Wake what is due; the time until the next timer in seconds, or None."""
        while self._timers:
            deadline, _, guest = self._timers[0]
            if guest.deadline != deadline:
                heapq.heappop(self._timers)
                continue
            left = deadline - time.monotonic()
            if left > 0:
                return left
            heapq.heappop(self._timers)
            guest.time_out()
        return None

    def _start(self, guest: Guest) -> None:
        self._guests.add(guest)
        if self._closing:
            self._kill(guest, _SHUTTING_DOWN)
        self._turn(guest)

    def _turn(self, guest: Guest) -> None:
        if not guest.runnable:
            return
        # A guest that is known to compute runs without the GIL; the others are done before anybody misses it.
        short = self._timer.native and guest.started and guest.slices == 0
        self._timer.begin(_SHORT_SLICE_SECONDS if short else _SLICE_SECONDS)
        state, ended = guest.poll(self._timer.ticks, holding_gil=short)
        self._timer.end()
        match state:
            case Poll.BLOCKED:
                guest.slices = 0
            case Poll.PREEMPTED:
                guest.slices += 1
                if guest.slices < _SLICES_UNTIL_BUSY:
                    self.wake(guest)
                else:
                    self._busy.append(guest)
            case Poll.FINISHED:
                assert ended is not None
                self._finish(guest, ended)

    def _kill(self, guest: Guest, reason: str) -> None:
        if not guest.ended:
            self._finish(guest, guest.end(ExitKind.KILLED, reason))

    def _finish(self, guest: Guest, ended: GuestExit) -> None:
        self._guests.discard(guest)
        if guest in self._busy:
            self._busy.remove(guest)
        self._tell(lambda: guest.on_exit(ended))

    def _tell(self, listener: Callable[[], None] | None) -> None:
        if listener is None:
            return
        try:
            listener()
        except Exception:
            _log.exception("a listener of the fiber scheduler failed")
