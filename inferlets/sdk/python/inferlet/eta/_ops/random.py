"""Random: one function per op. Written by `python -m pie_xla.eta.emit` from pie_xla/eta; do not edit."""

from __future__ import annotations

from typing import Any

from inferlet.eta._recorder import recorder
from inferlet.eta._tensor import Tensor

Value = Any  # a tensor, a number, or a nested list of numbers

__all__ = [
    "categorical",
    "gumbel",
    "normal",
    "uniform",
]


def uniform(shape: int | tuple[int, ...], stream: int | None = None, key: Value = None) -> Tensor:
    """Uniform in the open interval (0, 1): odd multiples of 2**-24.

    -> f32[*shape]
    shape: extents of the result.
    stream: which independent stream of the pass; set when traced.
    key: u32[2], from `random_key` and its like; without it the draw follows the pass.
    """
    if key is not None:
        return recorder('uniform').apply('keyed_uniform', (key, ), {'shape': shape})
    return recorder('uniform').apply('uniform', (), {'shape': shape, 'stream': stream})


def gumbel(shape: int | tuple[int, ...], stream: int | None = None, key: Value = None) -> Tensor:
    """Standard Gumbel: argmax(logits + gumbel) draws from softmax(logits).

    -> f32[*shape]
    shape: extents of the result.
    stream: which independent stream of the pass; set when traced.
    key: u32[2], from `random_key` and its like; without it the draw follows the pass.
    """
    if key is not None:
        return recorder('gumbel').apply('keyed_gumbel', (key, ), {'shape': shape})
    return recorder('gumbel').apply('gumbel', (), {'shape': shape, 'stream': stream})


def normal(shape: int | tuple[int, ...], stream: int | None = None, key: Value = None) -> Tensor:
    """Standard normal, by the Box-Muller transform.

    -> f32[*shape]
    shape: extents of the result.
    stream: which independent stream of the pass; set when traced.
    key: u32[2], from `random_key` and its like; without it the draw follows the pass.
    """
    if key is not None:
        return recorder('normal').apply('keyed_normal', (key, ), {'shape': shape})
    return recorder('normal').apply('normal', (), {'shape': shape, 'stream': stream})


def categorical(x: Value, stream: int | None = None, key: Value = None) -> Tensor:
    """One index per row drawn from softmax(x), by one uniform per row. NaN and -inf are never drawn; with nothing left
    0; +inf takes all.

    x: f32[*s, n] -> i32[*s]
    stream: which independent stream of the pass; set when traced.
    key: u32[2], from `random_key` and its like; without it the draw follows the pass.
    """
    if key is not None:
        return recorder('categorical').apply('keyed_categorical', (key, x, ), {})
    return recorder('categorical').apply('categorical', (x, ), {'stream': stream})
