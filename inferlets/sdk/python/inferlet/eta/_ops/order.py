"""Order and filter: one function per op. Written by `python -m pie_xla.eta.emit` from pie_xla/eta; do not edit."""

from __future__ import annotations

from typing import Any

from inferlet.eta._recorder import recorder
from inferlet.eta._tensor import Tensor

Value = Any  # a tensor, a number, or a nested list of numbers

__all__ = [
    "pivot_cummass_le",
    "pivot_prob_ge",
    "pivot_rank_le",
    "sort",
    "sort_desc",
    "top_k",
]


def top_k(x: Value, k: int, axis: int = -1) -> tuple[Tensor, Tensor]:
    """The k largest along an axis, largest first; lower index first on ties; NaN counts as -inf.

    x: f32[*a@axis, n, *b] -> values: f32[*a, k, *b], indices: u32[*a, k, *b]
    k: how many.
    axis: dimension; a negative one counts from the end.
    """
    return recorder('top_k').apply('top_k', (x, ), {'k': k, 'axis': axis})


def sort_desc(x: Value, axis: int = -1) -> tuple[Tensor, Tensor]:
    """All along an axis, largest first; lower index first on ties; NaN counts as -inf. Dear: prefer top_k or a filter.

    x: num[*a@axis, n, *b] -> values: num[*a, n, *b], indices: u32[*a, n, *b]
    axis: dimension; a negative one counts from the end.
    """
    return recorder('sort_desc').apply('sort_desc', (x, ), {'axis': axis})


def sort(x: Value, axis: int = -1) -> tuple[Tensor, Tensor]:
    """All along an axis, smallest first, and where each was (the argsort); lower index first on ties; NaN last. Dear.

    x: num[*a@axis, n, *b] -> values: num[*a, n, *b], indices: u32[*a, n, *b]
    axis: dimension; a negative one counts from the end.
    """
    return recorder('sort').apply('sort', (x, ), {'axis': axis})


def pivot_rank_le(x: Value, k: Value) -> Tensor:
    """Top-k filter: an element is kept when fewer than k are greater, so ties are kept together. NaN is never kept.

    x: f32[*s, n], k: int[*s~] -> bool[*s, n]
    """
    return recorder('pivot_rank_le').apply('pivot_rank_le', (x, k, ), {})


def pivot_cummass_le(x: Value, p: Value) -> Tensor:
    """Top-p filter on probabilities: an element is kept when the greater ones sum to less than p, so ties are kept
    together. The greatest is always kept, p >= 1 keeps all; NaN is never kept, a negative counts as 0.

    x: f32[*s, n], p: f32[*s~] -> bool[*s, n]
    """
    return recorder('pivot_cummass_le').apply('pivot_cummass_le', (x, p, ), {})


def pivot_prob_ge(x: Value, t: Value) -> Tensor:
    """Keeps x >= t. With t = min_p * max(x) the min-p filter.

    x: f32[*s, n], t: f32[*s~] -> bool[*s, n]
    """
    return recorder('pivot_prob_ge').apply('pivot_prob_ge', (x, t, ), {})
