"""Reading and writing by index. Reading outside gives 0, writing outside is skipped; a negative index is outside."""

from __future__ import annotations

import itertools
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from pie_xla.eta.op import Op, family
from pie_xla.eta.rules import Attr

Array = Any
_op = family("index and mask")

_AXIS = Attr("axis", "axis", "dimension; a negative one counts from the end", default=0)
_UPDATES = ("fits(v, a + s + r)",)
_SCATTER_COST = "size(a) * n * size(r) + 8 * size(a) * size(s) * size(r)"
_LENGTH = Attr("length", "int", "number of keys", 1)


def _inside(idx: Array, extent: int) -> tuple[Array, Array]:
    """bool and i32: whether each index is inside, and the index (0 where it is not)."""
    inside = (idx >= 0) & (idx < extent)
    return inside, jnp.where(inside, idx, 0).astype(jnp.int32)


def _gather(src: Array, idx: Array, axis: int) -> Array:
    axis %= src.ndim
    inside, safe = _inside(idx, src.shape[axis])
    taken = jnp.take(src, safe, axis=axis, mode="clip")
    keep = lax.broadcast_in_dim(inside, taken.shape, tuple(range(axis, axis + idx.ndim)))
    return jnp.where(keep, taken, jnp.zeros_like(taken))


def _gather_oracle(src: np.ndarray, idx: np.ndarray, axis: int) -> Array:
    lines = np.moveaxis(src, axis, 0)
    out = np.zeros((*idx.shape, *lines.shape[1:]), src.dtype)
    for at in np.ndindex(idx.shape):
        if 0 <= int(idx[at]) < len(lines):
            out[at] = lines[int(idx[at])]
    # idx's dimensions go where the axis was
    return np.moveaxis(out, range(idx.ndim), range(axis % src.ndim, axis % src.ndim + idx.ndim))


def _take_along(src: Array, idx: Array, axis: int) -> Array:
    inside, safe = _inside(idx, src.shape[axis])
    taken = jnp.take_along_axis(src, safe, axis=axis, mode="clip")
    return jnp.where(inside, taken, jnp.zeros_like(taken))


def _take_along_oracle(src: np.ndarray, idx: np.ndarray, axis: int) -> Array:
    out = np.zeros(idx.shape, src.dtype)
    for at in np.ndindex(idx.shape):
        place = list(at)
        place[axis] = int(idx[at])
        if 0 <= place[axis] < src.shape[axis]:
            out[at] = src[tuple(place)]
    return out


def _gather_row(src: Array, idx: Array) -> Array:
    inside, safe = _inside(idx, src.shape[1])
    taken = jnp.take_along_axis(src, safe[:, None], axis=1, mode="clip")[:, 0]
    return jnp.where(inside, taken, jnp.zeros_like(taken))


def _gather_row_oracle(src: np.ndarray, idx: np.ndarray) -> Array:
    picked = [row[int(i)] if 0 <= int(i) < len(row) else 0 for row, i in zip(src, idx, strict=True)]
    return np.asarray(picked, src.dtype)


def _flat(base: Array, idx: Array, values: Array, axis: int) -> tuple[Array, Array, Array]:
    """The base with the axis first, target line per update (n where it is outside: dropped), values as [S, rest...]."""
    axis %= base.ndim
    n, rest = base.shape[axis], base.shape[:axis] + base.shape[axis + 1 :]
    inside = (idx >= 0) & (idx < n)
    target = jnp.where(inside, idx.astype(jnp.int32), n).reshape(-1)
    full = jnp.broadcast_to(values, rest[:axis] + idx.shape + rest[axis:])
    full = jnp.moveaxis(full, range(axis, axis + idx.ndim), range(idx.ndim))
    return jnp.moveaxis(base, axis, 0), target, full.reshape((-1, *rest))


def _scatter_add(base: Array, idx: Array, values: Array, axis: int) -> Array:
    lines, target, updates = _flat(base, idx, values, axis)
    return jnp.moveaxis(lines.at[target].add(updates, mode="drop"), 0, axis)


