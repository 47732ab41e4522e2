"""Layer stages as an author writes them, on a tiny model: recorded as text and natively."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "engine"))

from fake_engine import Bytes
from tiny import engine as tiny_engine
from tiny import load

from pie_xla.errors import PieError
from pie_xla.eta.program import EtaProgram
from pie_xla.launch import Launch
from pie_xla.process.interfaces import ModelFacts
from pie_xla.process.native import NativeRunner, NativeTransport
from pie_xla.process.process import ProcessManager

HEAD = """
from inferlet import model
from inferlet.eta import *

def forward(tokens, ws):
    fwd = ForwardPass()
    fwd.embed(tokens)
    fwd.state([ws], StateGeometry.folding())
    return fwd
pick = lambda: reduce_argmax(intrinsics.output(0, "logits"))
"""
OUTPUTS = {"logits": ((97,), "f32"), "hidden": ((32,), "f32")}
PROMPT = [5, 17, 80, 3, 3, 41]


@pytest.fixture(scope="module", params=["text", "native"])
def run(request: pytest.FixtureRequest, text_transport: Any) -> Iterator[Callable[..., Any]]:
    served = tiny_engine(load(), name="stages")
    facts = ModelFacts("tiny", 97, 256, 4, OUTPUTS, (2,), (1,), (2, 4, 8))
    manager = ProcessManager(served, facts, Bytes(), EtaProgram.from_json)
    manager._native = NativeRunner(text_transport if request.param == "text" else NativeTransport)

    def go(source: str, **value: Any) -> Any:
        launch = Launch(HEAD + textwrap.dedent(source), "main.py", value, native=True, seed=11)
        return manager.launch(launch, lambda event: None).done.result(100)

    yield go
    manager.close()
    served.close()


def test_scores_are_gathered_over_layers_and_passes(run: Callable[..., Any]) -> None:
    result = run(
        """
        async def main(input):
            width = 32
            ws, pipe, scores = WorkingSet(), Pipeline(), Channel(width, f32)
            scores.put([0.0] * width)
            fwd = forward(input["prompt"], ws)

            @fwd.on_attn
            def gather():
                scores.put(scores.take() + intrinsics.attn_scores() / model.attention().layers)

            fwd.on_attn(gather, width=width)
            out = fwd.epilogue(lambda: (pick(), reduce_sum(scores.read())))
            pipe.submit(fwd)
            seen = [await out[1]]
            tokens = [await out[0]]
            for _ in range(3):
                fwd.embed([tokens[-1]])
                pipe.submit(fwd)
                tokens.append(await out[0])
                seen.append(await out[1])
            return {"tokens": tokens, "sums": seen, "total": await scores.take(), "facts": model.attention().heads}
        """,
        prompt=PROMPT,
    )
    np.testing.assert_allclose(result["sums"], [1, 2, 3, 4], atol=1e-4)
    total = np.asarray(result["total"])
    assert total.shape == (32,) and (total[:9] > 0).all() and (total[9:] == 0).all() and result["facts"] == 4


def test_a_pass_with_stages_alone_and_pages_hidden_by_their_bounds(run: Callable[..., Any]) -> None:
    result = run(
        """
        async def main(input):
            ws, pipe, count = WorkingSet(), Pipeline(), Channel((), i32)
            fwd = forward(input["prompt"], ws)
            @fwd.prologue
            def start():
                count.put(0)
            def best():
                bounds = intrinsics.page_bounds()
                keep = bounds >= top_k(bounds, 2)[0][1]
                intrinsics.keep_pages(0, keep)
                count.put(count.take() + reduce_sum(keep.cast("i32")))
            fwd.on_attn_proj(best, width=24)
            pipe.submit(fwd)
            return [await count.take(), len(ws)]
        """,
        prompt=PROMPT * 3,
    )
    assert result == [2 * 2, 18]  # two pages in each of two layers


def test_a_prologue_needs_no_layer_stages(run: Callable[..., Any]) -> None:
    result = run(
        """
        async def main(input):
            ws, pipe, count, kept = WorkingSet(), Pipeline(), Channel.of(5), {}
            fwd = forward(input["prompt"], ws)
            @fwd.prologue
            def start():
                kept["before"] = count.take()
                count.put(kept["before"] * 2)
            out = fwd.epilogue(lambda: (pick(), kept["before"] + 1))
            tokens, seen = [], []
            for _ in range(2):
                pipe.submit(fwd)
                tokens.append(await out[0])
                seen.append(await out[1])
                fwd.embed([tokens[-1]])
            return [seen, await count.take()]
        """,
        prompt=PROMPT,
    )
    assert result == [[6, 11], 20]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("forward([1], ws).on_attn(3)", "on_attn takes a function"),
        ("forward([1], ws).on_attn(pick, width=300)", "width 300 is not a number of positions from 1 to 256"),
        ("fwd = forward([1], ws); fwd.on_attn(pick, width=8); fwd.on_attn_proj(pick, width=9)", "another stage of this pass said 8"),
        ("fwd = forward([1], ws); fwd.on_attn(pick); fwd.epilogue(pick)", "in the epilogue only, not in on_attn"),
        ("fwd = forward([1], ws); fwd.prologue(pick); fwd.epilogue(pick)", "in the epilogue only, not in prologue"),
        ("fwd = forward([1], ws); fwd.prologue(lambda: iota(3)); fwd.epilogue(pick)", "prologue gives back nothing"),
        ("fwd = forward([1], ws); fwd.epilogue(lambda: intrinsics.layer())", "in on_attn_proj and on_attn only"),
        ("fwd = forward([1] * 9, ws); fwd.on_attn(lambda: None, width=8); pipe.submit(fwd)", "the layer stages of this pass span 8"),
    ],
)  # fmt: skip
def test_misuse_is_named(run: Callable[..., Any], body: str, words: str) -> None:
    with pytest.raises(PieError) as failed:
        run(f"async def main(input):\n    ws, pipe = WorkingSet(), Pipeline()\n    {body}\n")
    assert words in str(failed.value), str(failed.value)
