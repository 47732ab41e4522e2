"""Random values and draws: pure functions of the seed, the pass's ordinal, the stream and the element."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from pie_xla.eta import rng
from pie_xla.eta.op import Op, family
from pie_xla.eta.rules import MAX_STREAM, Attr

Array = Any
_op = family("random")

BLOCK = 256
_LARGEST = np.finfo(np.float32).max  # stands for +inf, so that inf - inf never appears


def _gumbel_oracle(words: np.ndarray) -> Array:
    v = (words.astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-32)
    wide = np.minimum(v, np.float32(1 - 2.0**-24)).astype(np.float64)
    return (-np.log(-np.log1p(-wide))).astype(np.float32)


def _normal_oracle(words: np.ndarray) -> Array:
    pairs = words.reshape(-1, 2)
    v = (pairs[:, 0].astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-32)
    radius = np.sqrt(-2 * np.log(np.minimum(v, np.float32(1 - 2.0**-24)).astype(np.float64)))
    turn = rng.uniform(pairs[:, 1]).astype(np.float64)
    return (radius * np.cos(2 * np.pi * turn)).astype(np.float32)


@dataclass(frozen=True)
class Law:
    """A distribution: its values from u32 words, `words` of them for each value, in JAX and in NumPy."""

    lower: Callable[[Array], Array]
    oracle: Callable[[np.ndarray], Array]
    words: int = 1

    def drawn(self, draw: rng.Draw, shape: tuple[int, ...], stream: int) -> Array:
        return self.lower(draw.bits(stream, self.words * prod(shape))).reshape(shape)

    def drawn_oracle(self, draw: rng.OracleDraw, shape: tuple[int, ...], stream: int) -> Array:
        return self.oracle(draw.bits(stream, self.words * prod(shape))).reshape(shape)

    def keyed(self, key: Array, shape: tuple[int, ...]) -> Array:
        return self.lower(rng.words((key[0], key[1]), self.words * prod(shape))).reshape(shape)

    def keyed_oracle(self, key: np.ndarray, shape: tuple[int, ...]) -> Array:
        pair = (int(key[0]), int(key[1]))
        return self.oracle(rng.OracleDraw.words(pair, self.words * prod(shape))).reshape(shape)


UNIFORM = Law(rng.uniform, rng.uniform)
GUMBEL = Law(rng.gumbel, _gumbel_oracle)
NORMAL = Law(rng.normal, _normal_oracle, 2)


def _first(hit: Array, otherwise: Array) -> Array:
    """i32[..., 1]: index of the first hit of the last axis, else the last index where `otherwise` holds, else 0."""
    n = hit.shape[-1]
    at = lax.broadcasted_iota(jnp.int32, hit.shape, hit.ndim - 1)
    score = jnp.min(jnp.where(hit, at, jnp.where(otherwise, 2 * n - at, 2 * n + 1)), axis=-1, keepdims=True)
    return jnp.where(score < n, score, jnp.where(score <= 2 * n, 2 * n - score, 0))


def pick(words: Array, x: Array) -> Array:
    """i32[*s] from x [*s, n] and one word per row, by the inverse CDF at two levels: the block of 256 that holds the target
    mass, then the element inside it.
    """
    rows, n = x.shape[:-1], x.shape[-1]
    u = rng.uniform(words).reshape((*rows, 1))
    usable = jnp.where(jnp.isnan(x), -jnp.inf, jnp.minimum(x, _LARGEST))
    best = jnp.maximum(jnp.max(usable, axis=-1, keepdims=True), -_LARGEST)
    mass = jnp.exp(usable - jnp.broadcast_to(best, x.shape))
    blocks = -(-n // BLOCK)
    padded = lax.pad(mass, np.float32(0), [(0, 0, 0)] * len(rows) + [(0, blocks * BLOCK - n, 0)])
    padded = padded.reshape((*rows, blocks, BLOCK))
    sums = jnp.sum(padded, axis=-1)
    total = jnp.cumsum(sums, axis=-1)
    target = u * total[..., -1:]
    # A rounded running sum may pass the target at a block without mass: such a block is never the answer.
    block = _first((total > jnp.broadcast_to(target, total.shape)) & (sums > 0.0), sums > 0.0)
    chosen = lax.broadcasted_iota(jnp.int32, sums.shape, sums.ndim - 1) == jnp.broadcast_to(block, sums.shape)
    rest = target - jnp.sum(jnp.where(chosen, total - sums, 0.0), axis=-1, keepdims=True)
    inner = jnp.take_along_axis(padded, block[..., None], axis=-2, mode="clip")[..., 0, :]
    running = jnp.cumsum(inner, axis=-1)
    element = _first((running > jnp.broadcast_to(rest, running.shape)) & (inner > 0.0), inner > 0.0)
    return (block * BLOCK + element)[..., 0]


def pick_oracle(words: np.ndarray, x: np.ndarray) -> Array:
    """As `pick`, by a sorted search."""
    rows = x.reshape(-1, x.shape[-1]).astype(np.float64)
    u = rng.uniform(words).astype(np.float64)
    picks = []
    for row, share in zip(rows, u, strict=True):
        row = np.where(np.isnan(row), -np.inf, row)
        if np.isposinf(row.max()):
            mass = np.isposinf(row).astype(np.float64)
        elif np.isneginf(row.max()):
            picks.append(0)
            continue
        else:
            mass = np.exp(row - row.max()).astype(np.float32).astype(np.float64)
        picks.append(int(np.searchsorted(np.cumsum(mass), share * mass.sum(), side="right")))
    return np.asarray(picks, np.int32).reshape(x.shape[:-1])


def _categorical(draw: rng.Draw, x: Array, stream: int) -> Array:
    return pick(draw.bits(stream, prod(x.shape[:-1])), x)


def _categorical_oracle(draw: rng.OracleDraw, x: np.ndarray, stream: int) -> Array:
    return pick_oracle(draw.bits(stream, prod(x.shape[:-1])), x)


_SHAPE = Attr("shape", "shape", "extents of the result")
_STREAM = Attr("stream", "int", "which independent stream of the pass; set when traced", 0, MAX_STREAM - 1)

OPS: tuple[Op, ...] = (
    _op(
        "uniform", "-> f32[*shape]", "Uniform in the open interval (0, 1): odd multiples of 2**-24.",
        UNIFORM.drawn, UNIFORM.drawn_oracle,
        attrs=(_SHAPE, _STREAM), cost="64 * elements", random=True,
    ),
    _op(
        "gumbel", "-> f32[*shape]", "Standard Gumbel: argmax(logits + gumbel) draws from softmax(logits).",
        GUMBEL.drawn, GUMBEL.drawn_oracle, attrs=(_SHAPE, _STREAM), cost="80 * elements", random=True,
    ),
    _op(
        "normal", "-> f32[*shape]", "Standard normal, by the Box-Muller transform.",
        NORMAL.drawn, NORMAL.drawn_oracle, attrs=(_SHAPE, _STREAM), cost="200 * elements", random=True,
    ),
    _op(
        "categorical", "x: f32[*s, n] -> i32[*s]",
        "One index per row drawn from softmax(x), by one uniform per row. NaN and -inf are never drawn; with nothing "
        "left 0; +inf takes all.",
        _categorical, _categorical_oracle, attrs=(_STREAM,), cost="16 * elements", random=True,
    ),
)  # fmt: skip
