"""Taps see what attention does, whatever the loop and however the tokens were split; pages they hide are not attended to."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from poem_cases import CASES, prompts, tensor
from poem_runner import PAGE, Runner, lowered
from qwen3_5_cases import CASES as HYBRIDS

from poem.lower import Loop, LoweredModel
from poem.spec import Batch, PoemError, StateKind

SMALL = {  # few layers: what is unrolled is compiled layer by layer
    "llama": CASES["llama"] | {"num_hidden_layers": 2},
    "gemma3": CASES["gemma3"] | {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]},
    "qwen3_5": HYBRIDS["qwen3_5"] | {"num_hidden_layers": 2},
}
WIDTH = 48
J = WIDTH // PAGE


@dataclass
class Recorder:
    """Keeps queries, scores and bounds of every layer; hides pages from layer `hidden[0]` on."""

    model: LoweredModel
    rows: int
    keep: np.ndarray[Any, Any] | None = None  # bool[B, J]
    width: int = WIDTH
    scored: bool = True
    bounded: bool = True

    def start(self) -> dict[str, jax.Array]:
        heads = self.model.facts.attention
        assert heads is not None
        L, B = heads.layers, self.rows
        return {
            "query": jnp.zeros((L, B, heads.heads, heads.head_dim)),
            "score": jnp.zeros((L, B, WIDTH)),
            "bound": jnp.zeros((L, B, J)),
        }

    def projected(self, carry: Any, layer: jax.Array, query: jax.Array, bounds: Any) -> tuple[Any, jax.Array | None]:
        carry = {**carry, "query": carry["query"].at[layer].set(query), "bound": carry["bound"].at[layer].set(bounds)}
        return carry, None if self.keep is None else jnp.asarray(self.keep)

    def attended(self, carry: Any, layer: jax.Array, query: jax.Array, scores: Any) -> Any:
        return {**carry, "score": carry["score"].at[layer].set(scores)}


class Tapped(Runner):
    """A runner whose launches are looked at; `seen` holds what the taps carried out of the last one."""

    keep: np.ndarray[Any, Any] | None = None
    seen: dict[str, np.ndarray[Any, Any]]
    batch: Batch

    def __init__(self, model: LoweredModel, params: dict[str, jax.Array], rows: int) -> None:
        super().__init__(model, params, rows)

        def step(params: Any, state: Any, batch: Batch, keep: Any) -> Any:
            return model.tapped_step(params, state, batch, Recorder(model, batch.tokens.shape[0], keep), ("logits",))

        jitted = jax.jit(step)

        def run(params: Any, state: Any, batch: Batch, outputs: Any) -> Any:
            state, values, seen = jitted(params, state, batch, self.keep)
            self.batch, self.seen = batch, {name: np.asarray(value) for name, value in seen.items()}
            return state, values

        self.step = run


def model_of(case: str, loop: Loop = Loop.UNROLLED) -> tuple[LoweredModel, dict[str, jax.Array]]:
    config = SMALL[case]
    model = lowered(config, loop)
    stored = {name: jnp.asarray(tensor(name, leaf.shape)) for name, leaf in model.stored.items()}
    return model, model.pack(stored)


def keys_of(run: Runner, group: str, layer: int, row: int) -> np.ndarray[Any, Any]:
    """[T, K, d]: what the layer keeps of a row."""
    pool = np.asarray(run.state[group]["key"])  # [layers * units, K, page, d]
    units = pool.shape[0] // next(g.layers for g in run.model.groups if g.name == group)
    cells = [pool[layer * units + run.table[row, c // PAGE], :, c % PAGE] for c in range(run.lengths[row])]
    return np.stack(cells)


def attention_layers(model: LoweredModel) -> list[tuple[str, int, int | None]]:
    """(group, layer within it, window) of each attention layer."""
    count: dict[str, int] = {}
    found = []
    for group in model.layer_groups:
        at = count[group.name] = count.get(group.name, -1) + 1
        if group.kind is StateKind.PAGED:
            found.append((group.name, at, group.window))
    return found


def scale_of(case: str, model: LoweredModel) -> float:
    assert model.facts.attention is not None
    config = SMALL[case]
    return float(config.get("query_pre_attn_scalar", model.facts.attention.head_dim)) ** -0.5


def check(case: str, run: Tapped, rows: list[int]) -> None:
    """Scores and bounds against softmax in float64 over the cached keys."""
    for layer, (group, at, window) in enumerate(attention_layers(run.model)):
        for b, row in enumerate(rows):
            key, query = keys_of(run, group, at, row).astype(np.float64), run.seen["query"][layer, b]
            T, H, K = len(key), query.shape[0], key.shape[1]
            grouped = query.reshape(K, H // K, -1)
            raw = np.einsum("kgd,tkd->kgt", grouped, key).reshape(H, T) * scale_of(case, run.model)
            first = 0 if window is None else max(0, T - window)
            weights = np.exp(raw[:, first:] - raw[:, first:].max(1, keepdims=True))
            expected = np.zeros(WIDTH)
            expected[first:T] = (weights / weights.sum(1, keepdims=True)).mean(0)
            np.testing.assert_allclose(run.seen["score"][layer, b], expected, atol=2e-6)
            bounds, before = run.seen["bound"][layer, b], int(run.batch.starts[b]) // PAGE
            for j in range(before):
                cells = slice(j * PAGE, (j + 1) * PAGE)
                low, high = key[cells].min(0)[:, None], key[cells].max(0)[:, None]
                least = np.maximum(grouped * low, grouped * high).sum(-1).max() * scale_of(case, run.model)
                np.testing.assert_allclose(bounds[j], least, rtol=1e-5, atol=1e-5)
                assert bounds[j] >= raw[:, cells].max() - 1e-5
            assert np.isposinf(bounds[before : -(-T // PAGE)]).all() and np.isneginf(bounds[-(-T // PAGE) :]).all()


@pytest.mark.parametrize("case", SMALL)
def test_taps_see_the_softmax_of_each_rows_last_token(case: str) -> None:
    model, params = model_of(case)
    long, middle, short = prompts(97)
    run = Tapped(model, params, 3)
    run.run({0: long[:30], 1: middle, 2: short}, 32, 3)
    check(case, run, [0, 1, 2])
    run.run({0: long[30:31], 1: middle[:1], 2: short}, 1, 3)
    check(case, run, [0, 1, 2])


def test_taps_see_the_same_under_scan_and_however_a_prompt_is_split() -> None:
    ids = prompts(97)[0]
    seen = []
    for loop, sizes in ((Loop.UNROLLED, (16,)), (Loop.SCAN, (16,)), (Loop.SCAN, (9, 7))):
        run, at = Tapped(*model_of("llama", loop), 1), 0
        for size in sizes:
            run.run({0: ids[at : at + size]}, 16, 1)
            at += size
        seen.append(run.seen)
    for other in seen[1:]:
        for name in ("query", "score"):
            np.testing.assert_allclose(other[name], seen[0][name], atol=1e-4)


@pytest.mark.parametrize("width", [1, 6])
def test_hidden_pages_are_not_attended_to(width: int) -> None:
    """Only the last token is kept from seeing them; pages with new cells, and those of no cell, are not hidden."""
    run = Tapped(*model_of("llama"), 2)
    ids = prompts(97)[0]
    run.run({0: ids[:25], 1: ids[:25]}, 32, 2)
    run.keep = np.ones((2, J), bool)
    run.keep[1, [1, 2, 6, 8]] = False
    logits = run.run(dict.fromkeys((0, 1), ids[25 : 25 + width]), width, 2)
    np.testing.assert_allclose(logits[1][:-1], logits[0][:-1], atol=1e-5)
    assert np.abs(logits[1][-1] - logits[0][-1]).max() > 1e-2
    seen, hidden = run.seen["score"][:, 0], run.seen["score"][:, 1]
    assert (seen[:, : 25 + width] > 0).all() and (hidden[:, 4:12] == 0).all() and (hidden[:, 24 : 25 + width] > 0).all()
    np.testing.assert_allclose(hidden.sum(1), 1.0, atol=1e-5)


def test_a_model_whose_kernels_show_nothing_refuses() -> None:
    model, params = model_of("llama")
    blind = replace(model, facts=replace(model.facts, attention=None))
    with pytest.raises(PoemError, match="llama shows no attention"):
        Tapped(blind, params, 1).run({0: prompts(97)[2]}, 1, 1)
