"""Top-k, top-p and min-p filters: exact in the window and beyond it, alone and in a batch."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pie_xla.eta.ops.order import WINDOW
from pie_xla.eta.table import TABLE

N = 3 * WINDOW + 5
rng = np.random.default_rng(3)
BATCHED = {name: jax.jit(jax.vmap(TABLE[name].lower)) for name in ("pivot_rank_le", "pivot_cummass_le")}


def rows(kind: str) -> np.ndarray:
    match kind:
        case "peaked":
            return (rng.normal(size=(4, N)) * 4).astype(np.float32)
        case "flat":
            return (rng.normal(size=(4, N)) * 0.01).astype(np.float32)
        case "ties":
            return np.round(rng.normal(size=(4, N))).astype(np.float32)
        case "equal":
            return np.zeros((4, N), np.float32)
        case _:
            wild = rng.normal(size=(4, N)).astype(np.float32)
            wild[0, :7] = [np.nan, np.inf, -np.inf, 0.0, -0.0, 3e38, -3e38]
            wild[1, :] = -np.inf
            wild[2, :] = np.nan
            wild[3, ::2] = np.nan
            return wild


KINDS = ["peaked", "flat", "ties", "equal", "wild"]


@pytest.mark.parametrize("kind", KINDS)
def test_rank_filter_is_exact(kind: str) -> None:
    x = rows(kind)
    op = TABLE["pivot_rank_le"]
    fn = BATCHED["pivot_rank_le"]
    for k in ([1, 1, 2, 5], [WINDOW, 1, 3, WINDOW], [WINDOW + 1, 1, 0, N], [N - 1, -4, N + 9, 200]):
        ranks = np.asarray(k, np.int32)
        want = np.stack([op.oracle(row, rank) for row, rank in zip(x, ranks, strict=True)])
        np.testing.assert_array_equal(np.asarray(fn(x, ranks)), want, f"{kind} {k}")


@pytest.mark.parametrize("kind", KINDS)
def test_mass_filter_is_exact_up_to_rounding(kind: str) -> None:
    logits = np.nan_to_num(rows(kind), nan=-1.0, posinf=9.0, neginf=-9.0) if kind == "wild" else rows(kind)
    x = np.asarray(jax.nn.softmax(jnp.asarray(logits), axis=-1)) if kind != "ties" else np.round(np.abs(logits)) / 512
    op = TABLE["pivot_cummass_le"]
    fn = BATCHED["pivot_cummass_le"]
    for shares in ([0.5, 0.9, 0.1, 0.99], [0.9999, 0.5, 1.0, 0.95], [0.0, -1.0, 2.0, 1e-9], [1.0, 1.0, 1.0, 1.0]):
        p = np.asarray(shares, np.float32)
        got = np.asarray(fn(x, p))
        for row, share, keep in zip(x, p, got, strict=True):
            want = op.oracle(row, share)
            wide = row.astype(np.float64)
            above = np.sum(np.where(wide[None, :] > wide[:, None], wide[None, :], 0), axis=-1)
            certain = (np.abs(above - share) > 1e-5) | (share >= 1) | (share <= 0)
            np.testing.assert_array_equal(keep[certain], want[certain], f"{kind} {share}")
            assert keep.any()


def test_mass_filter_without_numbers_keeps_nothing() -> None:
    keep = jax.jit(TABLE["pivot_cummass_le"].lower)(jnp.full((N,), jnp.nan), jnp.float32(0.9))
    assert not np.asarray(keep).any()


def test_a_row_does_not_depend_on_its_batch() -> None:
    peaked, flat = rows("peaked"), rows("flat")
    x = np.asarray(jax.nn.softmax(jnp.asarray(np.concatenate([peaked, flat])), axis=-1))
    fn = BATCHED["pivot_cummass_le"]
    share = np.full(8, 0.93, np.float32)
    together = np.asarray(fn(x, share))
    for index in range(8):
        alone = np.asarray(fn(np.stack([x[index]] * 8), share))[0]
        np.testing.assert_array_equal(together[index], alone)


@pytest.mark.parametrize("name", ["pivot_rank_le", "pivot_cummass_le"])
def test_a_batch_keeps_one_branch(name: str) -> None:
    """Under a plain vmap the branch would become a select that pays both sides for every row."""
    x, operand = jnp.ones((4, N)), jnp.ones((4,), jnp.int32 if name == "pivot_rank_le" else jnp.float32)
    lowered = jax.jit(jax.vmap(TABLE[name].lower)).lower(x, operand).as_text()
    assert "stablehlo.case" in lowered or "stablehlo.if" in lowered
    nested = jax.jit(jax.vmap(jax.vmap(TABLE[name].lower))).lower(x[None], operand[None]).as_text()
    assert "stablehlo.case" in nested or "stablehlo.if" in nested


def test_top_k_breaks_ties_by_index() -> None:
    x = jnp.asarray([1.0, -0.0, 0.0, 1.0, jnp.nan, -jnp.inf], jnp.float32)
    values, indices = TABLE["top_k"].lower(x, k=6)
    assert indices.tolist() == [0, 3, 1, 2, 4, 5]
    assert values.tolist() == [1.0, 1.0, 0.0, 0.0, -np.inf, -np.inf]
    sorted_values, sorted_indices = TABLE["sort_desc"].lower(x)
    assert sorted_indices.tolist() == indices.tolist() and sorted_values.tolist() == values.tolist()


def test_a_slice_of_top_k_does_not_sort() -> None:
    compiled = jax.jit(lambda x: TABLE["top_k"].lower(x, k=8)[0][..., 1:]).lower(jnp.ones((4, N))).compile().as_text()
    assert " sort(" not in compiled
