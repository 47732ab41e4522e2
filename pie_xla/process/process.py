"""A process: one running inferlet, from launch to the moment everything it held is given back."""

from __future__ import annotations

import enum
import json
import logging
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Protocol

from pie_xla.errors import PieError, UsageError
from pie_xla.eta.types import Program
from pie_xla.launch import Event, Failed, Launch, Listener, Logged, Returned, Sent
from pie_xla.process.children import Birth, ChildCalls, Tree
from pie_xla.process.host import InferletHost
from pie_xla.process.interfaces import HostModel, Language, ModelFacts
from pie_xla.process.limits import HostLimits
from pie_xla.process.native import NativeRunner
from pie_xla.process.requests import ProgramCache
from pie_xla.process.rooms import OpenRoom
from pie_xla.process.wasm.hostapi import HostApi
from pie_xla.process.wasm.limits import ExitKind, GuestExit, Limits

_log = logging.getLogger(__name__)
LOG_PIECES = 1000
CLOSE_SECONDS = 10.0
RESULT_HINT = "return dicts, lists, strings, finite numbers, booleans and None, and leave the json module as it is"


class Mode(enum.Enum):
    """Where an inferlet runs."""

    SANDBOX = "sandbox"  # WebAssembly, nothing but its host functions
    NATIVE = "native"  # this interpreter: trusted code


class State(enum.Enum):
    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    KILLED = "killed"


class Running(Protocol):
    """A started program that can be killed, from any thread."""

    def kill(self, reason: str) -> None: ...


class SandboxRunner(Protocol):
    """`pie_xla.process.wasm.sandbox.Sandbox`."""

    def spawn(
        self,
        source: str,
        file: str,
        value: Any,
        host: HostApi,
        on_exit: Callable[[GuestExit], None],
        limits: Limits | None = None,
    ) -> Running: ...
    def close(self) -> None: ...


class Engine(Protocol):
    def client(self, name: str, on_event: Callable[..., None]) -> Any: ...


class Process:
    """One inferlet. Its listener hears what it sends and logs, and last how it ended.

    Attributes:
        id: unique. name: the file's name. mode: where it runs. started, finished: time.time(), seconds.
        done: gives what `main` returned, or raises the `PieError` that ended it.
        logs: the last pieces it logged, (level, text).
    """

    def __init__(self, name: str, mode: Mode, listener: Listener, admit: Callable[[str], None] | None = None) -> None:
        self.id = uuid.uuid4().hex
        self.name, self.mode = name, mode
        self.state = State.RUNNING
        self.started = time.time()
        self.finished: float | None = None
        self.done: Future[Any] = Future()
        self.logs: deque[tuple[int, str]] = deque(maxlen=LOG_PIECES)
        self._listener, self._admit = listener, admit
        self._host: InferletHost | None = None
        self._running: Running | None = None
        self._kill_reason: str | None = None
        self._lock = threading.Lock()

    def sent(self, text: str) -> None:
        """Of its host: `session.send`; refused where whoever listens has too much unread."""
        if self._admit is not None:
            self._admit(text)
        self._tell(Sent(text))

    def logged(self, level: int, text: str) -> None:
        """Of its host: `session.log` and print."""
        self.logs.append((level, text))
        self._tell(Logged(level, text))

    def post(self, text: str) -> None:
        """Send it a message.

        Raises:
            PieError: it has ended, or has too many unread.
        """
        if self._host is None or self.done.done():
            raise PieError(f"process {self.name} has ended")
        self._host.post(text)

    def close_inbox(self) -> None:
        """No more messages: its waiting receives end with None."""
        if self._host is not None:
            self._host.close_inbox()

    def kill(self, reason: str) -> None:
        """End it now; what it has in flight is discarded. Killing twice, or after the end, does nothing."""
        with self._lock:
            if self.done.done() or self._kill_reason is not None:
                return
            self._kill_reason = reason
            running = self._running
        if running is not None:
            running.kill(reason)

    def attach(self, host: InferletHost, start: Callable[[], Running]) -> None:
        """Start it on its host; a kill that came before is made good."""
        self._host = host
        running = start()
        with self._lock:
            self._running = running
            reason = self._kill_reason
        if reason is not None:
            running.kill(reason)

    def end(self, result: str | None, error: PieError | None) -> None:
        """Nothing of it runs any more. `result`: JSON text {"result": ...}, which may be hostile, or None with the error."""
        assert self._host is not None
        try:
            self._host.close()
        except Exception:  # an engine that has failed; the launcher hears the end all the same
            _log.exception("process %s could not give everything back", self.name)
        self.finished = time.time()
        value: Any = None
        if error is None:
            try:
                value = returned(result)
            except PieError as refused:
                error = refused
        elif self._kill_reason is not None:
            error = PieError(self._kill_reason)
        if error is None:
            self.state = State.FINISHED
            self._tell(Returned(value))
            self.done.set_result(value)
            return
        self.state = State.FAILED if self._kill_reason is None else State.KILLED
        self._tell(Failed(str(error)))
        self.done.set_exception(error)

    def abandon(self, error: BaseException) -> None:
        """It never started; whoever launches it gets the error, so its listener hears nothing."""
        self.finished = time.time()
        self.state = State.FAILED
        if not self.done.done():
            self.done.set_exception(error)

    def _tell(self, event: Event) -> None:
        try:
            self._listener(event)
        except Exception:
            _log.exception("the listener of process %s failed", self.name)


def returned(text: str | None) -> Any:
    """The value in {"result": value}, the JSON text that a program's side of the sandbox hands over at its end.

    Raises:
        PieError: there is none, or it is no such text: the program has changed the `json` module it shares with the SDK.
    """
    if text is None:
        raise PieError("the program ended without a result")
    try:
        whole = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise PieError(f"what the program returned did not arrive as JSON: {error}", RESULT_HINT) from None
    if type(whole) is not dict or whole.keys() != {"result"}:
        raise PieError("what the program returned did not arrive as one result", RESULT_HINT)
    return whole["result"]


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")


