"""Which cells of a block of pages the queries of a row see."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from poem.spec import View


class Sight:
    """`Batch.view` for blocks of `per_block` pages, in the layout of the scores [B, 1, S, G*Q]."""

    def __init__(self, view: View, positions: jax.Array, groups: int, page: int, per_block: int) -> None:
        self._groups, self._page, self._per_block = groups, page, per_block
        self._bases, self._live = padded(view.bases, per_block), padded(view.live, per_block)
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


def padded(per_page: jax.Array, per_block: int) -> jax.Array:
    """[B, N, ...] with N filled up to whole blocks."""
    fill = -per_page.shape[1] % per_block
    return jnp.pad(per_page, ((0, 0), (0, fill), *((0, 0) for _ in per_page.shape[2:])))
