"""The real SDK in the real sandbox on the fake engine: the whole way but the model."""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_engine import FACTS, Bytes, FakeEngine, greedy

from pie_xla.errors import PieError
from pie_xla.eta.program import EtaProgram
from pie_xla.launch import Event, Launch, Logged, Returned, Sent
from pie_xla.process.process import ProcessManager
from pie_xla.process.wasm.sandbox import Sandbox

sys.path.insert(0, str(Path(__file__).parent.parent / "sdk"))

from test_passes import CONTRACT, HEAD, PROMPT, text_of


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pie-xla-tests"
    sandbox = Sandbox(cache)
    yield sandbox
    sandbox.close()


@pytest.fixture
def launch(engine: FakeEngine, sandbox: Sandbox) -> Callable[..., Any]:
    manager = ProcessManager(engine, FACTS, Bytes(), EtaProgram.from_json, sandbox)

    def launch(source: str, events: list[Event] | None = None, **value: Any) -> Any:
        hear = (lambda event: None) if events is None else events.append
        return manager.launch(Launch(textwrap.dedent(source), "main.py", value, seed=11), hear)

    return launch


def test_the_contract_runs_unmodified(launch: Callable[..., Any], engine: FakeEngine) -> None:
    assert launch(CONTRACT).done.result(60) == {"text": text_of(greedy(PROMPT, 8))}
    assert len({request.program for request in engine.clients[0].submits}) == 1
    assert engine.clients[0].released and engine.clients[0].closed


def test_many_at_once(launch: Callable[..., Any]) -> None:
    running = [launch(CONTRACT, prompt=f"p{i}", max_tokens=4) for i in range(16)]
    for i, process in enumerate(running):
        prompt = [1, *(byte + 3 for byte in f"p{i}".encode())]
        assert process.done.result(60) == {"text": text_of(greedy(prompt, 4))}


def test_streams_channels_samplers_and_awaits(launch: Callable[..., Any]) -> None:
    events: list[Event] = []
    source = (
        HEAD
        + """
import asyncio
async def main(input):
    ws, pipe = WorkingSet(), Pipeline()
    fwd = forward(input["prompt"], [ws])
    out = fwd.epilogue(sample.greedy())
    first = pipe.submit(fwd)
    fwd.embed(out)
    tokens = [await first]
    async for token in pipe.run_ahead(fwd, 4):
        tokens.append(token)
    session.send("sent ")
    print("printed")
    ch = Channel.of([1.5, float("-inf")])
    values = await asyncio.gather(ch.read(), asyncio.sleep(0.01, 5), ch.take())
    hot = forward([5], [ws], READ)
    hot.epilogue(sample.sampler(0.7, 20, 0.95, 0.01))
    draws = [await pipe.submit(hot) for _ in range(3)]
    try:
        pipe.submit(forward([1], [ws, ws.fork()]))
    except UsageError as error:
        refused = str(error)
    return {"tokens": tokens, "len": len(ws), "values": str(values), "draws": draws, "refused": refused, "args":
    session.args() == input}
"""
    )
    result = launch(source, events, prompt=PROMPT).done.result(60)
    assert result["tokens"] == greedy(PROMPT, 5) and result["len"] == len(PROMPT) + 4
    assert result["values"] == "[[1.5, -inf], 5, [1.5, -inf]]"
    assert result["refused"] == "the pass embeds 1 rows, but state gives 2 sets" and result["args"]
    assert all(0 <= draw < 300 for draw in result["draws"])
    assert events == [Sent("sent "), Logged(20, "printed\n"), Returned(result)]


def test_a_failed_pass_is_told_at_its_line(launch: Callable[..., Any], engine: FakeEngine) -> None:
    engine.fail.append("the logits are NaN")
    process = launch(CONTRACT)
    with pytest.raises(PieError) as failed:
        process.done.result(60)
    text = str(failed.value)
    assert "inferlet.PassError: the logits are NaN (pass submitted at main.py:18)" in text
    assert 'File "main.py", line 20, in main' in text and text.count("File ") == 1


def test_wrong_epilogues_are_told_at_their_line(launch: Callable[..., Any]) -> None:
    source = (
        HEAD
        + """
async def main(input):
    fwd = forward([5], [WorkingSet()])
    fwd.epilogue(lambda: intrinsics.output(0, "logits") + intrinsics.output(0, "hidden"))
"""
    )
    with pytest.raises(PieError) as failed:
        launch(source).done.result(60)
    assert 'File "main.py", line 14' in str(failed.value) and "add" in str(failed.value)
