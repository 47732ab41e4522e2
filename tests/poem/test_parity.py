"""Each family against transformers (stored float32 references), however the tokens are cut into launches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from poem_cases import CASES, prompts
from poem_runner import Runner, load, lowered

from poem.lower import Loop

Case = tuple[str, list[np.ndarray[Any, Any]], list[np.ndarray[Any, Any]], list[str]]


@pytest.fixture(params=list(CASES))
def case(request: pytest.FixtureRequest) -> Case:
    """Name, prompts, reference logits, checkpoint tensor names."""
    with np.load(Path(__file__).parent / "reference" / f"{request.param}.npz") as saved:
        names = [str(line).split()[0] for line in saved["tensors"]]
        logits = [saved[f"logits_{i}"] for i in range(3)]
    return request.param, prompts(CASES[request.param]["vocab_size"]), logits, names


def close(got: np.ndarray[Any, Any], expected: np.ndarray[Any, Any]) -> None:
    """Within 2e-4 of the largest logit, and the same greedy ids."""
    assert got.shape == expected.shape
    assert np.abs(got - expected).max() <= 2e-4 * np.abs(expected).max()
    assert (got.argmax(-1) == expected.argmax(-1)).all()


def test_prompts_batched(case: Case) -> None:
    """Three prompts of different lengths and a padding row in one launch."""
    name, ids, expected, names = case
    model = lowered(CASES[name])
    runner = Runner(model, load(model, names), 3)
    got = runner.run(dict(enumerate(ids)), 48, 4)
    for i in range(3):
        close(got[i], expected[i])


@pytest.mark.parametrize("loop", Loop)
def test_chunks_then_single_tokens(case: Case, loop: Loop) -> None:
    """A long prompt in chunks of 7, then token by token beside a short prompt that starts late."""
    name, ids, expected, names = case
    model = lowered(CASES[name], loop)
    runner = Runner(model, load(model, names), 2)
    parts: dict[int, list[np.ndarray[Any, Any]]] = {0: [], 1: []}
    for at in range(0, 21, 7):
        parts[0].append(runner.run({0: ids[0][at : at + 7]}, 8, 2)[0])
    for t in range(21, 40):
        chunks = {0: ids[0][t : t + 1]}
        if t >= 23:
            chunks = {1: ids[1][t - 23 : t - 22], **chunks}
        for row, logits in runner.run(chunks, 1, 2).items():
            parts[row].append(logits)
    for row in (0, 1):
        close(np.concatenate(parts[row]), expected[row])
