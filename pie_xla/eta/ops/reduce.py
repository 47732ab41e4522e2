"""Along one axis (the last unless named): sums, products, extremes and where they are, running sums, softmax."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from pie_xla.eta.op import Op, family
from pie_xla.eta.rules import Attr

Array = Any
_op = family("reduce and scan")

AXIS = Attr("axis", "axis", "dimension; a negative one counts from the end", default=-1)

_REDUCE = "x: num[*a@axis, n, *b] -> num[*a, *b]"
_SCAN = "x: num[*a@axis, n, *b] -> num[*a, n, *b]"
_TEST = "x: bool[*a@axis, n, *b] -> bool[*a, *b]"
_INDEX = "x: num[*a@axis, n, *b] -> i32[*a, *b]"
_NORMAL = "x: f32[*a@axis, n, *b] -> f32[*a, n, *b]"


def _best(x: Array, axis: int, extreme: Callable[..., Array], worst: float) -> Array:
    # Two plain reductions: they vectorize, where a variadic argmax reduction does not.
    axis %= x.ndim
    n = x.shape[axis]
    usable = jnp.where(jnp.isnan(x), worst, x) if x.dtype == np.float32 else x
    best = extreme(usable, axis=axis, keepdims=True)
    at = lax.broadcasted_iota(jnp.int32, x.shape, axis)
    first = jnp.min(jnp.where(x == jnp.broadcast_to(best, x.shape), at, n), axis=axis)
    return jnp.where(first == n, 0, first)


def argmax(x: Array, axis: int = -1) -> Array:
    """i32 index of the largest element along an axis: lowest index on ties, never a NaN, 0 when all are NaN."""
    return _best(x, axis, jnp.max, -np.inf)


def argmin(x: Array, axis: int = -1) -> Array:
    """i32 index of the smallest element along an axis: lowest index on ties, never a NaN, 0 when all are NaN."""
    return _best(x, axis, jnp.min, np.inf)


def _index_oracle(better: Callable[[Any, Any], bool]) -> Callable[[np.ndarray], Array]:
    def one(row: np.ndarray) -> int:
        best = -1
        for index, value in enumerate(row):
            if value == value and (best < 0 or better(value, row[best])):
                best = index
        return max(best, 0)

    def oracle(x: np.ndarray) -> Array:
        return np.asarray([one(row) for row in x.reshape(-1, x.shape[-1])], np.int32).reshape(x.shape[:-1])

    return oracle


def _exact(fold: Callable[..., Array]) -> Callable[[np.ndarray], Array]:
    """A sum or product of the last axis: floats in f64, integers modulo 2**32 at every step (uint64 keeps those bits)."""

    def oracle(x: np.ndarray) -> Array:
        if x.dtype == np.float32:
            return fold(x.astype(np.float64), axis=-1).astype(np.float32)
        return fold(x.astype(np.int64).astype(np.uint64), axis=-1).astype(np.uint32).view(x.dtype)

    return oracle


def _typed(fold: Callable[..., Array]) -> Callable[..., Array]:
    return lambda x, axis: fold(x, axis=axis, dtype=x.dtype)


def reduced(oracle: Callable[[np.ndarray], Array]) -> Callable[..., Array]:
    """An oracle of the last axis, which it drops, for any axis."""
    return lambda x, axis=-1: oracle(np.moveaxis(x, axis, -1))


def kept(oracle: Callable[[np.ndarray], Array]) -> Callable[..., Array]:
    """An oracle of the last axis, which it keeps, for any axis."""
    return lambda x, axis=-1: np.moveaxis(oracle(np.moveaxis(x, axis, -1)), -1, axis)


def _shifted(x: Array, axis: int) -> tuple[Array, Array, Array]:
    """x minus the largest of its row unless that is -inf, that row's exponentials, and what was subtracted."""
    best = jnp.max(x, axis=axis, keepdims=True)
    by = jnp.where(best == -jnp.inf, 0.0, best)
    shifted = x - by
    return shifted, jnp.exp(shifted), by


def softmax(x: Array, axis: int = -1) -> Array:
    """exp(x) / sum(exp(x)) along an axis; a row of -inf alone has no mass and gives zeros."""
    _, mass, _ = _shifted(x, axis)
    total = jnp.sum(mass, axis=axis, keepdims=True)
    return mass / jnp.where(total == 0.0, 1.0, total)


