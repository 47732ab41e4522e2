"""Imported weights, tokenizer and template together: greedy ids and first logits equal transformers' (float32)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pie_xla.hub import ModelEntry
from pie_xla.hub.chat import Chat
from pie_xla.hub.load import load_params
from pie_xla.hub.tokenizer import Tokenizer
from pie_xla.kernels.ops import Kernel, ops_for
from poem.lower import Loop, LoweredModel, lower
from poem.spec import Batch

WIDTH, PAGE = 96, 16


def test_smollm2(smollm2: ModelEntry) -> None:
    check(smollm2, 2)


@pytest.mark.slow
def test_gemma3(gemma3: ModelEntry) -> None:
    check(gemma3, 1)


def check(entry: ModelEntry, count: int) -> None:
    """The reference continuation, teacher-forced in one pass: each of its ids is the largest logit before it."""
    text = Path(__file__).with_name("reference_logits.json").read_text(encoding="utf-8")
    cases: list[dict[str, Any]] = json.loads(text)["models"][entry.name]
    assert len(cases) == count
    tokenizer = Tokenizer(entry)
    model = lower(
        entry.config | {"max_position_embeddings": WIDTH}, ops=ops_for(Kernel.XLA), page_size=PAGE, loop=Loop.SCAN
    )
    params = model.pack(load_params(entry, model.stored))
    for case in cases:
        if case["chat"]:
            message = {"role": "user", "content": case["prompt"]}
            ids = Chat(entry, tokenizer).encode([message], add_generation_prompt=True)
        else:
            ids = [*tokenizer.prefix, *tokenizer.encode(case["prompt"], specials=False)]
        assert ids == case["input_ids"]
        logits = run(model, params, ids + case["greedy_ids"][:-1])[len(ids) - 1 :]
        assert logits.argmax(-1).tolist() == case["greedy_ids"]
        for index, value in case["first_logits_top5"]:
            assert logits[0, index] == pytest.approx(value, abs=2e-3)
        total = np.logaddexp.reduce(logits[0].astype(np.float64))
        assert total == pytest.approx(case["first_logits_logsumexp"], abs=2e-3)


def run(model: LoweredModel, params: dict[str, jax.Array], ids: list[int]) -> np.ndarray[Any, Any]:
    """Logits [T, V] of one sequence in one launch."""
    length, pages = len(ids), WIDTH // PAGE
    row = np.arange(WIDTH, dtype=np.int32)
    zero = jnp.zeros(1, jnp.int32)
    batch = Batch(
        tokens=jnp.asarray(np.pad(np.int32(ids), (0, WIDTH - length)))[None],
        positions=jnp.asarray(np.where(row < length, row, -1))[None],
        starts=zero,
        counts=jnp.full(1, length, jnp.int32),
        pages={group.name: 1 + jnp.arange(pages, dtype=jnp.int32)[None] for group in model.groups},
        slots_in=zero,
        slots_out=zero,
        readout=jnp.arange(WIDTH, dtype=jnp.int32),
    )
    state = {
        group.name: {name: jnp.zeros(leaf.shape, leaf.dtype) for name, leaf in group.arrays(1 + pages).items()}
        for group in model.groups
    }
    _, outputs = jax.jit(lambda p, s, b: model.step(p, s, b, ("logits",)))(params, state, batch)
    return np.asarray(outputs["logits"])[:length]
