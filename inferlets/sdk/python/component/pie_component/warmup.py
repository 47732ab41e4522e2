"""Run a program while the component is built, on a host that is made up.

CPython rewrites code as it runs (it counts, then specializes), fills caches and makes objects late. What has happened when the
snapshot is taken is shared by all guests; what has not, each of them pays for in time and in pages of its own.
"""

from __future__ import annotations

import collections
import json
import linecache
import sys
from typing import Any

from inferlet import _host, _warm
from wit_world.imports import engine, host, model, session

from pie_component import author, stdio

_FACTS = {
    "world": "",  # filled in
    "name": "warm",
    "vocab_size": 1 << 16,
    "max_context": 1 << 20,
    "page_size": 16,
    "outputs": {"logits": [[1 << 16], "f32"], "hidden": [[64], "f32"]},
    "stop_tokens": [2],
    "prefix": [1],
    "seed": 1,
    "models": {},
}


class _Host:
    """Answers every call at once."""

    def __init__(self) -> None:
        self._handles = 0
        self._ticket = 0
        self._events: collections.deque[tuple[int, int, Any]] = collections.deque()

    def handle(self, *_: Any) -> int:
        self._handles += 1
        return self._handles

    def nothing(self, *_: Any) -> None:
        return None

    def channel(self, _handle: int, op: str, _value: str) -> int:
        return self._later([7]) if op in ("take", "read") else 0

    def submit(self, _pipe: int, request: str) -> int:
        times = int(json.loads(request)["times"])
        first = self._ticket + 2
        for _ in range(times):
            self._later([5])
        return first

    def _later(self, value: Any) -> int:
        self._ticket += 2
        self._events.append((self._ticket, 0, value))
        return self._ticket

    def wait(self, _timeout: int | None) -> str:
        return json.dumps([self._events.popleft()] if self._events else [])

    def facts(self) -> str:
        return json.dumps({**_FACTS, "world": _host.world})


def run(times: int = 3) -> None:
    """Warm up; afterwards nothing of it is left but what CPython has learnt."""
    said = _Host()
    fakes: dict[Any, dict[str, Any]] = {
        engine: {
            "facts": said.facts,
            "new_set": said.handle,
            "fork_set": said.handle,
            "truncate_set": said.nothing,
            "drop_set": said.nothing,
            "new_pipeline": said.handle,
            "close_pipeline": said.nothing,
            "new_channel": said.handle,
            "channel": said.channel,
            "submit": said.submit,
        },
        session: {"wait": said.wait, "send": said.nothing, "log": said.nothing, "sleep_ms": said.nothing},
        model: {"encode": lambda text, specials: [3, 4], "decode": lambda ids, skip: "warm", "chat": lambda text: [3]},
        host: {"call": lambda name, request: "null", "start": said.nothing},
    }
    real = {module: {name: getattr(module, name) for name in made} for module, made in fakes.items()}
    streams = sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__
    try:
        for module, made in fakes.items():
            for name, fake in made.items():
                setattr(module, name, fake)
        for _ in range(times):
            stdio.install()
            author.run({"source": _warm.PROGRAM, "file": "warm.py", "input": None})
            stdio.flush()
            stdio.uninstall()
            _host.forget()
    finally:
        for module, kept in real.items():
            for name, function in kept.items():
                setattr(module, name, function)
        sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__ = streams
        sys.modules.pop("main", None)
        linecache.cache.pop("warm.py", None)
