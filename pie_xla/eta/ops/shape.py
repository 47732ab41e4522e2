"""Shapes, joining, cutting, products."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from pie_xla.eta.op import Op, family
from pie_xla.eta.rules import Attr

Array = Any
_op = family("shape and linear")

_SHAPE = Attr("shape", "shape", "extents of the result")
_AXIS = Attr("axis", "axis", "dimension; a negative one counts from the end", default=0)
_LAST = Attr("axis", "axis", "dimension; a negative one counts from the end", default=-1)


def _broadcast(x: Array, shape: tuple[int, ...]) -> Array:
    return lax.broadcast_in_dim(x, shape, tuple(range(x.ndim)))


def _broadcast_oracle(x: np.ndarray, shape: tuple[int, ...]) -> Array:
    return np.broadcast_to(x.reshape(x.shape + (1,) * (len(shape) - x.ndim)), shape).copy()


def _slice_oracle(x: np.ndarray, start: int, stop: int, axis: int, step: int) -> Array:
    return np.take(x, np.arange(start, stop, step), axis=axis)


def _matmul_oracle(a: np.ndarray, b: np.ndarray) -> Array:
    return np.matmul(a.astype(np.float64), b.astype(np.float64)).astype(np.float32)


def _matmul(a: Array, b: Array) -> Array:
    return jnp.matmul(a, b, precision=lax.Precision.HIGHEST)


def _pad(x: Array, value: Array, low: int, high: int, axis: int) -> Array:
    widths = [(0, 0, 0)] * x.ndim
    widths[axis] = (low, high, 0)
    return lax.pad(x, value, widths)


def _pad_oracle(x: np.ndarray, value: np.ndarray, low: int, high: int, axis: int) -> Array:
    rows = np.moveaxis(x, axis, 0)
    ends = [np.full((count, *rows.shape[1:]), value, x.dtype) for count in (low, high)]
    return np.moveaxis(np.concatenate([ends[0], rows, ends[1]]), 0, axis)


OPS: tuple[Op, ...] = (
    _op(
        "reshape", "x: any[*s] -> any[*shape]", "The same elements in row-major order under another shape.",
        lambda x, shape: jnp.reshape(x, shape), lambda x, shape: x.reshape(shape),
        attrs=(_SHAPE,), where=("size(s) == size(shape)",),
    ),
    _op(
        "broadcast", "x: any[*s] -> any[*shape]",
        "Repeat to a larger shape. The dimensions of x line up with the FIRST ones of shape (not the last, as in "
        "NumPy); each equals its target or is 1.",
        _broadcast, _broadcast_oracle, attrs=(_SHAPE,), where=("leads(s, shape)",),
    ),
    _op("transpose", "x: any[m, n] -> any[n, m]", "Rows become columns.", jnp.transpose, lambda x: x.T),
    _op(
        "iota", "-> u32[n]", "0, 1, ... n - 1.",
        lambda n: lax.iota(jnp.uint32, n), lambda n: np.arange(n, dtype=np.uint32),
        attrs=(Attr("n", "int", "length", 1),),
    ),
    _op(
        "concat", "*xs: any[*a@axis, +n, *b] -> any[*a, n, *b]", "The operands, or one list of them, one after another along an axis.",
        lambda *xs, axis: jnp.concatenate(xs, axis), lambda *xs, axis: np.concatenate(xs, axis),
        attrs=(_AXIS,),
    ),
    _op(
        "slice", "x: any[*a@axis, n, *b] -> any[*a, (stop - start + step - 1) // step, *b]",
        "Elements start, start + step, ... below stop along an axis.",
        lambda x, start, stop, axis, step: lax.slice_in_dim(x, start, stop, step, axis), _slice_oracle,
        attrs=(
            Attr("start", "int", "first element"), Attr("stop", "int", "one past the last element"), _AXIS,
            Attr("step", "int", "distance of elements", 1, default=1),
        ),
        where=("0 <= start < stop <= n",),
    ),
    _op(
        "matmul", "a: f32[*s, k], b: f32[k, n] -> f32[*s, n]",
        "Sum over k of a[..., k] * b[k, n], in full f32 precision.",
        _matmul, _matmul_oracle, cost="size(s) * k * n",
    ),
    _op(
        "batch_matmul", "a: f32[*s^, m, k], b: f32[*s^, k, n] -> f32[*s, m, n]",
        "One product of matrices per leading index, in full f32 precision.",
        _matmul, _matmul_oracle, cost="size(s) * m * k * n",
    ),
    _op(
        "pad", "x: any[*a@axis, n, *b], value: any[] -> any[*a, low + n + high, *b]",
        "`low` values before x and `high` after it along an axis.", _pad, _pad_oracle,
        attrs=(Attr("low", "int", "how many before", default=0), Attr("high", "int", "how many after", default=0), _AXIS),
    ),
    _op(
        "flip", "x: any[*a@axis, n, *b] -> any[*a, n, *b]", "The elements of an axis in reverse order.",
        lambda x, axis: jnp.flip(x, axis), lambda x, axis: np.flip(x, axis), attrs=(_LAST,),
    ),
    _op(
        "permute", "x: any[*s] -> any[permute(s, axes)]", "The dimensions in another order: result dimension i is axes[i].",
        lambda x, axes: jnp.transpose(x, axes), lambda x, axes: np.transpose(x, axes),
        attrs=(Attr("axes", "axes", "each dimension of x once; negative ones count from the end"),),
    ),
)  # fmt: skip
