"""Native processes: the author's file in this interpreter, on one asyncio loop, over the same host object as in the
sandbox.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable
from contextvars import ContextVar, copy_context
from typing import Any, TypeVar

from pie_xla.errors import PieError
from pie_xla.process.author import AuthorError, AuthorModule
from pie_xla.process.host import InferletHost
from pie_xla.process.sdk import load_sdk

T = TypeVar("T")
_log = logging.getLogger(__name__)
OnExit = Callable[[str | None, PieError | None], None]
OWNER: ContextVar[NativeProcess | None] = ContextVar("pie_native_process", default=None)


# How long a killed program may keep the loop to itself before it is interrupted.
PATIENCE_SECONDS = 1.0


class Stopped(BaseException):
    """Raised inside a killed program that does not give the loop a turn."""


class NativeTransport:
    """`inferlet._host.Transport` straight onto an `InferletHost`; refusals become the SDK's `RefusedError`."""

    def __init__(self, host: InferletHost) -> None:
        from inferlet._errors import RefusedError

        self._host, self._refused = host, RefusedError

    def _call(self, fn: Callable[..., T], *args: Any) -> T:
        try:
            return fn(*args)
        except PieError as error:
            raise self._refused(str(error)) from None

    def facts(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self._host.facts())
        return found

    def new_set(self) -> int:
        return self._call(self._host.new_set)

    def fork_set(self, ws: int) -> int:
        return self._call(self._host.fork_set, ws)

    def truncate_set(self, ws: int, length: int) -> None:
        self._call(self._host.truncate_set, ws, length)

    def drop_set(self, ws: int) -> None:
        self._call(self._host.drop_set, ws)

    def new_pipeline(self, seed: int | None) -> int:
        return self._call(self._host.new_pipeline, seed)

    def close_pipeline(self, pipeline: int, cancel: bool) -> None:
        self._call(self._host.close_pipeline, pipeline, cancel)

    def new_channel(self, dtype: str, shape: tuple[int, ...], capacity: int) -> int:
        spec = json.dumps({"dtype": dtype, "shape": list(shape), "capacity": capacity})
        return self._call(self._host.new_channel, spec)

    def channel(self, channel: int, op: str, value: Any) -> int:
        return self._call(self._host.channel, channel, op, "" if value is None else json.dumps(value))

    def prepare(self, fixed: dict[str, Any]) -> dict[str, Any]:
        return fixed

    def submit(
        self, pipeline: int, rows: list[dict[str, Any]], prepared: Any, line: str, drop: list[int], times: int
    ) -> int:
        request = {**prepared, "rows": rows, "line": line, "drop": drop, "times": times}
        return self._call(self._host.submit_traced, pipeline, request)

    def send(self, text: str) -> None:
        self._call(self._host.send, text)

    def receive(self) -> int:
        return self._call(self._host.receive)

    def log(self, level: int, text: str) -> None:
        self._host.log(level, text)

    def encode(self, text: str, specials: bool) -> list[int]:
        return list(self._call(self._host.encode, text, specials))

    def decode(self, ids: list[int], skip_specials: bool) -> str:
        return self._call(self._host.decode, ids, skip_specials)

    def chat(self, request: dict[str, Any]) -> list[int]:
        return list(self._call(self._host.chat, json.dumps(request)))

    def call(self, name: str, request: dict[str, Any]) -> Any:
        return self._call(self._host.ask, name, request)

    def start(self, name: str, request: dict[str, Any]) -> int:
        return self._call(self._host.begin, name, request)

    def trace(self, fn: Callable[[], Any], rows: tuple[int | None, ...], facts: Any, stages: Any = None) -> Any:
        from pie_xla.process.native_trace import trace

        return trace(fn, rows, facts, stages)


