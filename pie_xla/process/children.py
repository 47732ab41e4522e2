"""Calls with which a process starts others, talks with them, and ends them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from pie_xla.launch import SOURCE_LIMIT, Event, Failed, Listener, Logged, Returned, Sent
from pie_xla.process.limits import HostLimits
from pie_xla.process.requests import RequestError
from pie_xla.process.rooms import Answer, Request

MAX_FILE = 256  # characters of a program's name


class Child(Protocol):
    """`pie_xla.process.process.Process`."""

    def post(self, text: str) -> None: ...
    def kill(self, reason: str) -> None: ...


class Tree:
    """A launched program and all that descend from it; what they may be together.

    Args:
        limit: descendants that live at a time.
    """

    def __init__(self, limit: int) -> None:
        self._limit, self._alive = limit, 0
        self._lock = threading.Lock()

    def enter(self) -> None:
        """One more descendant.

        Raises:
            RequestError: the tree is full.
        """
        with self._lock:
            if self._alive >= self._limit:
                raise RequestError(
                    f"{self._alive} programs that descend from one launch run already, as many as may",
                    "await or kill some first",
                )
            self._alive += 1

    def leave(self) -> None:
        with self._lock:
            self._alive -= 1


@dataclass(frozen=True)
class Birth:
    """What a new child is made of. `admit` is asked before each text it sends and may refuse it."""

    source: str
    file: str
    input: Any
    seed: int | None
    tree: Tree
    depth: int
    admit: Callable[[str], None]


Start = Callable[[Birth, Listener], Child]


@dataclass
class Kin:
    """A child as its parent sees it. `end`: {"result"} or {"failed"}, None while it runs."""

    child: Child | None = None
    end: dict[str, Any] | None = None
    unread: deque[str] = field(default_factory=deque)
    unread_size: int = 0
    receives: deque[Answer] = field(default_factory=deque)
    waits: list[Answer] = field(default_factory=list)
    dropped: bool = False


class ChildCalls:
    """`process.spawn`, `process.send`, `process.kill`, `process.drop`; `process.receive` and `process.wait`.

    A child dies with its parent. What it sends waits here until the parent receives it; what it logs goes to the parent's log.

    Args:
        start: launches a child. log: the parent's log.
        tree: the parent's. depth: of the parent; 0 is what somebody outside has launched.
    """

    def __init__(
        self, start: Start, log: Callable[[int, str], None], limits: HostLimits, tree: Tree, depth: int
    ) -> None:
        self._start, self._log, self._limits, self._tree, self._depth = start, log, limits, tree, depth
        self._kin: dict[int, Kin] = {}
        self._named = 0
        self._closed = False
        self._lock = threading.RLock()
        self.calls: Mapping[str, Callable[[Request], Any]] = {
            "process.spawn": self._spawn,
            "process.send": self._send,
            "process.kill": self._kill,
            "process.drop": self._drop,
        }
        self.starts: Mapping[str, Callable[[Request, Answer], None]] = {
            "process.receive": self._receive,
            "process.wait": self._wait,
        }

    def close(self) -> None:
        with self._lock:
            self._closed = True
            kin, self._kin = list(self._kin.values()), {}
        for one in kin:
            if one.child is not None:
                one.child.kill("the program that started this one has ended")

    def _spawn(self, request: Request) -> int:
        source, file = request.get("source", str), request.get("file", str, "child.py")
        value = request.fields.get("input")
        request.read.add("input")
        seed = request.get("seed", int, None)
        request.done()
        if len(source.encode("utf-8", "replace")) > SOURCE_LIMIT:
            raise RequestError(f"a child's source has more than {SOURCE_LIMIT} bytes, the limit")
        if not 1 <= len(file) <= MAX_FILE:
            raise RequestError(f"a child's file name has 1 to {MAX_FILE} characters")
        if self._depth >= self._limits.depth:
            raise RequestError(f"this program is {self._depth} spawns below what was launched, as deep as may be")
        if len(self._kin) >= self._limits.child_handles:
            raise RequestError(
                f"this program holds {len(self._kin)} children, as many as may be",
                "let go of those whose results you have",
            )
        self._tree.enter()
        kin = Kin()
        try:
            kin.child = self._start(
                Birth(source, file, value, seed, self._tree, self._depth + 1, lambda text: self._admit(kin, text)),
                lambda event: self._heard(kin, event),
            )
        except BaseException:
            self._tree.leave()
            raise
        with self._lock:
            self._named += 1
            number = self._named
            closed = self._closed
            if not closed:
                self._kin[number] = kin
        if closed:
            kin.child.kill("the program that started this one has ended")
            raise RequestError("the process has ended")
        return number

    def _admit(self, kin: Kin, text: str) -> None:
        """On the child's thread."""
        limits = self._limits
        if len(kin.unread) >= limits.inbox or kin.unread_size + len(text) > limits.unread_bytes:
            raise RequestError(
                f"the parent has {len(kin.unread)} messages ({kin.unread_size} characters) of this program that it has not "
                f"received; the limits are {limits.inbox} and {limits.unread_bytes}"
            )

    def _heard(self, kin: Kin, event: Event) -> None:
        """On the child's thread."""
        match event:
            case Sent(text):
                with self._lock:
                    answer = kin.receives.popleft() if kin.receives else None
                    if answer is None and not kin.dropped:
                        kin.unread.append(text)
                        kin.unread_size += len(text)
                if answer is not None:
                    answer.value(text)
            case Logged(level, text):
                self._log(level, text)
            case Returned(value):
                self._ended(kin, {"result": value})
            case Failed(message):
                self._ended(kin, {"failed": message})

    def _ended(self, kin: Kin, end: dict[str, Any]) -> None:
        self._tree.leave()
        with self._lock:
            kin.end = end
            waits, kin.waits = kin.waits, []
            receives = list(kin.receives)
            kin.receives.clear()
            if kin.dropped:
                self._kin = {number: one for number, one in self._kin.items() if one is not kin}
            closed = self._closed
        if closed:
            return
        for answer in waits:
            answer.value(end)
        for answer in receives:
            answer.value(None)

    def _found(self, request: Request) -> Kin:
        number = request.get("process", int)
        found = self._kin.get(number)
        if found is None:
            raise RequestError(f"process {number} is not a child of this one")
        return found

    def _send(self, request: Request) -> None:
        kin, text = self._found(request), request.get("text", str)
        request.done()
        if kin.end is not None or kin.child is None:
            raise RequestError("the child has ended")
        kin.child.post(text)

    def _kill(self, request: Request) -> None:
        kin, reason = self._found(request), request.get("reason", str, "killed by the program that started it")
        request.done()
        if kin.child is not None:
            kin.child.kill(reason[:1000])

    def _drop(self, request: Request) -> None:
        """The parent cannot name it any more; it runs on until it, or the parent, ends."""
        kin = self._found(request)
        number = request.get("process", int)
        request.done()
        with self._lock:
            kin.dropped = True
            kin.unread.clear()
            kin.unread_size = 0
            if kin.end is not None:
                self._kin.pop(number, None)

    def _receive(self, request: Request, answer: Answer) -> None:
        kin = self._found(request)
        request.done()
        with self._lock:
            if not kin.unread and kin.end is None:
                kin.receives.append(answer)
                return
            text = kin.unread.popleft() if kin.unread else None
            kin.unread_size -= len(text or "")
        answer.value(text)

    def _wait(self, request: Request, answer: Answer) -> None:
        kin = self._found(request)
        request.done()
        with self._lock:
            if kin.end is None:
                kin.waits.append(answer)
                return
        answer.value(kin.end)
