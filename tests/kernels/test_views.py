"""`Batch.view` on each kernel equals dense attention in NumPy: evicted cells, gaps in positions, windows, sinks, masks."""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pie_xla.kernels.build import library
from pie_xla.kernels.cpu import CpuOps, load
from pie_xla.kernels.xla import XlaOps
from pie_xla.progress import SILENT
from poem.spec import Attention, Batch, View

B, Q, H, K, D, PAGE, N = 3, 4, 4, 2, 8, 4, 24
CELLS = N * PAGE


def packed(bits: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(np.packbits(bits, axis=-1, bitorder="little")).view(np.int32)


def dense(query, key, value, seen):
    """[H, d] of one token: float64 softmax over the cells it sees."""
    out = np.zeros((H, D))
    for h in range(H):
        scores = key[:, h * K // H].astype(np.float64) @ query[h] * 0.3
        scores = np.where(seen, scores, -np.inf)
        if seen.any():
            weights = np.exp(scores - scores[seen].max())
            out[h] = (weights / weights.sum()) @ value[:, h * K // H]
    return out


@pytest.fixture(scope="module")
def cpu(model_cache: Path) -> CpuOps:
    load(library(model_cache, SILENT))
    return CpuOps()


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([None, 5, 9]), st.booleans(), st.booleans(), st.booleans())
def test_attention_with_a_view_equals_dense_attention(
    cpu: CpuOps, seed: int, window: int | None, own: bool, masked: bool, native: bool
) -> None:
    rng = np.random.default_rng(seed)
    starts = rng.integers(0, CELLS - Q, B)
    counts = rng.integers(1, Q + 1, B)
    gaps = np.cumsum(rng.integers(0, 3, (B, N)), axis=1) * PAGE  # what was evicted before each page
    bases = (np.arange(N) * PAGE)[None] + gaps
    cells = (bases[:, :, None] + np.arange(PAGE)).reshape(B, CELLS)  # positions
    live = rng.random((B, CELLS)) < 0.8
    for b in range(B):
        live[b, starts[b] : starts[b] + counts[b]] = True  # the new ones
    windows = rng.integers(1, 20, B) if own else np.full(B, 1 << 30)
    sinks = rng.integers(0, 6, B)
    mask = rng.random((B, Q, CELLS)) < 0.7
    positions = np.full((B, Q), -1)
    for b in range(B):
        positions[b, : counts[b]] = cells[b, starts[b] : starts[b] + counts[b]]
    pages = 1 + rng.permutation(B * N).reshape(B, N)
    pool = {name: rng.standard_normal((B * N + 1, K, PAGE, D)).astype(np.float32) for name in ("key", "value")}
    query, key, value = (rng.standard_normal((B, Q, heads, D)).astype(np.float32) for heads in (H, K, K))

    out, new = (cpu if native else XlaOps(cells=8, block=(8, 8))).attend(
        jnp.asarray(query),
        jnp.asarray(key),
        jnp.asarray(value),
        {name: jnp.array(array) for name, array in pool.items()},
        jnp.asarray(pages, jnp.int32),
        0,
        Batch(
            tokens=jnp.zeros((B, Q), jnp.int32),
            positions=jnp.asarray(positions, jnp.int32),
            starts=jnp.asarray(starts, jnp.int32),
            counts=jnp.asarray(counts, jnp.int32),
            pages={},
            slots_in=jnp.zeros(B, jnp.int32),
            slots_out=jnp.zeros(B, jnp.int32),
            readout=jnp.zeros(B, jnp.int32),
            view=View(
                jnp.asarray(bases, jnp.int32),
                jnp.asarray((live.reshape(B, N, PAGE) << np.arange(PAGE)).sum(-1)[:, :, None], jnp.int32),
                jnp.asarray(windows, jnp.int32),
                jnp.asarray(sinks, jnp.int32),
                jnp.asarray(packed(mask)) if masked else None,
            ),
        ),
        Attention(0.3, window),
    )
    for b in range(B):
        table = {
            name: np.asarray(array)[pages[b]].transpose(0, 2, 1, 3).reshape(CELLS, K, D) for name, array in new.items()
        }
        for t in range(counts[b]):
            assert (table["key"][starts[b] + t] == key[b, t]).all()
            at = positions[b, t]
            seen = (np.arange(CELLS) <= starts[b] + t) & live[b]
            seen &= (cells[b] > at - windows[b]) | (cells[b] < sinks[b])
            if window is not None:
                seen &= cells[b] > at - window
            if masked:
                seen &= mask[b, t]
            want = dense(query[b, t], table["key"], table["value"], seen)
            np.testing.assert_allclose(np.asarray(out)[b, t], want, atol=2e-5)
