"""Element-wise: one function per op. Written by `python -m pie_xla.eta.emit` from pie_xla/eta; do not edit."""

from __future__ import annotations

from typing import Any

from inferlet.eta._recorder import recorder
from inferlet.eta._tensor import Tensor

Value = Any  # a tensor, a number, or a nested list of numbers

__all__ = [
    "abs_",
    "add",
    "and_",
    "bit_and",
    "bit_not",
    "bit_or",
    "bit_xor",
    "cast",
    "ceil",
    "cos",
    "div",
    "eq",
    "exp",
    "expm1",
    "floor",
    "floor_div",
    "ge",
    "gt",
    "isfinite",
    "isnan",
    "le",
    "log",
    "log1p",
    "lt",
    "max_elem",
    "min_elem",
    "mod",
    "mul",
    "ne",
    "neg",
    "not_",
    "or_",
    "popcount",
    "pow_",
    "recip",
    "rem",
    "round_",
    "rsqrt",
    "select",
    "shift_left",
    "shift_right",
    "sigmoid",
    "sign",
    "sin",
    "sqrt",
    "sub",
    "tanh",
    "trunc",
    "xor",
]


def add(x: Value, y: Value) -> Tensor:
    """x + y; integers wrap.

    x: num[*s^], y: num[*s^] -> num[*s]
    """
    return recorder('add').apply('add', (x, y, ), {})


def sub(x: Value, y: Value) -> Tensor:
    """x - y; integers wrap.

    x: num[*s^], y: num[*s^] -> num[*s]
    """
    return recorder('sub').apply('sub', (x, y, ), {})


def mul(x: Value, y: Value) -> Tensor:
    """x * y; integers wrap.

    x: num[*s^], y: num[*s^] -> num[*s]
    """
    return recorder('mul').apply('mul', (x, y, ), {})


def div(x: Value, y: Value) -> Tensor:
    """x / y, f32 to 2 ulp; integers truncate towards 0, and n / 0 is 0.

    x: num[*s^], y: num[*s^] -> num[*s]
    """
    return recorder('div').apply('div', (x, y, ), {})


def rem(x: Value, y: Value) -> Tensor:
    """Remainder of div, with the sign of x; integer n rem 0 is 0.

    x: num[*s^], y: num[*s^] -> num[*s]
    """
    return recorder('rem').apply('rem', (x, y, ), {})


def floor_div(x: Value, y: Value) -> Tensor:
    """x // y rounded down, as Python's; integer n // 0 is 0.

    x: num[*s^], y: num[*s^] -> num[*s]
    """
    return recorder('floor_div').apply('floor_div', (x, y, ), {})


def mod(x: Value, y: Value) -> Tensor:
    """x % y with the sign of y, as Python's; integer n % 0 is 0.

    x: num[*s^], y: num[*s^] -> num[*s]
    """
    return recorder('mod').apply('mod', (x, y, ), {})


def pow_(x: Value, y: Value) -> Tensor:
    """x to the power y.

    x: f32[*s^], y: f32[*s^] -> f32[*s]
    """
    return recorder('pow').apply('pow', (x, y, ), {})


def max_elem(x: Value, y: Value) -> Tensor:
    """The larger of x and y; NaN if either is.

    x: num[*s^], y: num[*s^] -> num[*s]
    """
    return recorder('max_elem').apply('max_elem', (x, y, ), {})


def min_elem(x: Value, y: Value) -> Tensor:
    """The smaller of x and y; NaN if either is.

    x: num[*s^], y: num[*s^] -> num[*s]
    """
    return recorder('min_elem').apply('min_elem', (x, y, ), {})


def neg(x: Value) -> Tensor:
    """-x; integers wrap.

    x: num[*s] -> num[*s]
    """
    return recorder('neg').apply('neg', (x, ), {})


def abs_(x: Value) -> Tensor:
    """Absolute value; the least i32 wraps to itself.

    x: num[*s] -> num[*s]
    """
    return recorder('abs').apply('abs', (x, ), {})