def _scatter_set(base: Array, idx: Array, values: Array, axis: int) -> Array:
    # XLA leaves duplicates unordered, so the last update of each line is found first.
    base, target, rows = _flat(base, idx, values, axis)
    order = lax.iota(jnp.int32, target.shape[0])
    last = jnp.full((base.shape[0],), -1, jnp.int32).at[target].max(order, mode="drop")
    written = lax.broadcast_in_dim(last >= 0, base.shape, (0,))
    made = jnp.where(written, jnp.take(rows, jnp.maximum(last, 0), axis=0, mode="clip"), base)
    return jnp.moveaxis(made, 0, axis)


def _scatter_oracle(add: bool) -> Any:
    def oracle(base: np.ndarray, idx: np.ndarray, values: np.ndarray, axis: int) -> Array:
        out: Array = base.astype(np.float64 if base.dtype == np.float32 else np.int64)
        before, after = base.shape[: axis % base.ndim], base.shape[axis % base.ndim + 1 :]
        full = np.broadcast_to(values, before + idx.shape + after)
        for a, at in itertools.product(np.ndindex(before), np.ndindex(idx.shape)):
            if 0 <= int(idx[at]) < base.shape[axis]:
                place, update = (*a, int(idx[at])), full[(*a, *at)]
                out[place] = out[place] + update if add else update
        if base.dtype in (np.float32, np.bool_):
            return out.astype(base.dtype)
        return (out & 0xFFFFFFFF).astype(np.uint32).view(base.dtype)

    return oracle


def _fill(mask: Array, x: Array) -> Array:
    return jnp.where(jnp.broadcast_to(mask, x.shape), x, -jnp.inf)


def _mask_apply(x: Array, mask: Array) -> Array:
    return _fill(mask.reshape((1,) * (x.ndim - mask.ndim) + mask.shape), x)


def _places(rank: int) -> Array:
    """u32[1, ..., 32] of that rank: 0 to 31."""
    return lax.broadcasted_iota(jnp.uint32, (1,) * (rank - 1) + (32,), rank - 1)


def _unpack(words: Array, n: int) -> Array:
    bits = (words[..., None] >> _places(words.ndim + 1)) & 1
    return bits.reshape((*words.shape[:-1], -1))[..., :n] == 1