class NativeProcess:
    """One running author file. `kill` may be called from any thread; `on_exit` is called once, on the loop's thread."""

    def __init__(
        self, runner: NativeRunner, host: InferletHost, module: AuthorModule, value: Any, on_exit: OnExit
    ) -> None:
        self._runner, self._host, self._module, self._value, self._on_exit = runner, host, module, value, on_exit
        self._tasks: weakref.WeakSet[asyncio.Task[Any]] = weakref.WeakSet()
        self._reason: str | None = None
        self._main: asyncio.Task[Any] | None = None
        self._runtime: Any = None
        self._ended = False
        self._guard = threading.Lock()  # no `Stopped` is sent to a process that has ended

    def start(self) -> None:
        """On the loop's thread."""
        from inferlet import _host

        def begin() -> None:
            self._runtime = _host.Runtime(self._runner.transport(self._host), self._value)
            _host.set_runtime(self._runtime)
            OWNER.set(self)
            self._main = self._runner.loop.create_task(self._run())

        self._host.listen(lambda: self._runner.ready(self))
        try:
            copy_context().run(begin)
        except Exception as failure:
            _log.exception("a native process could not start")
            self._finish(None, PieError(f"pie-xla could not start the program: {failure!r}"))

    def drain(self) -> None:
        """Hand finished tickets to the program; on the loop's thread."""
        if not self._ended and self._runtime is not None:
            self._runtime.deliver(self._host.collect())

    def kill(self, reason: str) -> None:
        self._runner.call(lambda: self._kill(reason))
        watch = threading.Timer(PATIENCE_SECONDS, self._interrupt)
        watch.daemon = True
        watch.start()

    def _kill(self, reason: str) -> None:
        if self._ended:
            return
        self._reason = self._reason or reason
        self._host.close()  # a program that catches the cancellation can do nothing more with the engine
        if self._main is not None:
            self._main.cancel()

    def _interrupt(self) -> None:
        """End a program that never gives the loop a turn, wherever its code is, or that catches its cancellation."""
        with self._guard:
            if not self._ended and asyncio.current_task(self._runner.loop) in self._tasks:
                self._runner.raise_in_thread(Stopped)
        self._runner.call(lambda: self._finish(None, PieError(f"the process was killed: {self._reason}")))

    async def _run(self) -> None:
        result: str | None = None
        error: PieError | None = None
        try:
            result = await self._module.run(self._value)
            if len(result) > self._host.output_bytes_left:
                raise AuthorError(f"`main` returned {len(result)} bytes of JSON, more than the limit on output leaves")
        except asyncio.CancelledError:
            error = PieError(
                f"the process was killed: {self._reason}" if self._reason else "the program cancelled its own main"
            )
        except AuthorError as failure:
            error = PieError(f"the process was killed: {self._reason}") if self._reason else failure
        except BaseException as failure:
            _log.exception("a native process failed outside its author's code")
            error = PieError(f"pie-xla failed while it ran the program: {failure!r}")
        self._finish(result, error)

    def _finish(self, result: str | None, error: PieError | None) -> None:
        if self._ended:
            return
        self._settle()
        try:
            for task in list(self._tasks):
                if task is not self._main:
                    task.cancel()
            self._module.forget()
        finally:
            self._tell_exit(result, error)

    def _settle(self) -> None:
        """Mark it as ended; then no `Stopped` is on its way to what follows."""
        while True:
            try:
                with self._guard:
                    self._ended = True
                self._runner.raise_in_thread(None)
                return
            except Stopped:
                continue

    def _tell_exit(self, result: str | None, error: PieError | None) -> None:
        try:
            self._on_exit(result, error)
        except Exception:
            _log.exception("the listener of a native process failed")

    def adopt(self, task: asyncio.Task[Any]) -> None:
        self._tasks.add(task)


class NativeRunner:
    """The thread `pie-native`: one asyncio loop for all native processes.

    Args:
        transport: what the SDK speaks to a host through.
    """

    def __init__(self, transport: Callable[[InferletHost], Any] = NativeTransport) -> None:
        load_sdk()
        self.transport = transport
        self.loop = asyncio.new_event_loop()
        self.loop.set_task_factory(make_task)
        self.loop.set_exception_handler(lambda loop, context: _log.debug("native loop: %s", context.get("message")))
        self._due: deque[NativeProcess] = deque()
        self._woken = False
        self._stopping = False
        self._thread = threading.Thread(target=self._work, name="pie-native", daemon=True)
        self._thread.start()

    def launch(
        self, source: str, file: str, value: Any, unique: str, host: InferletHost, on_exit: OnExit
    ) -> NativeProcess:
        """Start the author's file; from any thread."""
        process = NativeProcess(self, host, AuthorModule(source, file, unique, host.log), value, on_exit)
        self.call(process.start)
        return process

    def ready(self, process: NativeProcess) -> None:
        """A process has events to collect; from any thread. Many wake-ups cost one."""
        self._due.append(process)
        if not self._woken:
            self._woken = True
            self.call(self._drain)

    def call(self, work: Callable[[], None]) -> None:
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(work)

    def raise_in_thread(self, kind: type[BaseException] | None) -> None:
        """Raise an exception in whatever Python code the loop's thread is running; None takes back one on its way."""
        ident = self._thread.ident
        if ident is not None:
            what = None if kind is None else ctypes.py_object(kind)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), what)

    def close(self) -> None:
        """Stop the thread; processes that still run are killed by their manager first."""
        self._stopping = True
        self.call(self.loop.stop)
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=PATIENCE_SECONDS)

    def _drain(self) -> None:
        self._woken = False  # before the queue is emptied: what comes from now on wakes again
        due: dict[NativeProcess, None] = {}
        while self._due:
            due[self._due.popleft()] = None
        for process in due:
            process.drain()

    def _work(self) -> None:
        asyncio.set_event_loop(self.loop)
        while not self._stopping:
            try:
                self.loop.run_forever()
            except (SystemExit, KeyboardInterrupt, Stopped):
                continue  # asyncio lets the first two through from any author's task; Stopped may come a moment late
        self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        self.loop.close()


def make_task(loop: asyncio.AbstractEventLoop, coro: Any, **kwargs: Any) -> asyncio.Task[Any]:
    """A task that its process can find again when it ends."""
    task: asyncio.Task[Any] = asyncio.Task(coro, loop=loop, **kwargs)
    owner = OWNER.get()
    if owner is not None:
        owner.adopt(task)
    return task