def sign(x: Value) -> Tensor:
    """-1, 0 or 1; NaN stays NaN.

    x: num[*s] -> num[*s]
    """
    return recorder('sign').apply('sign', (x, ), {})


def recip(x: Value) -> Tensor:
    """1 / x.

    x: f32[*s] -> f32[*s]
    """
    return recorder('recip').apply('recip', (x, ), {})


def exp(x: Value) -> Tensor:
    """Natural exponential.

    x: f32[*s] -> f32[*s]
    """
    return recorder('exp').apply('exp', (x, ), {})


def log(x: Value) -> Tensor:
    """Natural logarithm; log(0) is -inf, NaN below 0.

    x: f32[*s] -> f32[*s]
    """
    return recorder('log').apply('log', (x, ), {})


def sin(x: Value) -> Tensor:
    """Sine of radians.

    x: f32[*s] -> f32[*s]
    """
    return recorder('sin').apply('sin', (x, ), {})


def cos(x: Value) -> Tensor:
    """Cosine of radians.

    x: f32[*s] -> f32[*s]
    """
    return recorder('cos').apply('cos', (x, ), {})


def sqrt(x: Value) -> Tensor:
    """Square root; NaN below 0.

    x: f32[*s] -> f32[*s]
    """
    return recorder('sqrt').apply('sqrt', (x, ), {})


def rsqrt(x: Value) -> Tensor:
    """1 / sqrt(x).

    x: f32[*s] -> f32[*s]
    """
    return recorder('rsqrt').apply('rsqrt', (x, ), {})


def tanh(x: Value) -> Tensor:
    """Hyperbolic tangent.

    x: f32[*s] -> f32[*s]
    """
    return recorder('tanh').apply('tanh', (x, ), {})


def sigmoid(x: Value) -> Tensor:
    """1 / (1 + exp(-x)).

    x: f32[*s] -> f32[*s]
    """
    return recorder('sigmoid').apply('sigmoid', (x, ), {})


def log1p(x: Value) -> Tensor:
    """log(1 + x), exact near 0; log1p(-1) is -inf, NaN below.

    x: f32[*s] -> f32[*s]
    """
    return recorder('log1p').apply('log1p', (x, ), {})


def expm1(x: Value) -> Tensor:
    """exp(x) - 1, exact near 0.

    x: f32[*s] -> f32[*s]
    """
    return recorder('expm1').apply('expm1', (x, ), {})


def floor(x: Value) -> Tensor:
    """Largest integer not above x.

    x: f32[*s] -> f32[*s]
    """
    return recorder('floor').apply('floor', (x, ), {})


def ceil(x: Value) -> Tensor:
    """Smallest integer not below x.

    x: f32[*s] -> f32[*s]
    """
    return recorder('ceil').apply('ceil', (x, ), {})


def trunc(x: Value) -> Tensor:
    """The integer part, towards 0.

    x: f32[*s] -> f32[*s]
    """
    return recorder('trunc').apply('trunc', (x, ), {})


def round_(x: Value) -> Tensor:
    """Nearest integer, halves to even.

    x: f32[*s] -> f32[*s]
    """
    return recorder('round').apply('round', (x, ), {})


def isnan(x: Value) -> Tensor:
    """Whether x is NaN.

    x: f32[*s] -> bool[*s]
    """
    return recorder('isnan').apply('isnan', (x, ), {})


def isfinite(x: Value) -> Tensor:
    """Whether x is neither NaN nor infinite.

    x: f32[*s] -> bool[*s]
    """
    return recorder('isfinite').apply('isfinite', (x, ), {})


def eq(x: Value, y: Value) -> Tensor:
    """x == y.

    x: any[*s^], y: any[*s^] -> bool[*s]
    """
    return recorder('eq').apply('eq', (x, y, ), {})


def ne(x: Value, y: Value) -> Tensor:
    """x != y.

    x: any[*s^], y: any[*s^] -> bool[*s]
    """
    return recorder('ne').apply('ne', (x, y, ), {})


