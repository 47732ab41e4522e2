"""Author programs on the fake engine, recorded as in the sandbox (program text, JSON requests) but without
WebAssembly.
"""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "process"))

from fake_engine import FACTS, Bytes, FakeEngine
from tiny_model import Tiny, open_tiny

from pie_xla.eta.program import EtaProgram
from pie_xla.launch import Launch
from pie_xla.process.native import NativeRunner, NativeTransport
from pie_xla.process.process import ProcessManager


class TextTransport(NativeTransport):
    """As `inferlet._guest.GuestTransport`: everything crosses as text."""

    def prepare(self, fixed: dict[str, Any]) -> Any:
        from inferlet._host import compact, finite_json

        return compact({**fixed, "params": finite_json(fixed["params"])})[1:]

    def submit(
        self, pipeline: int, rows: list[dict[str, Any]], prepared: Any, line: str, drop: list[int], times: int
    ) -> int:
        from inferlet._host import quoted

        head = f'{{"rows":{json.dumps(rows)},"line":{quoted(line)},"drop":{drop},"times":{times}'
        return self._call(self._host.submit, pipeline, f"{head},{prepared}")

    def trace(self, fn: Callable[[], Any], rows: tuple[int | None, ...], facts: Any, stages: Any = None) -> Any:
        from inferlet.eta._trace import record

        return record(fn, rows, facts, stages)


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    engine = FakeEngine()
    yield engine
    engine.close()


@pytest.fixture(scope="session")
def text_transport() -> type[TextTransport]:
    return TextTransport


@pytest.fixture
def manager(engine: FakeEngine) -> Iterator[ProcessManager]:
    manager = ProcessManager(engine, FACTS, Bytes(), EtaProgram.from_json)
    manager._native = NativeRunner(TextTransport)
    yield manager
    manager.close()


@pytest.fixture
def run(manager: ProcessManager) -> Callable[..., Any]:
    """Run a program to its end and give its result."""

    def run(source: str, listener: Any = lambda event: None, **value: Any) -> Any:
        launch = Launch(textwrap.dedent(source), "main.py", value, native=True, seed=11)
        return manager.launch(launch, listener).done.result(60)

    return run


@pytest.fixture(scope="module")
def tiny() -> Iterator[Tiny]:
    with open_tiny(TextTransport) as made:
        yield made