def _log_softmax(x: Array, axis: int) -> Array:
    shifted, mass, _ = _shifted(x, axis)
    total = jnp.sum(mass, axis=axis, keepdims=True)
    return shifted - jnp.log(jnp.where(total == 0.0, 1.0, total))


def _logsumexp(x: Array, axis: int) -> Array:
    best = jnp.max(x, axis=axis, keepdims=True)
    by = jnp.where(jnp.isinf(best), 0.0, best)
    total = jnp.sum(jnp.exp(x - by), axis=axis, keepdims=True)
    return lax.squeeze(jnp.log(total) + by, (axis % x.ndim,))


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


def _logsumexp_oracle(x: np.ndarray) -> Array:
    wide = x.astype(np.float64)
    best = wide.max(-1, keepdims=True)
    by = np.where(np.isinf(best), 0, best)
    return (np.log(np.exp(wide - by).sum(-1)) + by[..., 0]).astype(np.float32)


def _along(op_name: str, signature: str, doc: str, lower: Any, oracle: Any, cost: str = "") -> Op:
    return _op(op_name, signature, doc, lower, oracle, attrs=(AXIS,), cost=cost)


_SCAN_COST = "log2(n) * elements"

OPS: tuple[Op, ...] = (
    _along("reduce_sum", _REDUCE, "Sum along an axis; integers wrap.", _typed(jnp.sum), reduced(_exact(np.sum))),
    _along("reduce_prod", _REDUCE, "Product along an axis; integers wrap.", _typed(jnp.prod), reduced(_exact(np.prod))),
    _along(
        "reduce_max", _REDUCE, "Largest along an axis; NaN if any is.",
        lambda x, axis: jnp.max(x, axis), reduced(lambda x: x.max(-1)),
    ),
    _along(
        "reduce_min", _REDUCE, "Smallest along an axis; NaN if any is.",
        lambda x, axis: jnp.min(x, axis), reduced(lambda x: x.min(-1)),
    ),
    _along(
        "reduce_argmax", _INDEX,
        "Index of the largest along an axis: lowest index on ties, never a NaN, 0 when all are NaN.",
        argmax, reduced(_index_oracle(lambda x, best: x > best)), cost="2 * elements",
    ),
    _along(
        "reduce_argmin", _INDEX,
        "Index of the smallest along an axis: lowest index on ties, never a NaN, 0 when all are NaN.",
        argmin, reduced(_index_oracle(lambda x, best: x < best)), cost="2 * elements",
    ),
    _along(
        "reduce_any", _TEST, "Whether any along an axis holds.",
        lambda x, axis: jnp.any(x, axis), reduced(lambda x: x.any(-1)),
    ),
    _along(
        "reduce_all", _TEST, "Whether all along an axis hold.",
        lambda x, axis: jnp.all(x, axis), reduced(lambda x: x.all(-1)),
    ),
    _along(
        "logsumexp", "x: f32[*a@axis, n, *b] -> f32[*a, *b]",
        "log(sum(exp(x))) along an axis, without overflow; -inf when all are.",
        _logsumexp, reduced(_logsumexp_oracle), cost="12 * elements",
    ),
    _along(
        "cumsum", _SCAN, "Running sum along an axis, inclusive; integers wrap.",
        _typed(jnp.cumsum), kept(_exact(np.cumsum)), cost=_SCAN_COST,
    ),
    _along(
        "cumprod", _SCAN, "Running product along an axis, inclusive; integers wrap.",
        _typed(jnp.cumprod), kept(_exact(np.cumprod)), cost=_SCAN_COST,
    ),
    _along(
        "cummax", _SCAN, "Running maximum along an axis; NaN from the first NaN on.",
        lambda x, axis: lax.cummax(x, axis % x.ndim), kept(lambda x: np.maximum.accumulate(x, -1)), cost=_SCAN_COST,
    ),
    _along(
        "softmax", _NORMAL,
        "exp(x) / sum(exp(x)) along an axis; NaN or +inf make the row NaN; only -inf gives zeros.",
        softmax, kept(_softmax_oracle), cost="12 * elements",
    ),
    _along(
        "log_softmax", _NORMAL, "log(softmax(x)), without underflow; a row of -inf alone stays -inf.",
        _log_softmax, kept(_log_softmax_oracle), cost="12 * elements",
    ),
)  # fmt: skip
