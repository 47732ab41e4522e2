"""What launching refuses, what closing ends, and whose `inferlet` a native program gets."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
from fake_engine import FACTS, Bytes, FakeClient, FakeEngine

from pie_xla.errors import PieError, UsageError
from pie_xla.launch import Event, Failed, Launch, Returned
from pie_xla.process.process import ProcessManager, State
from pie_xla.process.sdk import load_sdk, sdk_folder
from pie_xla.process.wasm.engine_config import new_engine
from pie_xla.process.wasm.limits import ExitKind, GuestExit
from pie_xla.process.wasm.scheduler import FiberScheduler


@pytest.fixture
def manager(engine: FakeEngine) -> ProcessManager:
    return ProcessManager(engine, FACTS, Bytes(), lambda text: None)  # type: ignore[arg-type,return-value]


def launch(source: str, value: Any = None, native: bool = True) -> Launch:
    return Launch(source, "main.py", {} if value is None else value, native)


def test_refusals(manager: ProcessManager) -> None:
    with pytest.raises(UsageError, match="no sandbox"):
        manager.launch(launch("", native=False), print)
    with pytest.raises(UsageError, match="has no JSON form"):
        manager.launch(launch("", {"x": {1}}), print)
    with pytest.raises(UsageError, match="has no JSON form"):
        manager.launch(launch("", {"x": float("nan")}), print)
    assert manager.running == []
    manager.close()
    with pytest.raises(PieError, match="closing"):
        manager.launch(launch(""), print)


def test_an_engine_that_refuses_leaves_nothing_behind(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    manager = ProcessManager(engine, FACTS, Bytes(), lambda text: None)  # type: ignore[arg-type,return-value]

    def refuse(name: str, on_event: Any) -> None:
        raise PieError("the engine is down")

    monkeypatch.setattr(engine, "client", refuse)
    with pytest.raises(PieError, match="the engine is down"):
        manager.launch(launch("async def main(input): pass"), print)
    assert manager.running == []
    manager.close()


def test_a_launch_that_cannot_start_leaves_nothing_behind(engine: FakeEngine) -> None:
    class Refusing:
        def spawn(self, *ignored: Any) -> Any:
            raise PieError("the sandbox is closed")

        def close(self) -> None:
            pass

    manager = ProcessManager(engine, FACTS, Bytes(), lambda text: None, Refusing())  # type: ignore[arg-type,return-value]
    heard: list[Event] = []
    with pytest.raises(PieError, match="the sandbox is closed"):
        manager.launch(launch("async def main(input): pass", native=False), heard.append)
    assert engine.clients[0].closed and manager.running == [] and heard == []
    manager.close()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "ended without a result"),
        ("", "did not arrive as JSON"),
        ('{"result": NaN}', "NaN is no JSON number"),
        ("[" * 100_000, "did not arrive as JSON"),
        ("[1]", "did not arrive as one result"),
        ('{"value": 1}', "did not arrive as one result"),
        ('{"result": 1, "more": 2}', "did not arrive as one result"),
    ],
)
def test_a_result_that_is_no_result_is_a_failure(engine: FakeEngine, text: str | None, words: str) -> None:
    class Liar:
        """A sandbox whose program has rebound `json.dumps`."""

        def spawn(self, source: str, file: str, value: Any, host: Any, on_exit: Any, limits: Any) -> Any:
            on_exit(GuestExit(ExitKind.RETURNED, text, "", 0.0))
            return self

        def kill(self, reason: str) -> None: ...
        def close(self) -> None: ...

    manager = ProcessManager(engine, FACTS, Bytes(), lambda text: None, Liar())  # type: ignore[arg-type,return-value]
    heard: list[Event] = []
    process = manager.launch(launch("", native=False), heard.append)
    with pytest.raises(PieError, match=words):
        process.done.result(10)
    assert heard == [Failed(str(process.done.exception()))] and process.state is State.FAILED
    assert engine.clients[0].closed and manager.running == []


def test_the_end_is_told_though_the_engine_takes_nothing_back(
    manager: ProcessManager, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(client: FakeClient) -> None:
        raise PieError("the engine has stopped")

    monkeypatch.setattr(FakeClient, "close", refuse)
    heard: list[Event] = []
    process = manager.launch(launch("async def main(input): return 3"), heard.append)
    assert process.done.result(10) == 3 and heard == [Returned(3)]
    manager.close()


def test_closing_ends_what_runs(manager: ProcessManager, engine: FakeEngine) -> None:
    heard: list[list[Event]] = [[], []]
    source = "import asyncio\nasync def main(input): await asyncio.sleep(100)"
    processes = [manager.launch(launch(source), events.append) for events in heard]
    assert manager.running == processes
    manager.close()
    assert heard == [[Failed("the server is shutting down")]] * 2
    assert [process.state for process in processes] == [State.KILLED] * 2
    assert all(client.closed for client in engine.clients) and manager.running == []


def test_a_listener_that_fails_harms_nobody(manager: ProcessManager) -> None:
    def listen(event: Event) -> None:
        raise RuntimeError("deaf")

    process = manager.launch(launch("async def main(input): return 3"), listen)
    assert process.done.result(10) == 3
    manager.close()


def test_another_inferlet_package_never_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    before = list(sys.path)  # other rooms' tests put the SDK there
    ours = load_sdk()
    assert load_sdk() is ours and ours.__file__ == str(sdk_folder() / "inferlet" / "__init__.py")
    assert sys.path == before
    foreign = types.ModuleType("inferlet")
    foreign.__file__ = "/somewhere/site-packages/inferlet/__init__.py"
    monkeypatch.setitem(sys.modules, "inferlet", foreign)
    with pytest.raises(PieError, match="another package named inferlet is already imported, from /somewhere"):
        load_sdk()


def test_a_closed_scheduler_takes_no_guest() -> None:
    scheduler = FiberScheduler(new_engine())
    scheduler.close()
    guest: Any = None
    with pytest.raises(PieError, match="the sandbox is closed"):
        scheduler.start(guest)
