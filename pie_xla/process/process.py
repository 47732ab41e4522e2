"""A process: one running inferlet, from launch to the moment everything it held is given back."""

from __future__ import annotations

import enum
import json
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

from pie_xla.errors import PieError, UsageError
from pie_xla.eta.types import Program
from pie_xla.process.host import InferletHost, Language, ModelFacts, OpenClient, Sink
from pie_xla.process.limits import HostLimits
from pie_xla.process.native import NativeRunner
from pie_xla.process.requests import ProgramCache
from pie_xla.process.wasm.hostapi import HostApi

LOG_LINES = 1000


class Mode(enum.Enum):
    """Where an inferlet runs."""

    SANDBOX = "sandbox"  # WebAssembly, nothing but its host functions
    NATIVE = "native"  # this interpreter: trusted code


class State(enum.Enum):
    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    KILLED = "killed"


@dataclass(frozen=True)
class Ended:
    """How a program ended: its result as JSON text `{"result": ...}`, or why there is none."""

    result: str | None
    error: PieError | None
    killed: bool = False


class Running(Protocol):
    """A started program that can be killed, from any thread."""

    def kill(self, reason: str) -> None: ...


class SandboxRunner(Protocol):
    """Starts a program in the sandbox. `on_end` is called once, on any thread, when nothing of it runs any more."""

    def launch(self, request: str, host: HostApi, on_end: Callable[[Ended], None]) -> Running: ...
    def close(self) -> None: ...


class Engine(Protocol):
    def client(self, name: str, on_event: Callable[..., None]) -> Any: ...


class Quiet:
    """The sink of a process nobody listens to."""

    def sent(self, text: str) -> None:
        return None

    def logged(self, level: int, text: str) -> None:
        return None


class Process:
    """One inferlet. Its `done` future gives what `main` returned, or raises the `PieError` that ended it.

    Attributes:
        id: unique. name: the file's name. mode: where it runs. started: time.time() of the launch, seconds.
        logs: the last lines it logged, (level, text).
    """

    def __init__(self, name: str, mode: Mode, sink: Sink) -> None:
        self.id = uuid.uuid4().hex
        self.name, self.mode = name, mode
        self.state = State.RUNNING
        self.started = time.time()
        self.finished: float | None = None
        self.error: PieError | None = None
        self.done: Future[Any] = Future()
        self.logs: deque[tuple[int, str]] = deque(maxlen=LOG_LINES)
        self._sink = sink
        self._host: InferletHost | None = None
        self._running: Running | None = None
        self._kill_reason: str | None = None
        self._lock = threading.Lock()

    # Sink of its own host
    def sent(self, text: str) -> None:
        self._sink.sent(text)

    def logged(self, level: int, text: str) -> None:
        self.logs.append((level, text))
        self._sink.logged(level, text)

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

    def _attach(self, host: InferletHost, start: Callable[[], Running]) -> None:
        self._host = host
        running = start()
        with self._lock:
            self._running = running
            reason = self._kill_reason
        if reason is not None:
            running.kill(reason)

    def _end(self, ended: Ended) -> None:
        assert self._host is not None
        self._host.close()
        self.finished = time.time()
        self.error = ended.error
        if ended.error is None and ended.result is not None:
            self.state = State.FINISHED
            self.done.set_result(json.loads(ended.result)["result"])
        else:
            killed = ended.killed or self._kill_reason is not None
            self.state = State.KILLED if killed else State.FAILED
            self.done.set_exception(ended.error or PieError("the program ended without a result"))


class ProcessManager:
    """Launches processes on one engine and remembers those that run.

    Args:
        engine: gives every process a client.
        facts, language: what programs can ask about the model.
        parse: program text -> program (`EtaProgram.from_json`).
        sandbox: None when this installation has no sandbox; native processes still run.
    """

    def __init__(
        self,
        engine: Engine,
        facts: ModelFacts,
        language: Language,
        parse: Callable[[str], Program],
        sandbox: SandboxRunner | None = None,
        limits: HostLimits | None = None,
    ) -> None:
        self._engine, self._facts, self._language = engine, facts, language
        self._programs = ProgramCache(parse)
        self._sandbox = sandbox
        self._limits = limits or HostLimits()
        self._native: NativeRunner | None = None
        self._running: dict[str, Process] = {}
        self._lock = threading.Lock()
        self._closed = False

    @property
    def running(self) -> list[Process]:
        with self._lock:
            return list(self._running.values())

    def launch(
        self,
        source: str,
        input: Any = None,
        mode: Mode = Mode.SANDBOX,
        sink: Sink | None = None,
        file: str = "main.py",
    ) -> Process:
        """Start a program.

        Args:
            source: the file's text. input: what `main` gets; anything with a JSON form, {} when None.
            file: its name in tracebacks.
        Raises:
            UsageError: the input has no JSON form, or there is no sandbox.
        """
        value = {} if input is None else input
        try:
            request = json.dumps({"source": source, "file": file, "input": value}, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise UsageError(f"the input of {file} has no JSON form: {error}") from None
        process = Process(file, mode, sink or Quiet())
        with self._lock:
            if self._closed:
                raise PieError("the server is closing; no process can start")
            self._running[process.id] = process
        try:
            host = self._host(process)
            end = self._ender(process)
            process._attach(host, lambda: self._start(process, source, request, host, end))
        except BaseException:
            self._forget(process)
            raise
        return process

    def close(self) -> None:
        """Kill what runs, wait until all of it is given back, and stop the threads."""
        with self._lock:
            self._closed = True
        running = self.running
        for process in running:
            process.kill("the server is shutting down")
        for process in running:
            process.done.exception(timeout=30)
        if self._native is not None:
            self._native.close()
        if self._sandbox is not None:
            self._sandbox.close()

    def _host(self, process: Process) -> InferletHost:
        open_client: OpenClient = lambda on_event: self._engine.client(process.id, on_event)  # noqa: E731
        return InferletHost(open_client, self._facts, self._language, self._programs, process, self._limits)

    def _start(
        self, process: Process, source: str, request: str, host: InferletHost, end: Callable[[Ended], None]
    ) -> Running:
        match process.mode:
            case Mode.SANDBOX:
                if self._sandbox is None:
                    raise UsageError("this installation has no sandbox", "run trusted files with --native")
                return self._sandbox.launch(request, host, end)
            case Mode.NATIVE:
                with self._lock:
                    if self._native is None:
                        self._native = NativeRunner()
                # the same JSON round trip as in the sandbox: tuples become lists, keys strings
                value = json.loads(request)["input"]
                return self._native.launch(
                    source, process.name, value, process.id, host, lambda result, error: end(Ended(result, error))
                )

    def _ender(self, process: Process) -> Callable[[Ended], None]:
        def end(ended: Ended) -> None:
            self._forget(process)
            process._end(ended)

        return end

    def _forget(self, process: Process) -> None:
        with self._lock:
            self._running.pop(process.id, None)
