"""Paged attention in plain XLA: an online softmax (Milakov and Gimelshein 2018) over blocks of pages.

The number of blocks visited is a device value, the longest live row's, so one executable serves every length.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from poem.spec import KV, Attention, Batch, Leaf, View

LOWEST = -1e30  # finite, so that a row without any live cell gives no NaN


@dataclass(frozen=True)
class XlaOps:
    """Attention in plain XLA.

    Args:
        cells: cells gathered at once, all rows together: few rows want long blocks (fewer kernels), many rows short
            ones (which stay in the L2 cache, and of which short rows waste less).
        block: least and most cells per row and block.
    """

    cells: int = 1024
    block: tuple[int, int] = (64, 256)

    @property
    def views(self) -> bool:
        return True

    def kv_page(self, kv: KV, heads: int) -> dict[str, Leaf]:
        """Keys and values [K, page, d]: one head's cells of a page lie together, and are gathered as one run."""
        leaf = Leaf((kv.kv_heads, kv.page_size, kv.head_dim), kv.dtype, ("kv_heads", None, "head_dim"))
        return {"key": leaf, "value": leaf}

    def attend(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        pool: dict[str, jax.Array],
        pages: jax.Array,
        first: jax.Array | int,
        batch: Batch,
        how: Attention,
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """See `poem.spec.Ops.attend`."""
        pool = _append(key, value, pool, pages, first, batch)
        page = pool["key"].shape[2]
        least, most = self.block
        cells = min(max(self.cells // query.shape[0], least), most)
        per_block = max(1, min(cells // page, pages.shape[1]))
        return _attend(query, pool, pages, first, batch, how, per_block), pool


def _attend(
    query: jax.Array,
    pool: dict[str, jax.Array],
    pages: jax.Array,
    first: jax.Array | int,
    batch: Batch,
    how: Attention,
    per_block: int,
) -> jax.Array:
    """query [B, Q, H, d] over blocks of `per_block` pages of every row, as many as the longest live row has."""
    B, Q, H, d = query.shape
    K, page = pool["key"].shape[1:3]
    G, S = H // K, per_block * page
    sight = None if batch.view is None else _Sight(batch.view, batch.positions, G, page, per_block)
    pages = _padded(pages, per_block)
    grouped = query.reshape(B, Q, K, G, d).transpose(0, 2, 3, 1, 4).reshape(B, K, G * Q, d)
    live = jnp.where(batch.counts > 0, batch.starts + batch.counts, 0)
    own = jnp.minimum(batch.starts[:, None] + jnp.arange(Q, dtype=jnp.int32)[None, :], live[:, None] - 1)
    own = jnp.tile(own, (1, G))[:, None, None, :]
    end = (jnp.max(live) + S - 1) // S
    begin = jnp.int32(0)
    oldest = jnp.zeros(B, jnp.int32)
    if how.window is not None:
        oldest = jnp.maximum(batch.starts - how.window + 1, 0)
        begin = jnp.minimum(jnp.min(jnp.where(batch.counts > 0, oldest, 2**31 - 1)) // S, end)
    oldest, live = oldest[:, None, None, None], live[:, None, None, None]
    heads = jnp.arange(K, dtype=jnp.int32)[None, :, None]

    def gather(name: str, rows: jax.Array) -> jax.Array:
        # XLA clamps a gather's indices anyway, so promising costs no safety
        pages_kept: jax.Array = pool[name].at[rows[:, None, :], heads].get(mode="promise_in_bounds")
        return pages_kept.reshape(B, K, S, d)

    def body(i: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        top, total, sums = carry
        rows = first + jax.lax.dynamic_slice_in_dim(pages, i * per_block, per_block, axis=1)
        cell = (i * S + jnp.arange(S, dtype=jnp.int32))[None, None, :, None]
        # [B, K, S, G*Q]: with cells before queries both products read the gathered block as it lies
        scores = jnp.einsum("bksd,bkqd->bksq", gather("key", rows), grouped, preferred_element_type=jnp.float32)
        scores = scores * how.scale
        if how.soft_cap is not None:
            scores = jnp.tanh(scores / how.soft_cap) * how.soft_cap
        seen = cell <= own
        if sight is not None:
            seen = seen & sight.seen(i, how.window)
        elif how.window is not None:
            seen = seen & (cell > own - how.window)
        scores = jnp.where(seen, scores, -jnp.inf)
        new_top = jnp.maximum(top, jnp.max(scores, axis=2))
        weights = jnp.exp(scores - new_top[:, :, None, :])
        keep = jnp.exp(top - new_top)
        # a cell that is not the row's may hold another's NaN, and 0 * NaN is NaN
        real = (cell >= oldest) & (cell < live)
        if sight is not None and how.window is not None:  # a page that was let go is the dummy, which anybody writes
            real = real & jnp.repeat(rows > first, page, axis=1)[:, None, :, None]
        v = jnp.where(real, gather("value", rows), 0)
        add = jnp.einsum("bksq,bksd->bkqd", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
        return new_top, total * keep + jnp.sum(weights, axis=2), sums * keep[..., None] + add

    empty = (
        jnp.full((B, K, G * Q), LOWEST, jnp.float32),
        jnp.zeros((B, K, G * Q), jnp.float32),
        jnp.zeros((B, K, G * Q, d), jnp.float32),
    )
    _, total, sums = jax.lax.fori_loop(begin, end, body, empty)
    out: jax.Array = sums / jnp.where(total > 0, total, 1.0)[..., None]
    return out.astype(query.dtype).reshape(B, K, G, Q, d).transpose(0, 3, 1, 2, 4).reshape(B, Q, H, d)


class _Sight:
    """`Batch.view` for blocks of `per_block` pages, in the layout of the scores [B, 1, S, G*Q]."""

    def __init__(self, view: View, positions: jax.Array, groups: int, page: int, per_block: int) -> None:
        self._groups, self._page, self._per_block = groups, page, per_block
        self._bases, self._live = _padded(view.bases, per_block), _padded(view.live, per_block)
        self._mask = view.mask
        self._at = self._for_queries(positions)
        self._since = self._at - view.window[:, None, None, None]  # wraps below no position: windows are < 2**30
        self._sinks = view.sinks[:, None, None, None]

    def _for_queries(self, per_token: jax.Array) -> jax.Array:
        """[B, Q] as [B, 1, 1, G*Q]."""
        return jnp.tile(per_token, (1, self._groups))[:, None, None, :]

    def _block(self, per_page: jax.Array, i: jax.Array) -> jax.Array:
        return jax.lax.dynamic_slice_in_dim(per_page, i * self._per_block, self._per_block, axis=1)

    def seen(self, i: jax.Array, window: int | None) -> jax.Array:
        """bool[B, 1, S, G*Q] (or broadcastable to it) for block i, under a layer's own window too."""
        place = jnp.arange(self._page, dtype=jnp.int32)
        B = self._bases.shape[0]
        live = self._block(self._live, i)[:, :, place // 32] >> (place % 32)[None, None, :]
        position = self._block(self._bases, i)[:, :, None] + place[None, None, :]  # [B, pages, page]
        position = position.reshape(B, 1, -1, 1)
        seen = (live.reshape(B, 1, -1, 1) & 1 == 1) & ((position > self._since) | (position < self._sinks))
        if window is not None:
            seen = seen & (position > self._at - window)
        if self._mask is not None:
            cell = i * self._per_block * self._page + jnp.arange(self._per_block * self._page, dtype=jnp.int32)
            words = jnp.take(self._mask, cell // 32, axis=2, mode="clip")  # [B, Q, S]
            bits = (words >> (cell % 32)[None, None, :]) & 1 == 1
            seen = seen & jnp.tile(bits.transpose(0, 2, 1), (1, 1, self._groups))[:, None, :, :]
        return seen


def _padded(per_page: jax.Array, per_block: int) -> jax.Array:
    """[B, N, ...] with N filled up to whole blocks."""
    fill = -per_page.shape[1] % per_block
    return jnp.pad(per_page, ((0, 0), (0, fill), *((0, 0) for _ in per_page.shape[2:])))


def _append(
    key: jax.Array,
    value: jax.Array,
    pool: dict[str, jax.Array],
    pages: jax.Array,
    first: jax.Array | int,
    batch: Batch,
) -> dict[str, jax.Array]:
    """The pool with key and value [B, Q, K, d] in their cells; padding tokens go to the dummy page."""
    page = pool["key"].shape[2]
    Q = key.shape[1]
    cell = batch.starts[:, None] + jnp.arange(Q, dtype=jnp.int32)[None, :]
    row = jnp.take_along_axis(pages, cell // page, axis=1, mode="clip")
    row = first + jnp.where(batch.positions >= 0, row, 0)
    new = {"key": key, "value": value}
    return {name: array.at[row, :, cell % page].set(new[name].astype(array.dtype)) for name, array in pool.items()}
