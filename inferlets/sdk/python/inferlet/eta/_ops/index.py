"""Index and mask: one function per op. Written by `python -m pie_xla.eta.emit` from pie_xla/eta; do not edit."""

from __future__ import annotations

from typing import Any

from inferlet.eta._recorder import recorder
from inferlet.eta._tensor import Tensor

Value = Any  # a tensor, a number, or a nested list of numbers

__all__ = [
    "causal_mask",
    "gather",
    "gather_row",
    "mask_apply",
    "mask_apply_packed",
    "pack_mask",
    "scatter_add",
    "scatter_set",
    "sink_window_mask",
    "sliding_window_mask",
    "take_along",
    "unpack_mask",
]


def gather(src: Value, idx: Value, axis: int = 0) -> Tensor:
    """src[idx] along an axis, whose place idx's dimensions take; 0 outside.

    src: any[*a@axis, n, *r], idx: int[*s] -> any[*a, *s, *r]
    axis: dimension; a negative one counts from the end.
    """
    return recorder('gather').apply('gather', (src, idx, ), {'axis': axis})


def take_along(src: Value, idx: Value, axis: int = 0) -> Tensor:
    """One index per element of the result, along an axis, as NumPy's take_along_axis; 0 outside.

    src: any[*a@axis, n, *b], idx: int[*a@axis, m, *b] -> any[*a, m, *b]
    axis: dimension; a negative one counts from the end.
    """
    return recorder('take_along').apply('take_along', (src, idx, ), {'axis': axis})


def gather_row(src: Value, idx: Value) -> Tensor:
    """src[i, idx[i]]: one column per row; 0 outside.

    src: any[m, n], idx: int[m] -> any[m]
    """
    return recorder('gather_row').apply('gather_row', (src, idx, ), {})


def scatter_add(base: Value, idx: Value, values: Value, axis: int = 0) -> Tensor:
    """base with values added at idx of an axis; duplicates add up, outside is skipped.

    base: num[*a@axis, n, *r], idx: int[*s], values: num[*v] -> num[*a, n, *r]
    axis: dimension; a negative one counts from the end.
    """
    return recorder('scatter_add').apply('scatter_add', (base, idx, values, ), {'axis': axis})


def scatter_set(base: Value, idx: Value, values: Value, axis: int = 0) -> Tensor:
    """base with values written at idx of an axis; of duplicates the last wins, outside is skipped.

    base: any[*a@axis, n, *r], idx: int[*s], values: any[*v] -> any[*a, n, *r]
    axis: dimension; a negative one counts from the end.
    """
    return recorder('scatter_set').apply('scatter_set', (base, idx, values, ), {'axis': axis})


def mask_apply(x: Value, mask: Value) -> Tensor:
    """x where the mask holds, else -inf.

    x: f32[*s, n], mask: bool[*s~, n] -> f32[*s, n]
    """
    return recorder('mask_apply').apply('mask_apply', (x, mask, ), {})


def mask_apply_packed(x: Value, mask: Value) -> Tensor:
    """x where its bit holds, else -inf; element i is bit i % 32 of word i // 32; one mask per row, or one for all.

    x: f32[*s, n], mask: u32[*s~, (n + 31) // 32] -> f32[*s, n]
    """
    return recorder('mask_apply_packed').apply('mask_apply_packed', (x, mask, ), {})


def pack_mask(mask: Value) -> Tensor:
    """A bool mask as words: element i is bit i % 32 of word i // 32; bits past the end are 0.

    mask: bool[*s, n] -> u32[*s, (n + 31) // 32]
    """
    return recorder('pack_mask').apply('pack_mask', (mask, ), {})


def unpack_mask(words: Value, n: int) -> Tensor:
    """The bool mask that `pack_mask` packed.

    words: u32[*s, (n + 31) // 32] -> bool[*s, n]
    n: length of the mask.
    """
    return recorder('unpack_mask').apply('unpack_mask', (words, ), {'n': n})


def causal_mask(positions: Value, length: int) -> Tensor:
    """Key k is visible to position p when k <= p.

    positions: int[*s] -> bool[*s, length]
    length: number of keys.
    """
    return recorder('causal_mask').apply('causal_mask', (positions, ), {'length': length})


def sliding_window_mask(positions: Value, length: int, window: int) -> Tensor:
    """Key k is visible to position p when k <= p and k + window > p.

    positions: int[*s] -> bool[*s, length]
    length: number of keys.
    window: positions a query sees, its own included.
    """
    return recorder('sliding_window_mask').apply('sliding_window_mask', (positions, ), {'length': length, 'window': window})


def sink_window_mask(positions: Value, length: int, window: int, sink: int) -> Tensor:
    """As sliding_window_mask, and the first `sink` keys stay visible.

    positions: int[*s] -> bool[*s, length]
    length: number of keys.
    window: positions a query sees, its own included.
    sink: first keys that stay visible.
    """
    return recorder('sink_window_mask').apply('sink_window_mask', (positions, ), {'length': length, 'window': window, 'sink': sink})
