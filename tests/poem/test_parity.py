"""Each family against transformers (stored float32 references), however the tokens are cut into launches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from poem_cases import CASES, prompts
from poem_runner import Runner, load, lowered

from poem.lower import Loop

Case = tuple[list[np.ndarray[Any, Any]], list[np.ndarray[Any, Any]], list[str]]


SCANNED = (
    "llama",
    "qwen2_untied_window",
    "gemma3",
)  # one run, a run after a single layer, a period of three and a rest


def case(name: str) -> Case:
    """Prompts, reference logits, checkpoint tensor names."""
    with np.load(Path(__file__).parent / "reference" / f"{name}.npz") as saved:
        names = [str(line).split()[0] for line in saved["tensors"]]
        logits = [saved[f"logits_{i}"] for i in range(3)]
    return prompts(CASES[name]["vocab_size"]), logits, names


def close(got: np.ndarray[Any, Any], expected: np.ndarray[Any, Any]) -> None:
    """Within 2e-4 of the largest logit, and the same greedy ids."""
    assert got.shape == expected.shape
    assert np.abs(got - expected).max() <= 2e-4 * np.abs(expected).max()
    assert (got.argmax(-1) == expected.argmax(-1)).all()


@pytest.mark.parametrize("name", CASES)
def test_prompts_batched(name: str) -> None:
    """Three prompts of different lengths and a padding row in one launch."""
    ids, expected, names = case(name)
    model = lowered(CASES[name])
    runner = Runner(model, load(model, names), 3)
    got = runner.run(dict(enumerate(ids)), 48, 4)
    for i in range(3):
        close(got[i], expected[i])


@pytest.mark.parametrize(
    ("name", "loop"), [(n, Loop.UNROLLED) for n in CASES] + [(n, Loop.SCAN) for n in SCANNED], ids=str
)
def test_chunks_then_single_tokens(name: str, loop: Loop) -> None:
    """A long prompt in chunks of 7, then token by token beside a short prompt that starts late."""
    ids, expected, names = case(name)
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
