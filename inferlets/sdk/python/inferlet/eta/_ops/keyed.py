"""Keyed random: one function per op. Written by `python -m pie_xla.eta.emit` from pie_xla/eta; do not edit."""

from __future__ import annotations

from typing import Any

from inferlet.eta._recorder import recorder
from inferlet.eta._tensor import Tensor

Value = Any  # a tensor, a number, or a nested list of numbers

__all__ = [
    "fold_in",
    "pass_key",
    "random_bits",
    "seed_key",
    "split_key",
]


def pass_key(stream: int | None = None) -> Tensor:
    """A key of this pass: another one for each seed, pass, stream and iteration of a loop.

    -> u32[2]
    stream: which independent stream of the pass; set when traced.
    """
    return recorder('pass_key').apply('pass_key', (), {'stream': stream})


def seed_key(seed: Value) -> Tensor:
    """The key of a number.

    seed: int[] -> u32[2]
    """
    return recorder('seed_key').apply('seed_key', (seed, ), {})


def fold_in(key: Value, data: Value) -> Tensor:
    """Another key for each number.

    key: u32[2], data: int[] -> u32[2]
    """
    return recorder('fold_in').apply('fold_in', (key, data, ), {})


def split_key(key: Value, n: int = 2) -> Tensor:
    """n keys that no `fold_in` gives.

    key: u32[2] -> u32[n, 2]
    n: how many.
    """
    return recorder('split_key').apply('split_key', (key, ), {'n': n})


def random_bits(key: Value, shape: int | tuple[int, ...]) -> Tensor:
    """Random words of a key.

    key: u32[2] -> u32[*shape]
    shape: extents of the result.
    """
    return recorder('random_bits').apply('random_bits', (key, ), {'shape': shape})