class ProcessManager:
    """Launches processes on one engine and remembers those that run. Implements `pie_xla.launch.Service`.

    Args:
        engine: gives every process a client.
        facts, language: what programs can ask about the model.
        parse: program text -> program (`EtaProgram.from_json`).
        sandbox: None when there is none; native processes still run. It is closed with the manager.
        limits: of host calls. sandbox_limits: of memory, processor time and output in the sandbox.
        rooms: calls by name that every process gets.
        others: models beside the default one.
        messages: whether anybody outside can send messages to processes; if not, `session.receive` of a launched one gives
            None at once. A child always hears its parent.
        processes: how many may run at a time, children too; launches from outside are counted by the caller.
    """

    def __init__(
        self,
        engine: Engine,
        facts: ModelFacts,
        language: Language,
        parse: Callable[[str], Program],
        sandbox: SandboxRunner | None = None,
        limits: HostLimits | None = None,
        sandbox_limits: Limits | None = None,
        messages: bool = False,
        rooms: Sequence[OpenRoom] = (),
        others: Sequence[HostModel] = (),
        processes: int | None = None,
    ) -> None:
        self._processes = processes
        self._engine, self._facts, self._language = engine, facts, language
        self._programs = ProgramCache(parse)
        self._sandbox, self._sandbox_limits = sandbox, sandbox_limits
        self._limits = limits or HostLimits()
        self._messages, self._rooms, self._others = messages, tuple(rooms), tuple(others)
        self._native: NativeRunner | None = None
        self._running: dict[str, Process] = {}
        self._lock = threading.Lock()
        self._closed = False

    @property
    def running(self) -> list[Process]:
        """Processes that have not ended, oldest first."""
        with self._lock:
            return list(self._running.values())

    def launch(self, launch: Launch, listener: Listener) -> Process:
        """Start a program; `listener` hears its events in order, on the process's thread.

        Raises:
            UsageError: the input has no JSON form, or there is no sandbox. PieError: the server is closing.
        """
        return self._launch(launch, listener, None)

    def _spawn(self, parent: Launch, birth: Birth, listener: Listener) -> Process:
        """A child of what `parent` launched; it runs where its parent runs."""
        if self._processes is not None and len(self.running) >= self._processes:
            raise PieError(
                f"{self._processes} inferlets run already, as many as may",
                "wait for one to end; the operator's setting is limits.processes",
            )
        return self._launch(Launch(birth.source, birth.file, birth.input, parent.native, birth.seed), listener, birth)

    def _launch(self, launch: Launch, listener: Listener, birth: Birth | None) -> Process:
        try:
            # natively too: tuples become lists and keys strings, as in the sandbox
            value = json.loads(json.dumps(launch.input, allow_nan=False))
        except (TypeError, ValueError) as error:
            raise UsageError(f"the input of {launch.file} has no JSON form: {error}") from None
        if not launch.native and self._sandbox is None:
            raise UsageError("this server has no sandbox", "run trusted files with --native")
        process = Process(
            launch.file,
            Mode.NATIVE if launch.native else Mode.SANDBOX,
            listener,
            None if birth is None else birth.admit,
        )
        with self._lock:
            if self._closed:
                raise PieError("the server is closing; no process can start")
            self._running[process.id] = process
        host: InferletHost | None = None
        try:
            host = InferletHost(
                lambda on_event: self._engine.client(process.id, on_event),
                self._facts,
                self._language,
                self._programs,
                process,
                self._limits,
                launch.seed,
                (*self._rooms, partial(self._children, launch, birth)),
                self._others,
            )
            if birth is None and not self._messages:
                host.close_inbox()
            process.attach(host, partial(self._start, process, launch, value, host))
        except BaseException as error:
            self._forget(process)
            if host is not None:
                host.close()
            process.abandon(error)
            raise
        return process

    def _children(self, launch: Launch, birth: Birth | None, host: InferletHost) -> ChildCalls:
        tree = Tree(self._limits.descendants) if birth is None else birth.tree
        depth = 0 if birth is None else birth.depth
        return ChildCalls(partial(self._spawn, launch), host.log, self._limits, tree, depth)

    def close(self) -> None:
        """Kill what runs, wait until all of it is given back, and stop the threads."""
        with self._lock:
            self._closed = True
        running = self.running
        for process in running:
            process.kill("the server is shutting down")
        if self._sandbox is not None:
            self._sandbox.close()
        deadline = time.monotonic() + CLOSE_SECONDS
        for process in running:
            try:
                process.done.exception(timeout=max(0.0, deadline - time.monotonic()))
            except TimeoutError:
                _log.warning("process %s does not stop and is left behind", process.name)
        if self._native is not None:
            self._native.close()

    def _start(self, process: Process, launch: Launch, value: Any, host: InferletHost) -> Running:
        name = launch.file.replace("\\", "/").rpartition("/")[2]

        def end(result: str | None, error: PieError | None) -> None:
            self._forget(process)
            process.end(result, error)

        def exited(ended: GuestExit) -> None:
            end(ended.result, None if ended.kind is ExitKind.RETURNED else PieError(ended.message))

        if process.mode is Mode.SANDBOX:
            assert self._sandbox is not None
            return self._sandbox.spawn(launch.source, name, value, host, exited, self._sandbox_limits)
        with self._lock:
            if self._native is None:
                self._native = NativeRunner()
        return self._native.launch(launch.source, name, value, process.id, host, end)

    def _forget(self, process: Process) -> None:
        with self._lock:
            self._running.pop(process.id, None)
