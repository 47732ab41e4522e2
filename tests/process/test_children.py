"""Programs that start programs: results, messages, ends and quotas, natively and in the sandbox."""

from __future__ import annotations

import os
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_engine import FACTS, Bytes, FakeEngine

from pie_xla.errors import PieError
from pie_xla.eta.program import EtaProgram
from pie_xla.launch import Event, Launch, Logged
from pie_xla.process.limits import HostLimits
from pie_xla.process.process import ProcessManager
from pie_xla.process.wasm.sandbox import Sandbox

Start = Callable[..., Any]


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pie-xla-tests"
    sandbox = Sandbox(cache)
    yield sandbox
    sandbox.close()


@pytest.fixture(params=[True, False], ids=["native", "sandbox"])
def start(request: pytest.FixtureRequest, engine: FakeEngine) -> Iterator[Start]:
    native = request.param
    sandbox = None if native else request.getfixturevalue("sandbox")
    limits = HostLimits(descendants=4, depth=3, inbox=5)
    manager = ProcessManager(engine, FACTS, Bytes(), EtaProgram.from_json, sandbox, limits, processes=20)

    def start(source: str, value: Any = None, events: list[Event] | None = None) -> Any:
        hear = (lambda event: None) if events is None else events.append
        return manager.launch(Launch(textwrap.dedent(source), "main.py", value or {}, native), hear)

    start.manager = manager  # type: ignore[attr-defined]
    yield start
    for process in manager.running:
        process.kill("the test is over")
    if native:
        manager.close()


def gone(start: Any) -> None:
    deadline = time.monotonic() + 10
    while start.manager.running:
        assert time.monotonic() < deadline, start.manager.running
        time.sleep(0.01)


def test_a_child_returns_talks_and_logs(start: Start) -> None:
    events: list[Event] = []
    source = """
    from inferlet import process
    CHILD = '''
    from inferlet import session
    async def main(input):
        print("born")
        heard = await session.receive()
        session.send(heard.upper())
        session.send("bye")
        return {"twice": input * 2}
    '''
    import textwrap
    async def main(input):
        child = process.spawn(textwrap.dedent(CHILD), 21)
        child.send("hello")
        first = await child.receive()
        result = await child
        return [first, await child.receive(), await child.receive(), result, await child]
    """
    assert start(source, None, events).done.result(30) == ["HELLO", "bye", None, {"twice": 42}, {"twice": 42}]
    assert any(isinstance(event, Logged) and "born" in event.text for event in events)
    gone(start)


def test_a_child_that_fails_or_is_killed_says_why(start: Start) -> None:
    source = """
    from inferlet import process, ProcessError
    SLEEP = "import asyncio\\nasync def main(input): await asyncio.sleep(100)"
    async def main(input):
        said = []
        for text in ("async def main(input): raise ValueError('odd')", "nonsense(", SLEEP):
            child = process.spawn(text)
            if text is SLEEP:
                child.kill("enough")
            try:
                await child
            except ProcessError as error:
                said.append(str(error))
        return said
    """
    odd, nonsense, killed = start(source).done.result(30)
    assert "ValueError: odd" in odd and "child.py" in odd
    assert "SyntaxError" in nonsense
    assert "enough" in killed
    gone(start)


def test_children_die_with_their_parent(start: Start, engine: FakeEngine) -> None:
    source = """
    import asyncio
    from inferlet import process, session
    INNER = "import asyncio\\nfrom inferlet import session\\nasync def main(input):\\n session.send('up')\\n await asyncio.sleep(100)"
    OUTER = (
        "import asyncio\\nfrom inferlet import process, session\\nasync def main(input):\\n"
        f" c = process.spawn({INNER!r})\\n session.send(await c.receive())\\n await c"
    )
    async def main(input):
        child = process.spawn(OUTER)
        return await child.receive()
    """
    assert start(source).done.result(30) == "up"
    gone(start)
    assert len(engine.clients) == 3 and all(client.closed for client in engine.clients)


def test_a_fork_bomb_is_refused_by_name(start: Start) -> None:
    wide = """
    from inferlet import process, RefusedError
    SLEEP = "import asyncio\\nasync def main(input): await asyncio.sleep(100)"
    async def main(input):
        children = []
        try:
            while True:
                children.append(process.spawn(SLEEP))
        except RefusedError as error:
            return [len(children), str(error)]
    """
    count, words = start(wide).done.result(30)
    assert count == 4 and "4 programs that descend from one launch run already" in words
    gone(start)
    deep = """
    from inferlet import process, ProcessError
    async def main(source):
        return await process.spawn(source, source)
    """
    deep = textwrap.dedent(deep)
    with pytest.raises(PieError, match="3 spawns below what was launched"):
        start(deep, deep).done.result(30)
    gone(start)


def test_messages_are_bounded_in_both_directions(start: Start) -> None:
    source = """
    from inferlet import process, RefusedError
    DEAF = "import asyncio\\nasync def main(input): await asyncio.sleep(100)"
    CHATTY = '''
    from inferlet import session, RefusedError
    async def main(input):
        sent = 0
        try:
            while True:
                session.send("x")
                sent += 1
        except RefusedError as error:
            return [sent, str(error)]
    '''
    import textwrap
    async def main(input):
        deaf, sent = process.spawn(DEAF), 0
        try:
            while True:
                deaf.send("x")
                sent += 1
        except RefusedError as error:
            return [sent, str(error), *await process.spawn(textwrap.dedent(CHATTY))]
    """
    down, why_down, up, why_up = start(source).done.result(30)
    assert down == 5 and "has 5 messages it has not received" in why_down
    assert up == 5 and "the parent has 5 messages" in why_up
    gone(start)


def test_children_that_ended_and_are_let_go_of_free_their_places(start: Start) -> None:
    source = """
    from inferlet import process
    async def main(input):
        return sum([await process.spawn("async def main(input): return input", n) for n in range(300)])
    """
    assert start(source).done.result(60) == 300 * 299 // 2
    gone(start)


def test_a_receive_that_is_given_up_loses_no_message(start: Start) -> None:
    source = """
    import asyncio
    from inferlet import process
    CHILD = '''
    import asyncio
    from inferlet import session
    async def main(input):
        try:
            await asyncio.wait_for(session.receive(), 0.05)
        except asyncio.TimeoutError:
            pass
        session.receive()
        session.send("first")
        session.send("second")
        return [await session.receive(), await session.receive()]
    '''
    async def main(input):
        child = process.spawn(CHILD)
        try:
            await asyncio.wait_for(child.receive(), 0.01)
        except asyncio.TimeoutError:
            pass
        heard = [await child.receive(), await child.receive()]
        child.send("one")
        child.send("two")
        return [heard, await child, await child.receive()]
    """
    assert start(source).done.result(60) == [["first", "second"], ["one", "two"], None]