def _pack(mask: Array) -> Array:
    n = mask.shape[-1]
    count = -(-n // 32)
    widths = [(0, 0, 0)] * (mask.ndim - 1) + [(0, count * 32 - n, 0)]
    bits = lax.pad(mask.astype(jnp.uint32), jnp.uint32(0), widths).reshape((*mask.shape[:-1], count, 32))
    return jnp.sum(bits << _places(bits.ndim), axis=-1, dtype=jnp.uint32)


def _unpack_oracle(words: np.ndarray, n: int) -> Array:
    return np.stack([words[..., i // 32] >> np.uint32(i % 32) & np.uint32(1) for i in range(n)], -1) == 1


def _pack_oracle(mask: np.ndarray) -> Array:
    out = np.zeros((*mask.shape[:-1], -(-mask.shape[-1] // 32)), np.uint32)
    for i in range(mask.shape[-1]):
        out[..., i // 32] |= mask[..., i].astype(np.uint32) << np.uint32(i % 32)
    return out


def _mask_apply_packed(x: Array, mask: Array) -> Array:
    return _mask_apply(x, _unpack(mask, x.shape[-1]))


def _mask_packed_oracle(x: np.ndarray, mask: np.ndarray) -> Array:
    return np.where(_unpack_oracle(mask, x.shape[-1]), x, np.float32(-np.inf))


def _window_mask(positions: Array, length: int, window: int, sink: int = 0) -> Array:
    # Differences are taken on i32 after clamping: positions may be unsigned, and 2**30 or more is past any key.
    own = jnp.minimum(positions, 2**30).astype(jnp.int32)
    own = jnp.maximum(own, -1)[..., None]
    key = jnp.broadcast_to(lax.iota(jnp.int32, length), (*positions.shape, length))
    own = jnp.broadcast_to(own, key.shape)
    return (key <= own) & ((own - key < window) | (key < sink))


def _window_oracle(positions: np.ndarray, length: int, window: int, sink: int = 0) -> Array:
    out = np.zeros((*positions.shape, length), bool)
    for at in np.ndindex(positions.shape):
        own = int(positions[at])
        for key in range(length):
            out[(*at, key)] = key <= own and (key + window > own or key < sink)
    return out


_WIDE = 1 << 30
_WINDOW = Attr("window", "int", "positions a query sees, its own included", 1)
_SINK = Attr("sink", "int", "first keys that stay visible", 0)
_MASK = "positions: int[*s] -> bool[*s, length]"

OPS: tuple[Op, ...] = (
    _op(
        "gather", "src: any[*a@axis, n, *r], idx: int[*s] -> any[*a, *s, *r]",
        "src[idx] along an axis, whose place idx's dimensions take; 0 outside.",
        _gather, _gather_oracle, attrs=(_AXIS,),
    ),
    _op(
        "take_along", "src: any[*a@axis, n, *b], idx: int[*a@axis, m, *b] -> any[*a, m, *b]",
        "One index per element of the result, along an axis, as NumPy's take_along_axis; 0 outside.",
        _take_along, _take_along_oracle, attrs=(_AXIS,),
    ),
    _op(
        "gather_row", "src: any[m, n], idx: int[m] -> any[m]", "src[i, idx[i]]: one column per row; 0 outside.",
        _gather_row, _gather_row_oracle, cost="m",
    ),
    _op(
        "scatter_add", "base: num[*a@axis, n, *r], idx: int[*s], values: num[*v] -> num[*a, n, *r]",
        "base with values added at idx of an axis; duplicates add up, outside is skipped.",
        _scatter_add, _scatter_oracle(True), (_AXIS,), _UPDATES, _SCATTER_COST,
    ),
    _op(
        "scatter_set", "base: any[*a@axis, n, *r], idx: int[*s], values: any[*v] -> any[*a, n, *r]",
        "base with values written at idx of an axis; of duplicates the last wins, outside is skipped.",
        _scatter_set, _scatter_oracle(False), (_AXIS,), _UPDATES, _SCATTER_COST,
    ),
    _op(
        "mask_apply", "x: f32[*s, n], mask: bool[*s~, n] -> f32[*s, n]", "x where the mask holds, else -inf.",
        _mask_apply, lambda x, mask: np.where(mask, x, np.float32(-np.inf)),
    ),
    _op(
        "mask_apply_packed", "x: f32[*s, n], mask: u32[*s~, (n + 31) // 32] -> f32[*s, n]",
        "x where its bit holds, else -inf; element i is bit i % 32 of word i // 32; one mask per row, or one for all.",
        _mask_apply_packed, _mask_packed_oracle,
    ),
    _op(
        "pack_mask", "mask: bool[*s, n] -> u32[*s, (n + 31) // 32]",
        "A bool mask as words: element i is bit i % 32 of word i // 32; bits past the end are 0.", _pack, _pack_oracle,
        cost="2 * elements",
    ),
    _op(
        "unpack_mask", "words: u32[*s, (n + 31) // 32] -> bool[*s, n]", "The bool mask that `pack_mask` packed.",
        _unpack, _unpack_oracle, attrs=(Attr("n", "int", "length of the mask", 1),),
    ),
    _op(
        "causal_mask", _MASK, "Key k is visible to position p when k <= p.",
        lambda positions, length: _window_mask(positions, length, 2 * _WIDE - 1),
        lambda positions, length: np.arange(length) <= positions[..., None].astype(np.int64), attrs=(_LENGTH,),
    ),
    _op(
        "sliding_window_mask", _MASK, "Key k is visible to position p when k <= p and k + window > p.",
        _window_mask, _window_oracle, attrs=(_LENGTH, _WINDOW),
    ),
    _op(
        "sink_window_mask", _MASK, "As sliding_window_mask, and the first `sink` keys stay visible.",
        _window_mask, _window_oracle, attrs=(_LENGTH, _WINDOW, _SINK),
    ),
)  # fmt: skip
