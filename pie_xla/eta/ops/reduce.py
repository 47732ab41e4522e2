"""Over the last axis: sums, extremes, argmax, running sums, softmax."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from pie_xla.eta.op import Op, family
from pie_xla.eta.ops.elementwise import _wrap

Array = Any
_op = family("reduce and scan")

_REDUCE = "x: num[*s, n] -> num[*s]"
_SCAN = "x: num[*s, n] -> num[*s, n]"
_TEST = "x: bool[*s, n] -> bool[*s]"
_NORMAL = "x: f32[*s, n] -> f32[*s, n]"


def argmax(x: Array) -> Array:
    """i32 index of the largest element of the last axis: lowest index on ties, never a NaN, 0 when all are NaN.

    Two plain reductions: they vectorize, where a variadic argmax reduction does not.
    """
    n = x.shape[-1]
    usable = jnp.where(jnp.isnan(x), -jnp.inf, x) if x.dtype == np.float32 else x
    best = jnp.max(usable, axis=-1, keepdims=True)
    at = lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1)
    first = jnp.min(jnp.where(x == jnp.broadcast_to(best, x.shape), at, n), axis=-1)
    return jnp.where(first == n, 0, first)


def _argmax_oracle(x: np.ndarray) -> Array:
    def one(row: np.ndarray) -> int:
        best = -1
        for index, value in enumerate(row):
            if value == value and (best < 0 or value > row[best]):
                best = index
        return max(best, 0)

    rows = [one(row) for row in x.reshape(-1, x.shape[-1])]
    return np.asarray(rows, np.int32).reshape(x.shape[:-1])


def _sum(x: Array) -> Array:
    return jnp.sum(x, axis=-1, dtype=x.dtype)


def _exact_sum(x: np.ndarray) -> Array:
    if x.dtype == np.float32:
        return np.sum(x.astype(np.float64), axis=-1).astype(np.float32)
    return _wrap(np.sum(x.astype(np.int64), axis=-1), x.dtype)


def _cumsum_oracle(x: np.ndarray) -> Array:
    if x.dtype == np.float32:
        return np.cumsum(x.astype(np.float64), axis=-1).astype(np.float32)
    return _wrap(np.cumsum(x.astype(np.int64), axis=-1), x.dtype)


def _cumprod_oracle(x: np.ndarray) -> Array:
    if x.dtype == np.float32:
        return np.cumprod(x.astype(np.float64), axis=-1).astype(np.float32)
    out, running = np.empty_like(x), np.ones(x.shape[:-1], np.int64)
    for index in range(x.shape[-1]):
        running = _wrap(running * x[..., index].astype(np.int64), x.dtype).astype(np.int64)
        out[..., index] = _wrap(running, x.dtype)
    return out


def _shifted(x: Array) -> tuple[Array, Array]:
    """x minus the finite maximum of its row, and that row's exponentials."""
    best = jnp.max(x, axis=-1, keepdims=True)
    shifted = x - jnp.where(best == -jnp.inf, 0.0, best)
    return shifted, jnp.exp(shifted)


def softmax(x: Array) -> Array:
    """exp(x) / sum(exp(x)) over the last axis; a row of -inf alone has no mass and gives zeros."""
    _, mass = _shifted(x)
    total = jnp.sum(mass, axis=-1, keepdims=True)
    return mass / jnp.where(total == 0.0, 1.0, total)


def _log_softmax(x: Array) -> Array:
    shifted, mass = _shifted(x)
    total = jnp.sum(mass, axis=-1, keepdims=True)
    return shifted - jnp.log(jnp.where(total == 0.0, 1.0, total))


def _softmax_oracle(x: np.ndarray) -> Array:
    wide = x.astype(np.float64)
    best = wide.max(-1, keepdims=True)
    mass = np.exp(wide - np.where(np.isneginf(best), 0, best))
    total = mass.sum(-1, keepdims=True)
    return np.where(total == 0, 0, mass / np.where(total == 0, 1, total)).astype(np.float32)


def _log_softmax_oracle(x: np.ndarray) -> Array:
    wide = x.astype(np.float64)
    best = wide.max(-1, keepdims=True)
    if_empty = np.isneginf(best)
    shifted = wide - np.where(if_empty, 0, best)
    return (shifted - np.where(if_empty, 0, np.log(np.exp(shifted).sum(-1, keepdims=True)))).astype(np.float32)


OPS: tuple[Op, ...] = (
    _op("reduce_sum", _REDUCE, "Sum of the last axis; integers wrap.", _sum, _exact_sum),
    _op(
        "reduce_max", _REDUCE, "Largest of the last axis; NaN if any is.",
        lambda x: jnp.max(x, -1), lambda x: x.max(-1),
    ),
    _op(
        "reduce_min", _REDUCE, "Smallest of the last axis; NaN if any is.",
        lambda x: jnp.min(x, -1), lambda x: x.min(-1),
    ),
    _op(
        "reduce_argmax", "x: num[*s, n] -> i32[*s]",
        "Index of the largest of the last axis: lowest index on ties, never a NaN, 0 when all are NaN.",
        argmax, _argmax_oracle, cost="2 * elements",
    ),
    _op("reduce_any", _TEST, "Whether any of the last axis holds.", lambda x: jnp.any(x, -1), lambda x: x.any(-1)),
    _op("reduce_all", _TEST, "Whether all of the last axis hold.", lambda x: jnp.all(x, -1), lambda x: x.all(-1)),
    _op(
        "cumsum", _SCAN, "Running sum of the last axis, inclusive; integers wrap.",
        lambda x: jnp.cumsum(x, axis=-1, dtype=x.dtype), _cumsum_oracle, cost="log2(n) * elements",
    ),
    _op(
        "cumprod", _SCAN, "Running product of the last axis, inclusive; integers wrap.",
        lambda x: jnp.cumprod(x, axis=-1, dtype=x.dtype), _cumprod_oracle, cost="log2(n) * elements",
    ),
    _op(
        "softmax", _NORMAL,
        "exp(x) / sum(exp(x)) over the last axis; NaN or +inf make the row NaN; only -inf gives zeros.",
        softmax, _softmax_oracle, cost="12 * elements",
    ),
    _op(
        "log_softmax", _NORMAL, "log(softmax(x)), without underflow; a row of -inf alone stays -inf.",
        _log_softmax, _log_softmax_oracle, cost="12 * elements",
    ),
)  # fmt: skip
