"""The TPU lowering of attention, without a TPU: a reference stands in for the Pallas kernel.

These tests hold what is ours, packing, padding, layout and page writes, against the kernel's published contract.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import kernel as published
from tpu_reference import reference

from pie_xla.errors import PieError
from pie_xla.kernels.tpu import TpuOps, pack
from pie_xla.parallel import make_mesh
from poem.spec import KV, Attention, Batch


def dense(query: np.ndarray, keys: np.ndarray, values: np.ndarray, how: Attention) -> np.ndarray:
    """query [n, H, d] are the last n of keys and values [m, K, d]: plain softmax attention in float64."""
    n, m, group = len(query), len(keys), query.shape[1] // keys.shape[1]
    keys, values = (np.repeat(x.astype(np.float64), group, axis=1) for x in (keys, values))
    scores = np.einsum("nhd,mhd->hnm", query.astype(np.float64), keys) * how.scale
    if how.soft_cap is not None:
        scores = how.soft_cap * np.tanh(scores / how.soft_cap)
    back = np.arange(m - n, m)[:, None] - np.arange(m)[None, :]
    seen = (back >= 0) & (back < (how.window or m))
    scores = np.where(seen, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("hnm,mhd->nhd", weights / weights.sum(-1, keepdims=True), values)


def test_pack_by_hand() -> None:
    packed = pack(jnp.array([2, 0, 3], jnp.int32), 3)
    assert packed.order.tolist() == [0, 2, 1]
    assert packed.bounds.tolist() == [0, 2, 5, 5]
    assert packed.live.tolist() == [2]
    assert packed.source.tolist() == [0, 1, 6, 7, 8, 0, 0, 0, 0]
    assert [packed.target.tolist()[t] for t in (0, 1, 6, 7, 8)] == [0, 1, 2, 3, 4]


def test_a_launch_of_padding_alone_has_one_query() -> None:
    packed = pack(jnp.zeros((3,), jnp.int32), 2)
    assert (packed.live.tolist(), packed.bounds.tolist()) == ([1], [0, 1, 1, 1])


@pytest.mark.parametrize(
    ("dtype", "shards", "true", "padded", "bytes_factor", "flops_factor"),
    [
        ("bfloat16", 1, (9, 3, 64), (12, 4, 128), 8 / 3, 8 / 3),  # SmolLM2-135M
        ("float32", 1, (9, 3, 64), (12, 4, 128), 8 / 3, 8 / 3),
        ("bfloat16", 4, (9, 3, 64), (12, 4, 128), 8 / 3, 8 / 3),
        ("bfloat16", 1, (4, 1, 256), (4, 1, 256), 1, 1),  # Gemma-3-270M
        ("bfloat16", 4, (4, 1, 256), (16, 4, 256), 4, 4),
        ("bfloat16", 1, (16, 8, 128), (16, 8, 128), 1, 1),  # Qwen3-0.6B
        ("float32", 1, (40, 10, 128), (48, 12, 128), 1.2, 1.2),
        ("bfloat16", 1, (40, 10, 128), (64, 16, 128), 1.6, 1.6),
    ],
)
def test_padding_and_its_cost(
    dtype: str, shards: int, true: tuple[int, ...], padded: tuple[int, ...], bytes_factor: float, flops_factor: float
) -> None:
    ops = TpuOps(make_mesh(jax.devices()[:shards]) if shards > 1 else None)
    kv = KV(true[1], true[2], 16, dtype)
    cost = ops.padding(kv, true[0])
    assert (cost.padded_heads, cost.padded_kv_heads, cost.padded_head_dim) == padded
    assert (cost.bytes_factor, cost.flops_factor) == pytest.approx((bytes_factor, flops_factor))
    assert ops.kv_page(kv, true[0])["kv"].shape == (16, 2 * padded[1], padded[2])
    # The kernel's own check agrees, on each device's share.
    heads = published.get_min_heads_per_blk(padded[0] // shards, 2 * padded[1] // shards, dtype, dtype)
    assert heads[1] > 0


def test_padding_says_what_it_costs() -> None:
    assert str(TpuOps().padding(KV(3, 64, 16, "bfloat16"), 9)) == (
        "9/3 heads of 64 padded to 12/4 of 128: KV bytes x2.67, attention FLOPs x2.67"
    )
    assert str(TpuOps().padding(KV(8, 128, 16, "bfloat16"), 16)) == "16/8 heads of 128: no padding"


def test_uneven_heads_are_refused() -> None:
    with pytest.raises(PieError, match="10 query heads cannot share 3 kv heads"):
        TpuOps().padding(KV(3, 64, 16, "bfloat16"), 10)


def test_the_reference_is_the_published_contract() -> None:
    random = np.random.default_rng(2)
    q = jnp.asarray(random.normal(size=(8, 6, 16)), jnp.float32)
    kv_pages = jnp.asarray(random.normal(size=(13, 4, 4, 16)), jnp.float32)
    table = jnp.asarray(1 + random.permutation(12).reshape(3, 4), jnp.int32)
    operands = (table, jnp.array([0, 1, 5, 5], jnp.int32), jnp.array([2], jnp.int32))
    lengths = jnp.array([9, 6, 1], jnp.int32)
    options: dict[str, Any] = {"sm_scale": 0.3, "sliding_window": 5, "soft_cap": 2.0}
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        expected = published.ref_ragged_paged_attention(q, kv_pages, lengths, *operands, **options)
    got = reference(q, kv_pages, lengths, *operands, **options, num_kv_pages_per_block=1, num_queries_per_block=1)
    np.testing.assert_allclose(got[:5], expected, rtol=2e-5, atol=2e-6)
    assert np.isnan(got[5:]).all()


@pytest.mark.parametrize(
    ("how", "shards"),
    [(Attention(0.2), 1), (Attention(0.3, window=5), 4), (Attention(0.5, soft_cap=2.0), 1)],
    ids=["full", "window", "cap"],
)
def test_attention_over_pages_equals_dense(how: Attention, shards: int) -> None:
    """Three launches (prefill with an empty row between, a chunk, a decode) of a 6/3-head layer, the second of two."""
    rows, heads, kv_heads, head_dim, page, units, layer = 4, 6, 3, 16, 4, 20, 1
    ops = TpuOps(make_mesh(jax.devices()[:4]) if shards > 1 else None, kernel=reference)
    kv = KV(kv_heads, head_dim, page, "float32")
    unit = ops.kv_page(kv, heads)["kv"]
    before = np.full((2 * units, *unit.shape), 7.0, np.float32)
    before[layer * units] = 0
    pool = {"kv": jnp.asarray(before)}
    random = np.random.default_rng(1)
    table = jnp.asarray(1 + random.permutation(16).reshape(4, 4), jnp.int32)

    past: list[list[np.ndarray]] = [[np.zeros((0, kv_heads, head_dim), np.float32)] * 2 for _ in range(rows)]
    starts = np.zeros(rows, np.int32)
    for length, counts in ((5, [5, 0, 2, 4]), (6, [3, 6, 0, 0]), (1, [1, 1, 1, 0])):
        q = random.normal(size=(rows, length, heads, head_dim)).astype(np.float32)
        k, v = random.normal(size=(2, rows, length, kv_heads, head_dim)).astype(np.float32)
        column = np.arange(length, dtype=np.int32)[None]
        given = np.array(counts, np.int32)
        positions = np.where(column < given[:, None], starts[:, None] + column, -1)
        empty = jnp.zeros((rows,), jnp.int32)
        batch = Batch(
            tokens=jnp.zeros((rows, length), jnp.int32),
            positions=jnp.asarray(positions),
            starts=jnp.asarray(starts),
            counts=jnp.asarray(given),
            pages={"full": table},
            slots_in=empty,
            slots_out=empty,
            readout=empty,
        )
        attend = jax.jit(lambda q, k, v, pool, table, b: ops.attend(q, k, v, pool, table, layer * units, b, how))
        out, pool = attend(q, k, v, pool, table, batch)
        assert np.isfinite(np.asarray(out)).all()
        for b, n in enumerate(counts):
            past[b] = [np.concatenate([old, new[b, :n]]) for old, new in zip(past[b], (k, v), strict=True)]
            if n:
                np.testing.assert_allclose(out[b, :n], dense(q[b, :n], *past[b], how), rtol=2e-5, atol=2e-6)
        starts += given
    after = np.asarray(pool["kv"])
    np.testing.assert_array_equal(after[:units], before[:units])  # the other layer
    np.testing.assert_array_equal(after[layer * units], before[layer * units])  # the dummy page takes no padding
    used = after[layer * units + table[0, 0], 0]  # cell 0 of row 0: k0 v0 k1 v1 k2 v2 and a padded head
    np.testing.assert_array_equal(used[1, :head_dim], past[0][1][0, 0])
    assert not used[2 * kv_heads :].any() and not used[:, head_dim:].any()


def test_ops_are_hashable_values() -> None:
    """Equal ops give equal executables: they are compared, not identified."""
    assert TpuOps() == TpuOps() and hash(TpuOps()) == hash(dataclasses.replace(TpuOps()))
