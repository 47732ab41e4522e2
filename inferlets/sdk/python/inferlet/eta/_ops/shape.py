"""Shape and linear: one function per op. Written by `python -m pie_xla.eta.emit` from pie_xla/eta; do not edit."""

from __future__ import annotations

from typing import Any

from inferlet.eta._parts import parts
from inferlet.eta._recorder import recorder
from inferlet.eta._tensor import Tensor

Value = Any  # a tensor, a number, or a nested list of numbers

__all__ = [
    "batch_matmul",
    "broadcast",
    "concat",
    "flip",
    "iota",
    "matmul",
    "pad",
    "permute",
    "reshape",
    "slice_",
    "transpose",
]


def reshape(x: Value, shape: int | tuple[int, ...]) -> Tensor:
    """The same elements in row-major order under another shape.

    x: any[*s] -> any[*shape]
    shape: extents of the result.
    """
    return recorder('reshape').apply('reshape', (x, ), {'shape': shape})


def broadcast(x: Value, shape: int | tuple[int, ...]) -> Tensor:
    """Repeat to a larger shape. The dimensions of x line up with the FIRST ones of shape (not the last, as in NumPy);
    each equals its target or is 1.

    x: any[*s] -> any[*shape]
    shape: extents of the result.
    """
    return recorder('broadcast').apply('broadcast', (x, ), {'shape': shape})


def transpose(x: Value) -> Tensor:
    """Rows become columns.

    x: any[m, n] -> any[n, m]
    """
    return recorder('transpose').apply('transpose', (x, ), {})


def iota(n: int) -> Tensor:
    """0, 1, ... n - 1.

    -> u32[n]
    n: length.
    """
    return recorder('iota').apply('iota', (), {'n': n})


def concat(*xs: Value, axis: int = 0) -> Tensor:
    """The operands, or one list of them, one after another along an axis.

    *xs: any[*a@axis, +n, *b] -> any[*a, n, *b]
    axis: dimension; a negative one counts from the end.
    """
    return recorder('concat').apply('concat', parts(xs), {'axis': axis})


def slice_(x: Value, start: int, stop: int, axis: int = 0, step: int = 1) -> Tensor:
    """Elements start, start + step, ... below stop along an axis.

    x: any[*a@axis, n, *b] -> any[*a, (stop - start + step - 1) // step, *b]
    start: first element.
    stop: one past the last element.
    axis: dimension; a negative one counts from the end.
    step: distance of elements.
    """
    return recorder('slice').apply('slice', (x, ), {'start': start, 'stop': stop, 'axis': axis, 'step': step})


def matmul(a: Value, b: Value) -> Tensor:
    """Sum over k of a[..., k] * b[k, n], in full f32 precision.

    a: f32[*s, k], b: f32[k, n] -> f32[*s, n]
    """
    return recorder('matmul').apply('matmul', (a, b, ), {})


def batch_matmul(a: Value, b: Value) -> Tensor:
    """One product of matrices per leading index, in full f32 precision.

    a: f32[*s^, m, k], b: f32[*s^, k, n] -> f32[*s, m, n]
    """
    return recorder('batch_matmul').apply('batch_matmul', (a, b, ), {})


def pad(x: Value, value: Value, low: int = 0, high: int = 0, axis: int = 0) -> Tensor:
    """`low` values before x and `high` after it along an axis.

    x: any[*a@axis, n, *b], value: any[] -> any[*a, low + n + high, *b]
    low: how many before.
    high: how many after.
    axis: dimension; a negative one counts from the end.
    """
    return recorder('pad').apply('pad', (x, value, ), {'low': low, 'high': high, 'axis': axis})


def flip(x: Value, axis: int = -1) -> Tensor:
    """The elements of an axis in reverse order.

    x: any[*a@axis, n, *b] -> any[*a, n, *b]
    axis: dimension; a negative one counts from the end.
    """
    return recorder('flip').apply('flip', (x, ), {'axis': axis})


def permute(x: Value, axes: tuple[int, ...]) -> Tensor:
    """The dimensions in another order: result dimension i is axes[i].

    x: any[*s] -> any[permute(s, axes)]
    axes: each dimension of x once; negative ones count from the end.
    """
    return recorder('permute').apply('permute', (x, ), {'axes': axes})
