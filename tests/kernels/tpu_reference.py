"""The contract of JAX's ragged paged attention, in plain jnp.

JAX 0.10.2 cannot run the kernel itself on CPU: neither of Pallas's interpreters knows its reshaped references.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def reference(
    q: jax.Array,
    kv_pages: jax.Array,
    lengths: jax.Array,
    table: jax.Array,
    bounds: jax.Array,
    live: jax.Array,
    **options: Any,
) -> jax.Array:
    """The kernel's contract in plain jnp; NaN where it has no query, as bad as the kernel may be."""
    assert options["num_kv_pages_per_block"] >= 1 and options["num_queries_per_block"] >= 1
    tokens, heads = q.shape[:2]
    group = heads // (kv_pages.shape[2] // 2)
    t = jnp.arange(tokens, dtype=jnp.int32)
    row = jnp.clip(jnp.searchsorted(bounds, t, side="right").astype(jnp.int32) - 1, 0, len(lengths) - 1)
    cell = lengths[row] - (bounds[row + 1] - t)  # each query's own cell
    cells = kv_pages[table[row]].reshape(tokens, -1, *kv_pages.shape[2:])  # [T, N*page, 2K, d]
    keys, values = jnp.repeat(cells[:, :, 0::2], group, axis=2), jnp.repeat(cells[:, :, 1::2], group, axis=2)
    scores = jnp.einsum("thd,tmhd->thm", q, keys) * options["sm_scale"]
    if options["soft_cap"] is not None:
        scores = options["soft_cap"] * jnp.tanh(scores / options["soft_cap"])
    back = cell[:, None] - jnp.arange(cells.shape[1], dtype=jnp.int32)[None, :]
    seen = (back >= 0) & (back < (options["sliding_window"] or cells.shape[1]))
    weights = jax.nn.softmax(jnp.where(seen[:, None, :], scores, -jnp.inf), axis=-1)
    out = jnp.einsum("thm,tmhd->thd", weights, values)
    return jnp.where((t < bounds[live[0]])[:, None, None], out, jnp.nan)
