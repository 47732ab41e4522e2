"""Reduce and scan: one function per op. Written by `python -m pie_xla.eta.emit` from pie_xla/eta; do not edit."""

from __future__ import annotations

from typing import Any

from inferlet.eta._recorder import recorder
from inferlet.eta._tensor import Tensor

Value = Any  # a tensor, a number, or a nested list of numbers

__all__ = [
    "cummax",
    "cumprod",
    "cumsum",
    "log_softmax",
    "logsumexp",
    "reduce_all",
    "reduce_any",
    "reduce_argmax",
    "reduce_argmin",
    "reduce_max",
    "reduce_min",
    "reduce_prod",
    "reduce_sum",
    "softmax",
]


def reduce_sum(x: Value, axis: int = -1) -> Tensor:
    """Sum along an axis; integers wrap.

    x: num[*a@axis, n, *b] -> num[*a, *b]
    axis: dimension; a negative one counts from the end.
    """
    return recorder('reduce_sum').apply('reduce_sum', (x, ), {'axis': axis})


def reduce_prod(x: Value, axis: int = -1) -> Tensor:
    """Product along an axis; integers wrap.

    x: num[*a@axis, n, *b] -> num[*a, *b]
    axis: dimension; a negative one counts from the end.
    """
    return recorder('reduce_prod').apply('reduce_prod', (x, ), {'axis': axis})


def reduce_max(x: Value, axis: int = -1) -> Tensor:
    """Largest along an axis; NaN if any is.

    x: num[*a@axis, n, *b] -> num[*a, *b]
    axis: dimension; a negative one counts from the end.
    """
    return recorder('reduce_max').apply('reduce_max', (x, ), {'axis': axis})


def reduce_min(x: Value, axis: int = -1) -> Tensor:
    """Smallest along an axis; NaN if any is.

    x: num[*a@axis, n, *b] -> num[*a, *b]
    axis: dimension; a negative one counts from the end.
    """
    return recorder('reduce_min').apply('reduce_min', (x, ), {'axis': axis})


def reduce_argmax(x: Value, axis: int = -1) -> Tensor:
    """Index of the largest along an axis: lowest index on ties, never a NaN, 0 when all are NaN.

    x: num[*a@axis, n, *b] -> i32[*a, *b]
    axis: dimension; a negative one counts from the end.
    """
    return recorder('reduce_argmax').apply('reduce_argmax', (x, ), {'axis': axis})


def reduce_argmin(x: Value, axis: int = -1) -> Tensor:
    """Index of the smallest along an axis: lowest index on ties, never a NaN, 0 when all are NaN.

    x: num[*a@axis, n, *b] -> i32[*a, *b]
    axis: dimension; a negative one counts from the end.
    """
    return recorder('reduce_argmin').apply('reduce_argmin', (x, ), {'axis': axis})


def reduce_any(x: Value, axis: int = -1) -> Tensor:
    """Whether any along an axis holds.

    x: bool[*a@axis, n, *b] -> bool[*a, *b]
    axis: dimension; a negative one counts from the end.
    """
    return recorder('reduce_any').apply('reduce_any', (x, ), {'axis': axis})


def reduce_all(x: Value, axis: int = -1) -> Tensor:
    """Whether all along an axis hold.

    x: bool[*a@axis, n, *b] -> bool[*a, *b]
    axis: dimension; a negative one counts from the end.
    """
    return recorder('reduce_all').apply('reduce_all', (x, ), {'axis': axis})


def logsumexp(x: Value, axis: int = -1) -> Tensor:
    """log(sum(exp(x))) along an axis, without overflow; -inf when all are.

    x: f32[*a@axis, n, *b] -> f32[*a, *b]
    axis: dimension; a negative one counts from the end.
    """
    return recorder('logsumexp').apply('logsumexp', (x, ), {'axis': axis})


def cumsum(x: Value, axis: int = -1) -> Tensor:
    """Running sum along an axis, inclusive; integers wrap.

    x: num[*a@axis, n, *b] -> num[*a, n, *b]
    axis: dimension; a negative one counts from the end.
    """
    return recorder('cumsum').apply('cumsum', (x, ), {'axis': axis})


def cumprod(x: Value, axis: int = -1) -> Tensor:
    """Running product along an axis, inclusive; integers wrap.

    x: num[*a@axis, n, *b] -> num[*a, n, *b]
    axis: dimension; a negative one counts from the end.
    """
    return recorder('cumprod').apply('cumprod', (x, ), {'axis': axis})


def cummax(x: Value, axis: int = -1) -> Tensor:
    """Running maximum along an axis; NaN from the first NaN on.

    x: num[*a@axis, n, *b] -> num[*a, n, *b]
    axis: dimension; a negative one counts from the end.
    """
    return recorder('cummax').apply('cummax', (x, ), {'axis': axis})


def softmax(x: Value, axis: int = -1) -> Tensor:
    """exp(x) / sum(exp(x)) along an axis; NaN or +inf make the row NaN; only -inf gives zeros.

    x: f32[*a@axis, n, *b] -> f32[*a, n, *b]
    axis: dimension; a negative one counts from the end.
    """
    return recorder('softmax').apply('softmax', (x, ), {'axis': axis})


def log_softmax(x: Value, axis: int = -1) -> Tensor:
    """log(softmax(x)), without underflow; a row of -inf alone stays -inf.

    x: f32[*a@axis, n, *b] -> f32[*a, n, *b]
    axis: dimension; a negative one counts from the end.
    """
    return recorder('log_softmax').apply('log_softmax', (x, ), {'axis': axis})
