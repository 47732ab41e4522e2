"""Native epilogues: the same program traced by JAX, and jnp code between the ops."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fake_engine import FACTS, Bytes, FakeEngine, greedy
from test_passes import CONTRACT, HEAD, PROMPT, text_of

from pie_xla.errors import PieError
from pie_xla.launch import Launch
from pie_xla.process.process import ProcessManager


def unused(text: str) -> Any:
    raise AssertionError("native programs are not text")


@pytest.fixture
def run(engine: FakeEngine) -> Iterator[Callable[..., Any]]:
    manager = ProcessManager(engine, FACTS, Bytes(), unused)

    def run(source: str, **value: Any) -> Any:
        launch = Launch(textwrap.dedent(source), "main.py", value, native=True, seed=11)
        return manager.launch(launch, lambda event: None).done.result(60)

    yield run
    manager.close()


def test_the_contract_runs_unmodified(run: Callable[..., Any], engine: FakeEngine) -> None:
    assert run(CONTRACT, max_tokens=3) == {"text": text_of(greedy(PROMPT, 3))}
    assert len({request.program.key for request in engine.clients[0].submits}) == 1


def test_jnp_code_with_captured_arrays(run: Callable[..., Any], engine: FakeEngine) -> None:
    result = run(
        HEAD
        + """
import jax.numpy as jnp
import numpy as np
async def main(input):
    ws, pipe = WorkingSet(), Pipeline()
    bias = np.zeros(300, np.float32)
    bias[77] = 1000.0
    def biased():
        logits = intrinsics.output(0, "logits")
        return jnp.argmax(logits + bias * param(1.0)).astype(jnp.int32), jnp.sort(logits)[-2:]
    fwd = forward([5], [ws])
    fwd.epilogue(biased)
    one, two = pipe.submit(fwd)
    return [await one, len(await two)]
"""
    )
    assert result == [77, 2]
    assert sorted(param.shape for param in engine.clients[0].submits[0].params) == [(), (300,)]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("jnp.dot(intrinsics.output(0, 'logits'), jnp.ones(7))", "main.py"),
        ("reduce_argmax(intrinsics.output(1, 'logits'))", "rows 0 to 0"),
        ("jax.debug.print('x')", "cannot call the host"),
        ("jnp.zeros(3, jnp.bfloat16)", "bfloat16"),
    ],
)
def test_wrong_epilogues_name_the_authors_line(run: Callable[..., Any], body: str, words: str) -> None:
    source = (
        HEAD
        + f"""
import jax
import jax.numpy as jnp
async def main(input):
    fwd = forward([5], [WorkingSet()])
    fwd.epilogue(lambda: {body})
"""
    )
    with pytest.raises(PieError) as failed:
        run(source)
    text = str(failed.value)
    assert words in text
    assert 'File "main.py", line 16' in text
    assert "site-packages" not in text and "pie_xla" not in text
