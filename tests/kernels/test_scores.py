"""Scores and page bounds under a view equal softmax in NumPy: evicted cells, gaps, pages that begin between two, windows, masks."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pie_xla.kernels.xla import XlaOps
from poem.spec import Attention, Batch, View

B, Q, H, K, D, PAGE, N, C = 3, 4, 4, 2, 8, 4, 24, 150
CELLS, J = N * PAGE, -(-C // PAGE)


def packed(bits: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(np.packbits(bits, axis=-1, bitorder="little")).view(np.int32)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([None, 9]), st.booleans(), st.sampled_from([None, 2.0]))
def test_scores_and_bounds_under_a_view(seed: int, window: int | None, masked: bool, cap: float | None) -> None:
    rng = np.random.default_rng(seed)
    starts, counts = rng.integers(0, CELLS - Q, B), rng.integers(1, Q + 1, B)
    bases = np.arange(N) * PAGE + np.cumsum(rng.integers(0, 3, (B, N)) * rng.choice([1, PAGE]), axis=1)
    cells = (bases[:, :, None] + np.arange(PAGE)).reshape(B, CELLS)  # positions
    live = rng.random((B, CELLS)) < 0.8
    live.reshape(B, N, PAGE)[:, 2] = False  # a page that is still there with nobody alive
    for b in range(B):
        live[b, starts[b] : starts[b] + counts[b]] = True
    mask = rng.random((B, Q, CELLS)) < 0.7
    positions = np.full((B, Q), -1)
    for b in range(B):
        positions[b, : counts[b]] = cells[b, starts[b] : starts[b] + counts[b]]
    pages = 1 + rng.permutation(B * N).reshape(B, N)
    pool = {name: rng.standard_normal((B * N + 1, K, PAGE, D)).astype(np.float32) for name in ("key", "value")}
    query = rng.standard_normal((B, H, D)).astype(np.float32)
    sinks = rng.integers(0, 6, B)
    whole = np.full(B, 1 << 30)
    bits = (live.reshape(B, N, PAGE) << np.arange(PAGE)).sum(-1)
    i32 = lambda x: jnp.asarray(x, jnp.int32)  # noqa: E731
    zeros = i32(np.zeros(B))
    dense = jnp.asarray(packed(mask)) if masked else None
    view = View(i32(bases), i32(bits[:, :, None]), i32(whole), i32(sinks), dense)
    batch = Batch(i32(np.zeros((B, Q))), i32(positions), i32(starts), i32(counts), {}, zeros, zeros, zeros, view)
    how, ops = Attention(0.3, window, cap), XlaOps()
    args = (jnp.asarray(query), {k: jnp.asarray(v) for k, v in pool.items()}, i32(pages), 0, batch, how, C)
    scores, bounds = np.asarray(ops.scores(*args)), np.asarray(ops.page_bounds(*args))
    for b in range(B):
        key = pool["key"][pages[b]].transpose(0, 2, 1, 3).reshape(CELLS, K, D).astype(np.float64)
        raw = np.einsum("kgd,tkd->kgt", query[b].reshape(K, H // K, D), key).reshape(H, CELLS) * 0.3
        own = starts[b] + counts[b] - 1
        seen = live[b] & (np.arange(CELLS) <= own)
        if window is not None:
            seen &= cells[b] > cells[b, own] - window
        if masked:
            seen &= mask[b, counts[b] - 1]
        expected, capped = np.zeros(C), raw if cap is None else np.tanh(raw / cap) * cap
        if seen.any():
            weights = np.where(seen, np.exp(capped - capped[:, seen].max(1, keepdims=True)), 0.0)
            mean = (weights / weights.sum(1, keepdims=True)).mean(0)
            inside = cells[b] < C
            np.add.at(expected, cells[b][inside], mean[inside])
        np.testing.assert_allclose(scores[b], expected, atol=2e-6)
        least = np.full(J, -np.inf)  # no bound is below what a cell of the page scores
        for cell in np.flatnonzero(live[b] & (np.arange(CELLS) < starts[b]) & (cells[b] < C)):
            least[cells[b, cell] // PAGE] = max(least[cells[b, cell] // PAGE], raw[:, cell].max())
        assert (bounds[b] >= least - 1e-5).all()
        written = {cells[b, cell] // PAGE for cell in range(starts[b], own + 1)}
        assert all(np.isposinf(bounds[b, j]) for j in written if j < J)
        dead = {2} if starts[b] // PAGE > 2 else set()
        there = [n for n in range(-(-(own + 1) // PAGE)) if n not in dead]
        held = {p // PAGE for n in there for p in (bases[b, n], bases[b, n] + PAGE - 1)}
        assert all(np.isneginf(bounds[b, j]) for j in range(J) if j not in held)
