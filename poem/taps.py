"""Looking at attention layers while they run, and hiding pages from them.

A step with taps carries a value of their own through the layer loop. They see the last new token of each row alone, so what they see
does not depend on how a prompt was split into launches.

Letters: B rows, Q new tokens, H query heads, d head_dim, N pages of a row's table, C positions that scores span, J pages of C positions.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from poem.spec import Batch, View

ALL = -1  # every bit of a word
NO_WINDOW = 1 << 30  # beyond any position


class Taps(Protocol):
    """What is done at each attention layer; pure, and traced once per layer (unrolled) or once per run of layers (scan)."""

    @property
    def width(self) -> int:
        """C: the positions that scores and page masks span."""
        ...

    @property
    def scored(self) -> bool:
        """Whether `attended` looks at scores; they cost as much as attention's first half."""
        ...

    @property
    def bounded(self) -> bool:
        """Whether `projected` looks at page bounds; they read all keys."""
        ...

    def start(self) -> Any:
        """What the first layer is given: a tree of arrays, which keeps its shapes."""
        ...

    def projected(
        self, carry: Any, layer: jax.Array, query: jax.Array, bounds: jax.Array | None
    ) -> tuple[Any, jax.Array | None]:
        """After q, k, v and rope, before attention.

        Args:
            layer: u32[], counted among attention layers.
            query: f32[B, H, d] of each row's last token.
            bounds: f32[B, J], see `Ops.page_bounds`; None unless `bounded`.

        Returns:
            The carry, and bool[B, J]: the pages, by position, that the last token may look at; None: all. Pages with cells that this
            launch writes always stay.
        """
        ...

    def attended(self, carry: Any, layer: jax.Array, query: jax.Array, scores: jax.Array | None) -> Any:
        """After attention. `scores`: f32[B, C], see `Ops.scores`; None unless `scored`. Returns the carry."""
        ...


def last_token(values: jax.Array, batch: Batch) -> jax.Array:
    """[B, Q, ...] -> [B, ...] at each row's last real token; rows without one give some token's."""
    last = jnp.maximum(batch.counts - 1, 0)
    return values[jnp.arange(values.shape[0], dtype=jnp.int32), last]


def once_seen(value: jax.Array, seen: jax.Array) -> jax.Array:
    """`value` [B, ...], which waits for `seen` [B, n].

    Nothing else makes XLA read a pool before the next layer writes to it; left free, it reads late, and copies the pool in each layer
    (measured: 30 times slower steps). A barrier is removed too early to help.
    """
    broken = jnp.any(jnp.isnan(seen), axis=1).reshape(-1, *[1] * (value.ndim - 1))
    return value + jnp.where(broken, jnp.nan, 0.0).astype(value.dtype)


def view_of(batch: Batch, pages: jax.Array, page: int) -> View:
    """The launch's view; one that hides nothing where it has none. `pages`: i32[B, N], a table of pages of `page` cells."""
    if batch.view is not None:
        return batch.view
    B, N = pages.shape
    return View(
        bases=jnp.broadcast_to(jnp.arange(N, dtype=jnp.int32) * page, (B, N)),
        live=jnp.full((B, N, -(-page // 32)), ALL, jnp.int32),
        window=jnp.full(B, NO_WINDOW, jnp.int32),
        sinks=jnp.zeros(B, jnp.int32),
    )


def hide_pages(batch: Batch, pages: jax.Array, page: int, keep: jax.Array) -> Batch:
    """The launch with pages hidden from each row's last token.

    Args:
        pages: i32[B, N].
        keep: bool[B, J]: page j holds positions j * page to (j + 1) * page - 1; positions beyond are seen.
    """
    view = view_of(batch, pages, page)
    B, N = pages.shape
    J = keep.shape[1]
    kept = jnp.arange(N, dtype=jnp.int32)[None, :] >= (batch.starts // page)[:, None]  # written by this launch
    # two, where a page begins between two pages of positions
    for place in (view.bases // page, (view.bases + page - 1) // page):
        kept = kept | jnp.take_along_axis(keep, jnp.clip(place, 0, J - 1), axis=1) | (place >= J)
    Q = batch.tokens.shape[1]
    if Q == 1:
        return replace(batch, view=replace(view, live=jnp.where(kept[:, :, None], view.live, 0)))
    words = -(-N * page // 32)
    cells = jnp.pad(jnp.repeat(kept, page, axis=1), ((0, 0), (0, words * 32 - N * page)))
    bits = cells.reshape(B, words, 32).astype(jnp.uint32) << jnp.arange(32, dtype=jnp.uint32)[None, None, :]
    packed = jax.lax.bitcast_convert_type(jnp.sum(bits, axis=2, dtype=jnp.uint32), jnp.int32)
    is_last = jnp.arange(Q, dtype=jnp.int32)[None, :] == (batch.counts - 1)[:, None]
    mask = jnp.where(is_last[:, :, None], packed[:, None, :], ALL)
    return replace(batch, view=replace(view, mask=mask if view.mask is None else view.mask & mask))
