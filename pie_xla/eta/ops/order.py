"""Order and filters: top-k, sort, and the sort-free filters of top-k, top-p and min-p.

The filters look for each row's threshold among its WINDOW largest elements, which is nearly always enough, and search
all bit patterns of f32 when it is not. Both give the exact threshold. Under vmap `lax.cond` would pay both sides for
every batch; through `custom_vmap` the batch becomes leading dimensions of one call, and one branch serves it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_batching import custom_vmap

from pie_xla.eta.op import Op, family
from pie_xla.eta.ops.reduce import AXIS
from pie_xla.eta.rules import Attr

Array = Any
_op = family("order and filter")

WINDOW = 128
_barrier: Any = lax.optimization_barrier


def batchwise(fn: Callable[..., Array]) -> Callable[..., Array]:
    """A function of any leading dimensions, kept whole under vmap: mapped axes become leading dimensions."""
    wrapped = custom_vmap(fn)

    @wrapped.def_vmap
    def rule(axis_size: int, in_batched: list[bool], *args: Array) -> tuple[Array, bool]:
        full = [a if b else jnp.broadcast_to(a, (axis_size, *a.shape)) for a, b in zip(args, in_batched, strict=True)]
        return wrapped(*full), True

    return wrapped


def _usable(x: Array) -> Array:
    """NaN as -inf, and one zero: the total order of XLA tells -0.0 from 0.0."""
    return jnp.where(jnp.isnan(x), -jnp.inf, jnp.where(x == 0.0, 0.0, x))


def _largest(x: Array, k: int) -> tuple[Array, Array]:
    # XLA folds a slice of the result into the top-k and then sorts everything: 200 times slower at 49k.
    values, indices = _barrier(tuple(lax.top_k(x, k)))
    return values, indices


def _top_k(x: Array, k: int, axis: int = -1) -> tuple[Array, Array]:
    values, indices = _largest(_usable(jnp.moveaxis(x, axis, -1)), k)
    return jnp.moveaxis(values, -1, axis), jnp.moveaxis(indices.astype(jnp.uint32), -1, axis)


def _sort(x: Array, axis: int) -> tuple[Array, Array]:
    at = lax.broadcasted_iota(jnp.uint32, x.shape, axis % x.ndim)
    values, indices = lax.sort((x, at), dimension=axis % x.ndim, is_stable=True, num_keys=1)
    return values, indices


def _sort_desc(x: Array, axis: int = -1) -> tuple[Array, Array]:
    at = lax.broadcasted_iota(jnp.uint32, x.shape, axis % x.ndim)
    floats = x.dtype == np.float32
    falling = -_usable(x) if floats else ~x  # ~ turns the order of integers round, and nothing overflows
    values, indices = lax.sort((falling, at), dimension=axis % x.ndim, is_stable=True, num_keys=1)
    return (-values if floats else ~values), indices


def _top_k_oracle(x: np.ndarray, k: int, axis: int = -1) -> tuple[Array, Array]:
    rows = np.moveaxis(x, axis, -1)
    if x.dtype == np.float32:
        rows = np.where(np.isnan(rows), -np.inf, rows).astype(np.float32)
    falling = -rows if x.dtype == np.float32 else -rows.astype(np.int64)
    indices = np.argsort(falling, axis=-1, kind="stable")[..., :k]
    values = np.take_along_axis(rows, indices, -1)
    return np.moveaxis(values, -1, axis), np.moveaxis(indices.astype(np.uint32), -1, axis)


def _sort_oracle(x: np.ndarray, axis: int) -> tuple[Array, Array]:
    indices = np.argsort(x, axis=axis, kind="stable")
    return np.take_along_axis(x, indices, axis), indices.astype(np.uint32)


def _ordered(x: Array) -> Array:
    """u32 keys in the order of f32 values without NaN."""
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def _value(keys: Array) -> Array:
    bits = jnp.where(keys >> 31 == 1, keys ^ jnp.uint32(1 << 31), ~keys)
    return lax.bitcast_convert_type(bits, jnp.float32)


def _search(shape: tuple[int, ...], holds: Callable[[Array], Array]) -> Array:
    """u32[shape]: the largest key for which `holds`, which is true up to a point; 0 when it never is."""

    def round_(index: Array, found: Array) -> Array:
        candidate = found | (jnp.uint32(1) << (31 - index).astype(jnp.uint32))
        return jnp.where(holds(candidate), candidate, found)

    return lax.fori_loop(0, 32, round_, jnp.zeros(shape, jnp.uint32))


@batchwise
def _kth_largest(x: Array, k: Array) -> Array:
    """f32[..., 1]: element k (1 <= k <= n, i32[..., 1]) of each row of x f32[..., n] in descending order."""
    width = min(WINDOW, x.shape[-1])

    def window() -> Array:
        return jnp.take_along_axis(_largest(x, width)[0], jnp.minimum(k, width) - 1, axis=-1)

    def search() -> Array:
        keys = _ordered(x)
        return _value(_search(k.shape, lambda t: jnp.sum(keys >= t, axis=-1, keepdims=True, dtype=jnp.int32) >= k))

    if width == x.shape[-1]:
        return window()
    return lax.cond(jnp.all(k <= width), window, search)


@batchwise
def _mass_threshold(y: Array, p: Array) -> Array:
    """f32[..., 1]: the least t for which the elements of y >= 0 above t sum to less than p (p f32[..., 1] above 0)."""
    width = min(WINDOW, y.shape[-1])
    top = _largest(y, width)[0]
    before = jnp.cumsum(top, axis=-1) - top
    # A tie takes the mass before its first element, so that equal elements are kept or dropped together.
    fresh = jnp.concatenate([jnp.ones_like(top[..., :1], bool), top[..., 1:] != top[..., :-1]], axis=-1)
    above = lax.cummax(jnp.where(fresh, before, 0.0), axis=top.ndim - 1)
    kept = above < jnp.broadcast_to(p, above.shape)
    nearby = jnp.min(jnp.where(kept, top, jnp.inf), axis=-1, keepdims=True)
    inside = jnp.any(~kept, axis=-1, keepdims=True)
    if width == y.shape[-1]:
        return nearby

    def search() -> Array:
        bits = lax.bitcast_convert_type(y, jnp.uint32)

        def heavy(t: Array) -> Array:
            return jnp.sum(jnp.where(bits > t, y, 0.0), axis=-1, keepdims=True) >= p

        last = _search(p.shape, heavy)
        light = ~heavy(jnp.zeros(p.shape, jnp.uint32))
        found = lax.bitcast_convert_type(jnp.where(light, jnp.uint32(0), last + 1), jnp.float32)
        return jnp.where(inside, nearby, found)

    return lax.cond(jnp.all(inside), lambda: nearby, search)


def _per_row(value: Array, x: Array) -> Array:
    """A scalar or one value per row as [..., 1]."""
    return jnp.broadcast_to(value, x.shape[:-1])[..., None]


def _rank_le(x: Array, k: Array) -> Array:
    n = x.shape[-1]
    rank = _per_row(jnp.clip(k, 0, n).astype(jnp.int32), x)
    threshold = _kth_largest(_usable(x), jnp.maximum(rank, 1))
    return (x >= jnp.broadcast_to(threshold, x.shape)) & jnp.broadcast_to(rank > 0, x.shape)


def _rank_le_oracle(x: np.ndarray, k: np.ndarray) -> Array:
    rank = np.broadcast_to(k, x.shape[:-1]).astype(np.int64)
    greater = np.sum(x[..., None, :] > x[..., :, None], axis=-1)
    return ~np.isnan(x) & (greater < rank[..., None])


def _cummass_le(x: Array, p: Array) -> Array:
    mass = jnp.where(x > 0.0, x, 0.0)
    share = _per_row(p, x)
    everything = share >= 1.0
    # A row that keeps everything must not send its whole batch to the search: it asks for almost nothing.
    asked = jnp.where(everything | ~(share > 0.0), jnp.float32(1e-30), share)
    keep = mass >= jnp.broadcast_to(_mass_threshold(mass, asked), x.shape)
    best = mass == jnp.broadcast_to(jnp.max(mass, axis=-1, keepdims=True), x.shape)
    return (keep | best | jnp.broadcast_to(everything, x.shape)) & ~jnp.isnan(x)


def _cummass_le_oracle(x: np.ndarray, p: np.ndarray) -> Array:
    mass = np.where(x > 0, x, 0).astype(np.float64)
    share = np.broadcast_to(p, x.shape[:-1])[..., None]
    above = np.sum(np.where(mass[..., None, :] > mass[..., :, None], mass[..., None, :], 0), axis=-1)
    best = mass == mass.max(-1, keepdims=True)
    return ((above < share) | best | (share >= 1)) & ~np.isnan(x)


def _prob_ge(x: Array, t: Array) -> Array:
    return x >= jnp.broadcast_to(_per_row(t, x), x.shape)


_FILTER_COST = "48 * elements"
_PAIR = "x: {1}[*a@axis, n, *b] -> values: {1}[*a, {0}, *b], indices: u32[*a, {0}, *b]"

OPS: tuple[Op, ...] = (
    _op(
        "top_k", _PAIR.format("k", "f32"),
        "The k largest along an axis, largest first; lower index first on ties; NaN counts as -inf.",
        _top_k, _top_k_oracle, attrs=(Attr("k", "int", "how many", 1), AXIS), where=("k <= n",),
        cost="elements * (2 + log2(k))",
    ),
    _op(
        "sort_desc", _PAIR.format("n", "num"),
        "All along an axis, largest first; lower index first on ties; NaN counts as -inf. "
        "Dear: prefer top_k or a filter.",
        _sort_desc, lambda x, axis: _top_k_oracle(x, x.shape[axis], axis), attrs=(AXIS,), cost="4 * elements * log2(n)",
    ),
    _op(
        "sort", _PAIR.format("n", "num"),
        "All along an axis, smallest first, and where each was (the argsort); lower index first on ties; NaN last. Dear.",
        _sort, _sort_oracle, attrs=(AXIS,), cost="4 * elements * log2(n)",
    ),
    _op(
        "pivot_rank_le", "x: f32[*s, n], k: int[*s~] -> bool[*s, n]",
        "Top-k filter: an element is kept when fewer than k are greater, so ties are kept together. NaN is never kept.",
        _rank_le, _rank_le_oracle, cost=_FILTER_COST,
    ),
    _op(
        "pivot_cummass_le", "x: f32[*s, n], p: f32[*s~] -> bool[*s, n]",
        "Top-p filter on probabilities: an element is kept when the greater ones sum to less than p, so ties are kept "
        "together. The greatest is always kept, p >= 1 keeps all; NaN is never kept, a negative counts as 0.",
        _cummass_le, _cummass_le_oracle, cost=_FILTER_COST,
    ),
    _op(
        "pivot_prob_ge", "x: f32[*s, n], t: f32[*s~] -> bool[*s, n]",
        "Keeps x >= t. With t = min_p * max(x) the min-p filter.",
        _prob_ge, lambda x, t: x >= np.broadcast_to(t, x.shape[:-1])[..., None],
    ),
)  # fmt: skip
