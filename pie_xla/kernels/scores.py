"""What the last token of each row looks at, in plain XLA: attention scores by position, and bounds of them by page.

Letters: B rows, H query heads, K kv heads, G = H/K, d head_dim, N pages per row, C positions, J pages of C positions.
"""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp

from pie_xla.kernels.sight import Sight, padded
from poem.spec import Attention, Batch
from poem.taps import last_token, view_of

BLOCK = 256  # cells of a row gathered at once


def last_scores(
    query: jax.Array,
    pool: dict[str, jax.Array],
    pages: jax.Array,
    first: jax.Array | int,
    batch: Batch,
    how: Attention,
    width: int,
) -> jax.Array:
    """See `poem.spec.Ops.scores`; pools as `XlaOps.kv_page` lays them out."""
    B, H, d = query.shape
    K, page = pool["key"].shape[1:3]
    view = view_of(batch, pages, page)
    if view.mask is not None:
        view = replace(view, mask=last_token(view.mask, batch)[:, None])
    at = last_token(batch.positions, batch)[:, None]
    slots, per_block = _extent(pages, page, width)
    sight = Sight(view, at, 1, page, per_block)
    grouped = query.reshape(B, K, H // K, d)
    own = jnp.where(batch.counts > 0, batch.starts + batch.counts - 1, -1)[:, None, None, None]
    S = per_block * page

    def body(i: jax.Array, raw: jax.Array) -> jax.Array:
        keys, _ = _keys(pool["key"], pages, first, i, per_block)
        scores = jnp.einsum("bksd,bkgd->bkgs", keys, grouped, preferred_element_type=jnp.float32) * how.scale
        if how.soft_cap is not None:
            scores = jnp.tanh(scores / how.soft_cap) * how.soft_cap
        cell = i * S + jnp.arange(S, dtype=jnp.int32)[None, None, None, :]
        seen = (cell <= own) & sight.seen(i, how.window)[:, :, :, 0][:, :, None, :]
        return jax.lax.dynamic_update_slice_in_dim(raw, jnp.where(seen, scores, -jnp.inf), i * S, axis=3)

    empty = jnp.full((B, K, H // K, slots * page), -jnp.inf, jnp.float32)
    raw = jax.lax.fori_loop(0, _blocks(jnp.max(own) + 1, slots, per_block, page), body, empty)
    top = jnp.max(raw, axis=3, keepdims=True)
    weights = jnp.exp(raw - jnp.where(jnp.isfinite(top), top, 0.0))
    total = jnp.sum(weights, axis=3, keepdims=True)
    mean = jnp.mean(weights / jnp.where(total > 0, total, 1.0), axis=(1, 2))
    position = _table(view.bases, slots)[:, :, None] + jnp.arange(page, dtype=jnp.int32)[None, None, :]
    at = jnp.clip(position.reshape(B, -1), 0, width)
    return jnp.zeros((B, width + 1), jnp.float32).at[_row(B), at].add(mean)[:, :width]


def page_bounds(
    query: jax.Array,
    pool: dict[str, jax.Array],
    pages: jax.Array,
    first: jax.Array | int,
    batch: Batch,
    how: Attention,
    width: int,
) -> jax.Array:
    """See `poem.spec.Ops.page_bounds` (Quest, Tang et al. 2024); pools as `XlaOps.kv_page` lays them out, before the new cells."""
    B, H, d = query.shape
    K, page = pool["key"].shape[1:3]
    view = view_of(batch, pages, page)
    slots, per_block = _extent(pages, page, width)
    grouped = query.astype(jnp.float32).reshape(B, K, H // K, d)
    up, down = jnp.maximum(grouped, 0), jnp.minimum(grouped, 0)
    full = (batch.starts // page)[:, None]  # pages from here on are being filled

    def body(i: jax.Array, bounds: jax.Array) -> jax.Array:
        keys, rows = _keys(pool["key"], pages, first, i, per_block)
        held = keys.astype(jnp.float32).reshape(B, K, per_block, page, d)
        high = jnp.einsum("bkgd,bknd->bkgn", up, jnp.max(held, axis=3))
        low = jnp.einsum("bkgd,bknd->bkgn", down, jnp.min(held, axis=3))
        bound = jnp.max(high + low, axis=(1, 2)) * how.scale
        slot = i * per_block + jnp.arange(per_block, dtype=jnp.int32)[None, :]
        let_go = (rows == first) | ~jnp.any(_block(view.live, i, per_block) != 0, axis=2)
        bound = jnp.where((slot < full) & ~let_go, bound, -jnp.inf)
        return jax.lax.dynamic_update_slice_in_dim(bounds, bound, i * per_block, axis=1)

    empty = jnp.full((B, slots), -jnp.inf, jnp.float32)
    bounds = jax.lax.fori_loop(0, _blocks(jnp.max(full) * page, slots, per_block, page), body, empty)
    slot = jnp.arange(slots, dtype=jnp.int32)[None, :]
    ends = -(-(batch.starts + batch.counts) // page)[:, None]
    bounds = jnp.where((slot >= full) & (slot < ends) & (batch.counts > 0)[:, None], jnp.inf, bounds)
    J = -(-width // page)
    base = _table(view.bases, slots)
    found = jnp.full((B, J + 1), -jnp.inf, jnp.float32)
    for place in (base // page, (base + page - 1) // page):  # two where a page begins between two pages of positions
        found = found.at[_row(B), jnp.clip(place, 0, J)].max(bounds)
    return found[:, :J]


def _extent(pages: jax.Array, page: int, width: int) -> tuple[int, int]:
    """(pages of a table that C positions can take, a multiple of the pages per block; pages per block)."""
    used = min(-(-width // page), pages.shape[1])
    per_block = max(1, min(BLOCK // page, used))
    return -(-used // per_block) * per_block, per_block


def _blocks(cells: jax.Array, slots: int, per_block: int, page: int) -> jax.Array:
    """How many blocks hold so many cells."""
    S = per_block * page
    return jnp.clip((cells + S - 1) // S, 0, slots // per_block)


def _block(per_page: jax.Array, i: jax.Array, per_block: int) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(padded(per_page, per_block), i * per_block, per_block, axis=1)


def _keys(
    key: jax.Array, pages: jax.Array, first: jax.Array | int, i: jax.Array, per_block: int
) -> tuple[jax.Array, jax.Array]:
    """Keys [B, K, S, d] of block i, and the pool rows [B, pages] of its pages."""
    rows = first + _block(pages, i, per_block)
    B, K = rows.shape[0], key.shape[1]
    heads = jnp.arange(K, dtype=jnp.int32)[None, :, None]
    kept = key.at[rows[:, None, :], heads].get(mode="promise_in_bounds")
    return kept.reshape(B, K, -1, key.shape[3]), rows


def _row(B: int) -> jax.Array:
    return jnp.arange(B, dtype=jnp.int32)[:, None]


def _table(per_page: jax.Array, slots: int) -> jax.Array:
    """[B, N] as [B, slots]."""
    return jnp.pad(per_page, ((0, 0), (0, max(0, slots - per_page.shape[1]))))[:, :slots]
