"""Element by element: arithmetic, comparison, logic, bits, choice, conversion."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pie_xla.eta.op import Op, family
from pie_xla.eta.rules import Attr

Array = Any
_op = family("element-wise")

_MATH = "x: f32[*s] -> f32[*s]"
_NUM = "x: num[*s] -> num[*s]"
_BINARY = "x: num[*s^], y: num[*s^] -> num[*s]"
_COMPARE = "x: num[*s^], y: num[*s^] -> bool[*s]"
_EQUAL = "x: any[*s^], y: any[*s^] -> bool[*s]"
_LOGIC = "x: bool[*s^], y: bool[*s^] -> bool[*s]"
_BITS = "x: int[*s^], y: int[*s^] -> int[*s]"
_SHIFT = "x: u32[*s^], y: u32[*s^] -> u32[*s]"
_TEST = "x: f32[*s] -> bool[*s]"


def _is_float(x: Array) -> bool:
    return bool(x.dtype == np.float32)


def _wrap(value: np.ndarray, dtype: np.dtype) -> Array:
    """int64 values modulo 2**32 as `dtype`."""
    return (np.asarray(value, np.int64) & 0xFFFFFFFF).astype(np.uint32).view(dtype)


def _integer(exact: Any) -> Any:
    """An oracle that computes integers in int64 and wraps, and floats as they are."""

    def oracle(*operands: np.ndarray) -> Array:
        if _is_float(operands[0]):
            return exact(*operands)
        return _wrap(exact(*(np.asarray(x, np.int64) for x in operands)), operands[0].dtype)

    return oracle


def _guarded(divide: Any) -> Any:
    """Integer division whose result is 0 where the divisor is 0."""

    def lower(x: Array, y: Array) -> Array:
        x, y = jnp.broadcast_arrays(x, y)
        if _is_float(x):
            return divide(x, y)
        return jnp.where(y == 0, 0, divide(x, jnp.where(y == 0, 1, y)))

    return lower


def _safe(y: np.ndarray) -> Array:
    return np.where(y == 0, 1, y)


def _div_oracle(x: np.ndarray, y: np.ndarray) -> Array:
    if _is_float(x):
        return x / y
    x64, y64 = x.astype(np.int64), y.astype(np.int64)
    quotient = np.abs(x64) // np.abs(_safe(y64)) * np.sign(x64) * np.sign(_safe(y64))
    return _wrap(np.where(y64 == 0, 0, quotient), x.dtype)


def _rem_oracle(x: np.ndarray, y: np.ndarray) -> Array:
    if _is_float(x):
        return np.fmod(x, y)
    x64, y64 = x.astype(np.int64), y.astype(np.int64)
    return _wrap(np.where(y64 == 0, 0, np.fmod(x64, _safe(y64))), x.dtype)


def _floor_div(x: Array, y: Array) -> Array:
    if _is_float(x):
        # XLA may divide by multiplying with 1 / y, and 49 * (1 / 49) is below 1: the exact remainder goes first.
        whole = jnp.isfinite(x) & jnp.isfinite(y) & (y != 0.0)
        return jnp.where(whole, jnp.round(lax.div(x - _mod(x, y), y)), jnp.floor(lax.div(x, y)))
    quotient = lax.div(x, y)
    if x.dtype == np.uint32:
        return quotient
    inexact = lax.rem(x, y) != 0
    return jnp.where(inexact & ((x < 0) != (y < 0)), quotient - 1, quotient)


def _floor_div_oracle(x: np.ndarray, y: np.ndarray) -> Array:
    if _is_float(x):
        return np.floor(x.astype(np.float64) / y.astype(np.float64)).astype(np.float32)
    x64, y64 = x.astype(np.int64), y.astype(np.int64)
    return _wrap(np.where(y64 == 0, 0, np.floor_divide(x64, _safe(y64))), x.dtype)


def _pow_oracle(x: np.ndarray, y: np.ndarray) -> Array:
    # With one exponent of 0.5 for all NumPy takes square roots, and has no power of -inf: give it one for each.
    bases, exponents = (np.array(part, ndmin=1) for part in np.broadcast_arrays(x, y))
    return np.power(bases, exponents).reshape(np.broadcast_shapes(x.shape, y.shape))


def _mod(x: Array, y: Array) -> Array:
    rest = lax.rem(x, y)
    if x.dtype == np.uint32:
        return rest
    return jnp.where((rest != 0) & ((rest < 0) != (y < 0)), rest + y, rest)


def _mod_oracle(x: np.ndarray, y: np.ndarray) -> Array:
    if _is_float(x):
        rest = np.fmod(x, y)
        return np.where((rest != 0) & ((rest < 0) != (y < 0)), rest + y, rest)
    x64, y64 = x.astype(np.int64), y.astype(np.int64)
    return _wrap(np.where(y64 == 0, 0, np.mod(x64, _safe(y64))), x.dtype)


def _cast(x: Array, dtype: str) -> Array:
    if dtype == "bool":
        return x if x.dtype == np.bool_ else x != 0
    if not _is_float(x) or dtype == "f32":
        return x.astype({"f32": jnp.float32, "i32": jnp.int32, "u32": jnp.uint32}[dtype])
    target, limits = (jnp.int32, np.iinfo(np.int32)) if dtype == "i32" else (jnp.uint32, np.iinfo(np.uint32))
    whole = jnp.trunc(jnp.where(jnp.isnan(x), 0.0, x))
    low, high = float(limits.min), float(limits.max + 1)
    inside = (whole >= low) & (whole < high)
    exact = jnp.where(inside, whole, 0.0).astype(target)
    ends = jnp.where(whole < 0.0, np.asarray(limits.min, target), np.asarray(limits.max, target))
    return jnp.where(inside, exact, ends)


def _cast_oracle(x: np.ndarray, dtype: str) -> Array:
    if dtype == "bool":
        return x != 0
    if dtype == "f32":
        return x.astype(np.float32)
    target = np.dtype({"i32": np.int32, "u32": np.uint32}[dtype])
    if not _is_float(x):
        return _wrap(x, target)
    limits = np.iinfo(target)
    wide = np.trunc(np.nan_to_num(x.astype(np.float64), nan=0.0, posinf=1e18, neginf=-1e18))
    return np.clip(wide, limits.min, limits.max).astype(target)


def _sigmoid_oracle(x: np.ndarray) -> Array:
    return (1 / (1 + np.exp(-x.astype(np.float64)))).astype(np.float32)


def _sign(x: Array) -> Array:
    return (x != 0).astype(x.dtype) if x.dtype == np.uint32 else jnp.sign(x)


def _shift(left: bool) -> Any:
    def lower(x: Array, y: Array) -> Array:
        x, y = jnp.broadcast_arrays(x, y)
        shifted = lax.shift_left(x, y & 31) if left else lax.shift_right_logical(x, y & 31)
        return jnp.where(y < 32, shifted, jnp.uint32(0))

    return lower


def _shift_oracle(left: bool) -> Any:
    def oracle(x: np.ndarray, y: np.ndarray) -> Array:
        wide, by = x.astype(np.uint64), np.minimum(y, 32).astype(np.uint64)
        return ((wide << by if left else wide >> by) & np.uint64(0xFFFFFFFF)).astype(np.uint32)

    return oracle


OPS: tuple[Op, ...] = (
    _op("add", _BINARY, "x + y; integers wrap.", jnp.add, _integer(np.add)),
    _op("sub", _BINARY, "x - y; integers wrap.", jnp.subtract, _integer(np.subtract)),
    _op("mul", _BINARY, "x * y; integers wrap.", jnp.multiply, _integer(np.multiply)),
    _op(
        "div", _BINARY, "x / y, f32 to 2 ulp; integers truncate towards 0, and n / 0 is 0.", _guarded(lax.div),
        _div_oracle,
    ),
    _op("rem", _BINARY, "Remainder of div, with the sign of x; integer n rem 0 is 0.", _guarded(lax.rem), _rem_oracle),
    _op(
        "floor_div", _BINARY, "x // y rounded down, as Python's; integer n // 0 is 0.", _guarded(_floor_div),
        _floor_div_oracle,
    ),
    _op("mod", _BINARY, "x % y with the sign of y, as Python's; integer n % 0 is 0.", _guarded(_mod), _mod_oracle),
    _op("pow", "x: f32[*s^], y: f32[*s^] -> f32[*s]", "x to the power y.", jnp.power, _pow_oracle, cost="16 * elements"),
    _op("max_elem", _BINARY, "The larger of x and y; NaN if either is.", jnp.maximum, np.maximum),
    _op("min_elem", _BINARY, "The smaller of x and y; NaN if either is.", jnp.minimum, np.minimum),
    _op("neg", _NUM, "-x; integers wrap.", jnp.negative, _integer(np.negative)),
    _op("abs", _NUM, "Absolute value; the least i32 wraps to itself.", jnp.abs, _integer(np.abs)),
    _op("sign", _NUM, "-1, 0 or 1; NaN stays NaN.", _sign, lambda x: np.sign(x)),
    _op("recip", _MATH, "1 / x.", lambda x: 1.0 / x, lambda x: np.float32(1) / x),
    _op("exp", _MATH, "Natural exponential.", jnp.exp, np.exp, cost="8 * elements"),
    _op("log", _MATH, "Natural logarithm; log(0) is -inf, NaN below 0.", jnp.log, np.log, cost="8 * elements"),
    _op("sin", _MATH, "Sine of radians.", jnp.sin, np.sin, cost="16 * elements"),
    _op("cos", _MATH, "Cosine of radians.", jnp.cos, np.cos, cost="16 * elements"),
    _op("sqrt", _MATH, "Square root; NaN below 0.", jnp.sqrt, np.sqrt),
    _op("rsqrt", _MATH, "1 / sqrt(x).", lax.rsqrt, lambda x: (1 / np.sqrt(x.astype(np.float64))).astype(np.float32)),
    _op("tanh", _MATH, "Hyperbolic tangent.", jnp.tanh, np.tanh, cost="8 * elements"),
    _op("sigmoid", _MATH, "1 / (1 + exp(-x)).", jax.nn.sigmoid, _sigmoid_oracle, cost="8 * elements"),
    _op("log1p", _MATH, "log(1 + x), exact near 0; log1p(-1) is -inf, NaN below.", jnp.log1p, np.log1p, cost="8 * elements"),
    _op("expm1", _MATH, "exp(x) - 1, exact near 0.", jnp.expm1, np.expm1, cost="8 * elements"),
    _op("floor", _MATH, "Largest integer not above x.", jnp.floor, np.floor),
    _op("ceil", _MATH, "Smallest integer not below x.", jnp.ceil, np.ceil),
    _op("trunc", _MATH, "The integer part, towards 0.", jnp.trunc, np.trunc),
    _op("round", _MATH, "Nearest integer, halves to even.", jnp.round, np.rint),
    _op("isnan", _TEST, "Whether x is NaN.", jnp.isnan, np.isnan),
    _op("isfinite", _TEST, "Whether x is neither NaN nor infinite.", jnp.isfinite, np.isfinite),
    _op("eq", _EQUAL, "x == y.", lambda x, y: x == y, np.equal),
    _op("ne", _EQUAL, "x != y.", lambda x, y: x != y, np.not_equal),
    _op("lt", _COMPARE, "x < y; false if either is NaN.", lambda x, y: x < y, np.less),
    _op("le", _COMPARE, "x <= y; false if either is NaN.", lambda x, y: x <= y, np.less_equal),
    _op("gt", _COMPARE, "x > y; false if either is NaN.", lambda x, y: x > y, np.greater),
    _op("ge", _COMPARE, "x >= y; false if either is NaN.", lambda x, y: x >= y, np.greater_equal),
    _op("and", _LOGIC, "Both.", jnp.logical_and, np.logical_and),
    _op("or", _LOGIC, "Either or both.", jnp.logical_or, np.logical_or),
    _op("xor", _LOGIC, "One of the two and not both.", jnp.logical_xor, np.logical_xor),
    _op("not", "x: bool[*s] -> bool[*s]", "The opposite.", jnp.logical_not, np.logical_not),
    _op("bit_and", _BITS, "Bitwise and.", jnp.bitwise_and, np.bitwise_and),
    _op("bit_or", _BITS, "Bitwise or.", jnp.bitwise_or, np.bitwise_or),
    _op("bit_xor", _BITS, "Bitwise exclusive or.", jnp.bitwise_xor, np.bitwise_xor),
    _op("bit_not", "x: int[*s] -> int[*s]", "Every bit inverted.", jnp.bitwise_not, np.bitwise_not),
    _op(
        "popcount", "x: int[*s] -> int[*s]", "Number of bits that are 1.", lax.population_count,
        lambda x: np.bitwise_count(x.view(np.uint32)).astype(x.dtype),
    ),
    _op("shift_left", _SHIFT, "x shifted up by y bits; 0 when y is 32 or more.", _shift(True), _shift_oracle(True)),
    _op("shift_right", _SHIFT, "x shifted down by y bits; 0 when y is 32 or more.", _shift(False), _shift_oracle(False)),
    _op(
        "select", "condition: bool[*s^], x: any[*s^], y: any[*s^] -> any[*s]", "x where the condition holds, else y.",
        jnp.where, np.where,
    ),
    _op(
        "cast", "x: any[*s] -> dtype[*s]",
        "Convert. To bool: x != 0. From f32 to an integer: towards 0, clamped to the range, NaN is 0. "
        "i32 and u32 share bits.",
        _cast, _cast_oracle, attrs=(Attr("dtype", "dtype", "element type of the result"),),
    ),
)  # fmt: skip
