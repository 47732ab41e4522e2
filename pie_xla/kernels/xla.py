"""Paged attention in plain XLA: an online softmax (Milakov and Gimelshein 2018) over blocks of pages.

The number of blocks visited is a device value, the longest live row's, so one executable serves every length.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from pie_xla.kernels.scores import last_scores, page_bounds
from pie_xla.kernels.sight import Sight, padded
from poem.plain import rms_norm, rotate
from poem.spec import KV, Attention, Batch, Leaf, NormScale

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

    @property
    def taps(self) -> bool:
        return True

    def kv_page(self, kv: KV, heads: int) -> dict[str, Leaf]:
        """Keys and values [K, page, d]: one head's cells of a page lie together, and are gathered as one run."""
        leaf = Leaf((kv.kv_heads, kv.page_size, kv.head_dim), kv.dtype, ("kv_heads", None, "head_dim"))
        return {"key": leaf, "value": leaf}

    def rotate(self, x: jax.Array, table: tuple[jax.Array, ...]) -> jax.Array:
        """See `poem.spec.Ops.rotate`."""
        return rotate(x, table)

    def rms_norm(self, x: jax.Array, weight: jax.Array, eps: float, scale: NormScale) -> jax.Array:
        """See `poem.spec.Ops.rms_norm`."""
        return rms_norm(x, weight, eps, scale)

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

    def scores(
        self,
        query: jax.Array,
        pool: dict[str, jax.Array],
        pages: jax.Array,
        first: jax.Array | int,
        batch: Batch,
        how: Attention,
        width: int,
    ) -> jax.Array:
        """See `poem.spec.Ops.scores`."""
        return last_scores(query, pool, pages, first, batch, how, width)

    def page_bounds(
        self,
        query: jax.Array,
        pool: dict[str, jax.Array],
        pages: jax.Array,
        first: jax.Array | int,
        batch: Batch,
        how: Attention,
        width: int,
    ) -> jax.Array:
        """See `poem.spec.Ops.page_bounds`."""
        return page_bounds(query, pool, pages, first, batch, how, width)


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
    sight = None if batch.view is None else Sight(batch.view, batch.positions, G, page, per_block)
    pages = padded(pages, per_block)
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
