"""Native processes end to end on the fake engine: results, streams, failures, and everything given back."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Iterator
from typing import Any

import pytest
from fake_engine import FACTS, Bytes, FakeEngine

from pie_xla.errors import PieError
from pie_xla.launch import Event, Failed, Launch, Logged, Returned, Sent
from pie_xla.process.native import NativeRunner, Stopped
from pie_xla.process.process import Process, ProcessManager, State


def no_programs(text: str) -> Any:
    raise AssertionError("a native program is never parsed")


@pytest.fixture
def manager(engine: FakeEngine) -> Iterator[ProcessManager]:
    manager = ProcessManager(engine, FACTS, Bytes(), no_programs)
    yield manager
    manager.close()


def start(manager: ProcessManager, source: str, value: Any = None) -> tuple[Process, list[Event]]:
    events: list[Event] = []
    launch = Launch(textwrap.dedent(source), "dir/main.py", {} if value is None else value, native=True)
    return manager.launch(launch, events.append), events


def test_returns_sends_logs_and_gives_back(manager: ProcessManager, engine: FakeEngine) -> None:
    process, events = start(
        manager,
        """
        from inferlet import session, model, chat
        async def main(input):
            session.send("hello ")
            print("printed", 1)
            session.log("careful", level="warning")
            return {"ids": model.encode("ab"), "prefix": chat.prefix(), "x": input["x"], "same": session.args() ==
            input}
        """,
        {"x": (1, 2)},
    )
    assert process.done.result(10) == {"ids": [100, 101], "prefix": [1], "x": [1, 2], "same": True}
    assert process.state is State.FINISHED
    assert events == [
        Sent("hello "),
        Logged(20, "printed 1\n"),
        Logged(30, "careful\n"),
        Returned({"ids": [100, 101], "prefix": [1], "x": [1, 2], "same": True}),
    ]
    assert engine.clients[0].closed and manager.running == []


def test_a_failure_names_only_the_authors_frames(manager: ProcessManager) -> None:
    process, events = start(
        manager,
        """
        from inferlet.eta import ForwardPass
        def helper():
            ForwardPass().embed([])
        async def main(input):
            helper()
        """,
    )
    with pytest.raises(PieError) as failed:
        process.done.result(10)
    text = str(failed.value)
    assert 'File "main.py", line 6, in main\n    helper()' in text
    assert 'File "main.py", line 4, in helper' in text
    assert text.count("File ") == 2
    assert "embed got no tokens" in text
    assert events == [Failed(text)] and process.state is State.FAILED


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("x = 1", "defines no `main`"),
        ("main = 3", "is a int, not a function"),
        ("async def main(): pass", "cannot be called with one argument"),
        ("import sys\nasync def main(input): sys.exit(3)", "main.py:2: the program called sys.exit(3)"),
        ("async def main(input): return {1, 2}", "no JSON form"),
        ("async def main(input): yield 1", "is a generator"),
        ("def main(input:", 'main.py", line 1'),
        (
            "from inferlet.eta import ForwardPass\nasync def main(input): ForwardPass().media([1])",
            "ForwardPass.media is not in",
        ),
    ],
)
def test_bad_programs(manager: ProcessManager, source: str, words: str) -> None:
    process, _ = start(manager, source)
    with pytest.raises(PieError) as failed:
        process.done.result(10)
    assert words in str(failed.value)


def test_kill_ends_a_waiting_program(manager: ProcessManager, engine: FakeEngine) -> None:
    process, events = start(manager, "import asyncio\nasync def main(input): await asyncio.sleep(100)")
    time.sleep(0.05)
    process.kill("interrupted")
    process.kill("again")
    with pytest.raises(PieError):
        process.done.result(10)
    assert events == [Failed("interrupted")] and process.state is State.KILLED
    assert engine.clients[0].closed


def test_tasks_of_an_ended_program_are_cancelled(manager: ProcessManager) -> None:
    process, events = start(
        manager,
        """
        import asyncio
        from inferlet import session
        async def other():
            await asyncio.sleep(0.05)
            session.send("too late")
        async def main(input):
            asyncio.create_task(other())
            return 1
        """,
    )
    assert process.done.result(10) == 1
    time.sleep(0.15)
    assert events == [Returned(1)]


def test_messages(engine: FakeEngine) -> None:
    manager = ProcessManager(engine, FACTS, Bytes(), no_programs, messages=True)
    process, _ = start(
        manager,
        """
        from inferlet import session
        async def main(input):
            return [await session.receive(), await session.receive(), await session.receive()]
        """,
    )
    process.post("one")
    process.post("two")
    process.close_inbox()
    assert process.done.result(10) == ["one", "two", None]
    manager.close()


def test_native_processes_do_not_share_modules(manager: ProcessManager) -> None:
    source = """
        import asyncio
        count = 0
        async def main(input):
            global count
            for _ in range(3):
                count += 1
                await asyncio.sleep(0.01)
            return count
        """
    processes = [start(manager, source)[0] for _ in range(4)]
    assert [process.done.result(10) for process in processes] == [3, 3, 3, 3]


def test_passes_without_an_epilogue(manager: ProcessManager, engine: FakeEngine) -> None:
    engine.fail.extend(["the first one broke"])
    process, _ = start(
        manager,
        """
        from inferlet import PassError
        from inferlet.eta import ForwardPass, Pipeline, StateGeometry, WorkingSet
        async def main(input):
            ws, pipe = WorkingSet(), Pipeline()
            lengths = []
            def prefill(tokens):
                fwd = ForwardPass()
                fwd.embed(tokens)
                fwd.state([ws], StateGeometry.folding())
                done = pipe.submit(fwd)
                lengths.append(len(ws))
                return done
            try:
                await prefill([5, 6, 7])
            except PassError as error:
                caught = [error.cause, error.line]
            lengths.append(len(ws))
            await prefill([5, 6])
            fork = ws.fork()
            ws.truncate(1)
            lengths += [len(ws), len(fork)]
            return {"lengths": lengths, "caught": caught}
        """,
    )
    assert process.done.result(10) == {"lengths": [3, 0, 2, 1, 2], "caught": ["the first one broke", "main.py:11"]}


@pytest.mark.parametrize(
    "body",
    [
        "while True: pass",
        "while True:\n        try: await asyncio.sleep(0.01)\n        except asyncio.CancelledError: pass",
    ],
)
def test_kill_ends_a_program_that_resists(manager: ProcessManager, body: str) -> None:
    process, events = start(manager, f"import asyncio\nasync def main(input):\n    {body}")
    other, _ = start(manager, "import asyncio\nasync def main(input):\n    await asyncio.sleep(0.01)\n    return 1")
    time.sleep(0.05)
    process.kill("enough")
    with pytest.raises(PieError):
        process.done.result(10)
    assert events == [Failed("enough")] and other.done.result(10) == 1


def test_a_huge_result_is_refused(manager: ProcessManager) -> None:
    process, _ = start(manager, "async def main(input): return 'x' * (9 << 20)")
    with pytest.raises(PieError, match="more than the limit"):
        process.done.result(10)


def test_an_interrupt_that_comes_between_two_tasks_ends_nothing(manager: ProcessManager) -> None:
    source = "async def main(input): return 1"
    assert start(manager, source)[0].done.result(10) == 1
    runner = manager._native
    assert runner is not None
    time.sleep(0.05)  # the loop waits for work
    runner.raise_in_thread(Stopped)
    assert start(manager, source)[0].done.result(10) == 1
    assert runner._thread.is_alive()


def test_a_program_that_cannot_start_fails(manager: ProcessManager) -> None:
    def transport(host: object) -> None:
        raise RuntimeError("no transport")

    manager._native = NativeRunner(transport)
    process, events = start(manager, "async def main(input): return 1")
    with pytest.raises(PieError, match=r"could not start the program.*no transport"):
        process.done.result(10)
    assert events == [Failed(str(process.done.exception()))]