def lt(x: Value, y: Value) -> Tensor:
    """x < y; false if either is NaN.

    x: num[*s^], y: num[*s^] -> bool[*s]
    """
    return recorder('lt').apply('lt', (x, y, ), {})


def le(x: Value, y: Value) -> Tensor:
    """x <= y; false if either is NaN.

    x: num[*s^], y: num[*s^] -> bool[*s]
    """
    return recorder('le').apply('le', (x, y, ), {})


def gt(x: Value, y: Value) -> Tensor:
    """x > y; false if either is NaN.

    x: num[*s^], y: num[*s^] -> bool[*s]
    """
    return recorder('gt').apply('gt', (x, y, ), {})


def ge(x: Value, y: Value) -> Tensor:
    """x >= y; false if either is NaN.

    x: num[*s^], y: num[*s^] -> bool[*s]
    """
    return recorder('ge').apply('ge', (x, y, ), {})


def and_(x: Value, y: Value) -> Tensor:
    """Both.

    x: bool[*s^], y: bool[*s^] -> bool[*s]
    """
    return recorder('and').apply('and', (x, y, ), {})


def or_(x: Value, y: Value) -> Tensor:
    """Either or both.

    x: bool[*s^], y: bool[*s^] -> bool[*s]
    """
    return recorder('or').apply('or', (x, y, ), {})


def xor(x: Value, y: Value) -> Tensor:
    """One of the two and not both.

    x: bool[*s^], y: bool[*s^] -> bool[*s]
    """
    return recorder('xor').apply('xor', (x, y, ), {})


def not_(x: Value) -> Tensor:
    """The opposite.

    x: bool[*s] -> bool[*s]
    """
    return recorder('not').apply('not', (x, ), {})


def bit_and(x: Value, y: Value) -> Tensor:
    """Bitwise and.

    x: int[*s^], y: int[*s^] -> int[*s]
    """
    return recorder('bit_and').apply('bit_and', (x, y, ), {})


def bit_or(x: Value, y: Value) -> Tensor:
    """Bitwise or.

    x: int[*s^], y: int[*s^] -> int[*s]
    """
    return recorder('bit_or').apply('bit_or', (x, y, ), {})


def bit_xor(x: Value, y: Value) -> Tensor:
    """Bitwise exclusive or.

    x: int[*s^], y: int[*s^] -> int[*s]
    """
    return recorder('bit_xor').apply('bit_xor', (x, y, ), {})


def bit_not(x: Value) -> Tensor:
    """Every bit inverted.

    x: int[*s] -> int[*s]
    """
    return recorder('bit_not').apply('bit_not', (x, ), {})


def popcount(x: Value) -> Tensor:
    """Number of bits that are 1.

    x: int[*s] -> int[*s]
    """
    return recorder('popcount').apply('popcount', (x, ), {})


def shift_left(x: Value, y: Value) -> Tensor:
    """x shifted up by y bits; 0 when y is 32 or more.

    x: u32[*s^], y: u32[*s^] -> u32[*s]
    """
    return recorder('shift_left').apply('shift_left', (x, y, ), {})


def shift_right(x: Value, y: Value) -> Tensor:
    """x shifted down by y bits; 0 when y is 32 or more.

    x: u32[*s^], y: u32[*s^] -> u32[*s]
    """
    return recorder('shift_right').apply('shift_right', (x, y, ), {})


def select(condition: Value, x: Value, y: Value) -> Tensor:
    """x where the condition holds, else y.

    condition: bool[*s^], x: any[*s^], y: any[*s^] -> any[*s]
    """
    return recorder('select').apply('select', (condition, x, y, ), {})


def cast(x: Value, dtype: str) -> Tensor:
    """Convert. To bool: x != 0. From f32 to an integer: towards 0, clamped to the range, NaN is 0. i32 and u32 share
    bits.

    x: any[*s] -> dtype[*s]
    dtype: element type of the result.
    """
    return recorder('cast').apply('cast', (x, ), {'dtype': dtype})
