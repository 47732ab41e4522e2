"""Paged attention in plain XLA against dense attention in NumPy float64."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pie_xla.kernels.xla import XlaOps
from poem.spec import KV, Attention, Batch

B, K, G, D, PAGE, N = 4, 2, 3, 8, 4, 12
F64 = np.ndarray[Any, np.dtype[np.float64]]


def dense(q: F64, k: F64, v: F64, start: int, how: Attention) -> F64:
    """q [Q, H, d] in cells start.. over k and v [S, K, d]."""
    out = np.zeros_like(q)
    for t, h in np.ndindex(q.shape[:2]):
        own = start + t
        first = 0 if how.window is None else max(0, own - how.window + 1)
        scores = k[first : own + 1, h // G] @ q[t, h] * how.scale
        if how.soft_cap is not None:
            scores = np.tanh(scores / how.soft_cap) * how.soft_cap
        weights = np.exp(scores - scores.max())
        out[t, h] = weights @ v[first : own + 1, h // G] / weights.sum()
    return out


@pytest.mark.parametrize(
    ("how", "Q"),
    [
        (Attention(0.3), 1),
        (Attention(0.3), 5),
        (Attention(0.5, window=6), 1),
        (Attention(0.5, window=6), 5),
        (Attention(1.0, window=1), 3),
        (Attention(2.0, soft_cap=3.0), 5),
    ],
)
def test_against_dense(how: Attention, Q: int) -> None:
    """Rows of 0, 3, 17 and 40 cells (one of them padding), blocks of two pages, NaN wherever nobody wrote."""
    starts, counts = np.array([0, 3, 17, 40]), np.array([0, Q, max(1, Q - 2), Q])
    rng = np.random.default_rng(3)
    history = rng.standard_normal((2, B, N * PAGE, K, D))
    query = rng.standard_normal((B, Q, K * G, D))
    layer, units = 1, B * N + 1
    table = (1 + rng.permutation(B * N)).reshape(B, N).astype(np.int32)
    pools = np.full((2, 3 * units, K, PAGE, D), np.nan, np.float32)
    for b in range(1, B):
        for c in range(starts[b]):
            pools[:, layer * units + table[b, c // PAGE], :, c % PAGE] = history[:, b, c]
        if how.window is not None:  # pages before the window are somebody else's by now
            gone = max(0, starts[b] - how.window + 1) // PAGE
            pools[:, layer * units + table[b, :gone]] = np.nan
            table[b, :gone] = 0
    table[0] = 0
    new = np.zeros((2, B, Q, K, D), np.float32)
    positions = np.full((B, Q), -1, np.int32)
    for b in range(B):
        at = slice(starts[b], starts[b] + counts[b])
        new[:, b, : counts[b]] = history[:, b, at]
        positions[b, : counts[b]] = np.arange(at.start, at.stop)
    zeros = jnp.zeros(B, jnp.int32)
    launch = Batch(
        tokens=jnp.zeros((B, Q), jnp.int32),
        positions=jnp.asarray(positions),
        starts=jnp.asarray(starts, jnp.int32),
        counts=jnp.asarray(counts, jnp.int32),
        pages={},
        slots_in=zeros,
        slots_out=zeros,
        readout=zeros,
    )
    ops = XlaOps(cells=B * 2 * PAGE, block=(2 * PAGE, 2 * PAGE))
    attend = jax.jit(lambda *a: ops.attend(*a, jnp.int32(layer * units), launch, how))
    pool = {"key": jnp.asarray(pools[0]), "value": jnp.asarray(pools[1])}
    out, after = attend(
        jnp.asarray(query, jnp.float32), jnp.asarray(new[0]), jnp.asarray(new[1]), pool, jnp.asarray(table)
    )
    assert out.shape == query.shape and bool(jnp.isfinite(out).all())
    for b in range(1, B):
        real = int(counts[b])
        expected = dense(query[b, :real], history[0, b], history[1, b], int(starts[b]), how)
        np.testing.assert_allclose(out[b, :real], expected, rtol=2e-5, atol=2e-5)
        for c in range(starts[b], starts[b] + real):
            row = layer * units + table[b, c // PAGE]
            assert (np.asarray(after["key"][row, :, c % PAGE]) == new[0, b, c - starts[b]]).all()
    others = np.delete(np.arange(3 * units), slice(layer * units, (layer + 1) * units))
    assert np.isnan(np.asarray(after["value"])[others]).all()


def test_one_executable_for_all_lengths() -> None:
    """Lengths are data: short and long rows run the same code."""
    ops, how = XlaOps(), Attention(1.0)
    (leaf, _) = ops.kv_page(KV(K, D, PAGE, "float32"), K * G).values()
    assert leaf.shape == (K, PAGE, D) and leaf.axes == ("kv_heads", None, "head_dim")
    pool = {name: jnp.zeros((64, K, PAGE, D)) for name in ("key", "value")}
    table = jnp.zeros((1, N), jnp.int32)
    traces = 0

    @jax.jit
    def attend(starts: jax.Array) -> jax.Array:
        nonlocal traces
        traces += 1
        one = jnp.ones(1, jnp.int32)
        launch = Batch(one[None], starts[None], starts, one, {}, one, one, one)
        q, kv = jnp.ones((1, 1, K * G, D)), jnp.ones((1, 1, K, D))
        return ops.attend(q, kv, kv, pool, table, 0, launch, how)[0]

    for start in (0, 5, 47):
        assert bool(jnp.isfinite(attend(jnp.full(1, start, jnp.int32))).all())
    assert traces == 1
