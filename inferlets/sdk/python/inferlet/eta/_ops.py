"""One function per op of the table. Written by `python -m pie_xla.eta.emit` from pie_xla/eta; do not edit."""


from __future__ import annotations

from typing import Any

from inferlet.eta._recorder import recorder
from inferlet.eta._tensor import Tensor

Value = Any  # a tensor, a number, or a nested list of numbers

__all__ = [
    "abs_",
    "add",
    "and_",
    "batch_matmul",
    "bit_and",
    "bit_not",
    "bit_or",
    "bit_xor",
    "broadcast",
    "cast",
    "categorical",
    "causal_mask",
    "ceil",
    "concat",
    "cos",
    "cummax",
    "cumprod",
    "cumsum",
    "div",
    "eq",
    "exp",
    "expm1",
    "flip",
    "floor",
    "floor_div",
    "gather",
    "gather_row",
    "ge",
    "gt",
    "gumbel",
    "iota",
    "isfinite",
    "isnan",
    "le",
    "log",
    "log1p",
    "log_softmax",
    "logsumexp",
    "lt",
    "mask_apply",
    "mask_apply_packed",
    "matmul",
    "max_elem",
    "min_elem",
    "mod",
    "mul",
    "ne",
    "neg",
    "normal",
    "not_",
    "or_",
    "pack_mask",
    "pad",
    "permute",
    "pivot_cummass_le",
    "pivot_prob_ge",
    "pivot_rank_le",
    "popcount",
    "pow_",
    "recip",
    "reduce_all",
    "reduce_any",
    "reduce_argmax",
    "reduce_argmin",
    "reduce_max",
    "reduce_min",
    "reduce_prod",
    "reduce_sum",
    "rem",
    "reshape",
    "round_",
    "rsqrt",
    "scatter_add",
    "scatter_set",
    "select",
    "shift_left",
    "shift_right",
    "sigmoid",
    "sign",
    "sin",
    "sink_window_mask",
    "slice_",
    "sliding_window_mask",
    "softmax",
    "sort",
    "sort_desc",
    "sqrt",
    "sub",
    "tanh",
    "top_k",
    "transpose",
    "trunc",
    "uniform",
    "unpack_mask",
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


def concat(x: Value, y: Value, axis: int = 0) -> Tensor:
    """y after x along an axis.

    x: any[*a@axis, m, *b], y: any[*a@axis, n, *b] -> any[*a, m + n, *b]
    axis: dimension; a negative one counts from the end.
    """
    return recorder('concat').apply('concat', (x, y, ), {'axis': axis})


def slice_(x: Value, start: int, stop: int, axis: int = 0) -> Tensor:
    """Elements start to stop - 1 along an axis.

    x: any[*a@axis, n, *b] -> any[*a, stop - start, *b]
    start: first element.
    stop: one past the last element.
    axis: dimension; a negative one counts from the end.
    """
    return recorder('slice').apply('slice', (x, ), {'start': start, 'stop': stop, 'axis': axis})


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


def gather(src: Value, idx: Value) -> Tensor:
    """src[idx] along the first axis; 0 outside.

    src: any[n, *r], idx: int[*s] -> any[*s, *r]
    """
    return recorder('gather').apply('gather', (src, idx, ), {})


def gather_row(src: Value, idx: Value) -> Tensor:
    """src[i, idx[i]]: one column per row; 0 outside.

    src: any[m, n], idx: int[m] -> any[m]
    """
    return recorder('gather_row').apply('gather_row', (src, idx, ), {})


def scatter_add(base: Value, idx: Value, values: Value) -> Tensor:
    """base with values added at idx of the first axis; duplicates add up, outside is skipped.

    base: num[n, *r], idx: int[*s], values: num[*s~, *r~] -> num[n, *r]
    """
    return recorder('scatter_add').apply('scatter_add', (base, idx, values, ), {})


def scatter_set(base: Value, idx: Value, values: Value) -> Tensor:
    """base with values written at idx of the first axis; of duplicates the last wins, outside is skipped.

    base: any[n, *r], idx: int[*s], values: any[*s~, *r~] -> any[n, *r]
    """
    return recorder('scatter_set').apply('scatter_set', (base, idx, values, ), {})


def mask_apply(x: Value, mask: Value) -> Tensor:
    """x where the mask holds, else -inf.

    x: f32[*s, n], mask: bool[*s~, n] -> f32[*s, n]
    """
    return recorder('mask_apply').apply('mask_apply', (x, mask, ), {})


def mask_apply_packed(x: Value, mask: Value) -> Tensor:
    """x where its bit holds, else -inf; element i is bit i % 32 of word i // 32; one mask per row, or one for all.

    x: f32[*s, n], mask: u32[*s~, (n + 31) // 32] -> f32[*s, n]
    """
    return recorder('mask_apply_packed').apply('mask_apply_packed', (x, mask, ), {})


def pack_mask(mask: Value) -> Tensor:
    """A bool mask as words: element i is bit i % 32 of word i // 32; bits past the end are 0.

    mask: bool[*s, n] -> u32[*s, (n + 31) // 32]
    """
    return recorder('pack_mask').apply('pack_mask', (mask, ), {})


def unpack_mask(words: Value, n: int) -> Tensor:
    """The bool mask that `pack_mask` packed.

    words: u32[*s, (n + 31) // 32] -> bool[*s, n]
    n: length of the mask.
    """
    return recorder('unpack_mask').apply('unpack_mask', (words, ), {'n': n})


def causal_mask(positions: Value, length: int) -> Tensor:
    """Key k is visible to position p when k <= p.

    positions: int[*s] -> bool[*s, length]
    length: number of keys.
    """
    return recorder('causal_mask').apply('causal_mask', (positions, ), {'length': length})


def sliding_window_mask(positions: Value, length: int, window: int) -> Tensor:
    """Key k is visible to position p when k <= p and k + window > p.

    positions: int[*s] -> bool[*s, length]
    length: number of keys.
    window: positions a query sees, its own included.
    """
    return recorder('sliding_window_mask').apply('sliding_window_mask', (positions, ), {'length': length, 'window': window})


def sink_window_mask(positions: Value, length: int, window: int, sink: int) -> Tensor:
    """As sliding_window_mask, and the first `sink` keys stay visible.

    positions: int[*s] -> bool[*s, length]
    length: number of keys.
    window: positions a query sees, its own included.
    sink: first keys that stay visible.
    """
    return recorder('sink_window_mask').apply('sink_window_mask', (positions, ), {'length': length, 'window': window, 'sink': sink})


def top_k(x: Value, k: int, axis: int = -1) -> tuple[Tensor, Tensor]:
    """The k largest along an axis, largest first; lower index first on ties; NaN counts as -inf.

    x: f32[*a@axis, n, *b] -> values: f32[*a, k, *b], indices: u32[*a, k, *b]
    k: how many.
    axis: dimension; a negative one counts from the end.
    """
    return recorder('top_k').apply('top_k', (x, ), {'k': k, 'axis': axis})


def sort_desc(x: Value, axis: int = -1) -> tuple[Tensor, Tensor]:
    """All along an axis, largest first; lower index first on ties; NaN counts as -inf. Dear: prefer top_k or a filter.

    x: num[*a@axis, n, *b] -> values: num[*a, n, *b], indices: u32[*a, n, *b]
    axis: dimension; a negative one counts from the end.
    """
    return recorder('sort_desc').apply('sort_desc', (x, ), {'axis': axis})


def sort(x: Value, axis: int = -1) -> tuple[Tensor, Tensor]:
    """All along an axis, smallest first, and where each was (the argsort); lower index first on ties; NaN last. Dear.

    x: num[*a@axis, n, *b] -> values: num[*a, n, *b], indices: u32[*a, n, *b]
    axis: dimension; a negative one counts from the end.
    """
    return recorder('sort').apply('sort', (x, ), {'axis': axis})


def pivot_rank_le(x: Value, k: Value) -> Tensor:
    """Top-k filter: an element is kept when fewer than k are greater, so ties are kept together. NaN is never kept.

    x: f32[*s, n], k: int[*s~] -> bool[*s, n]
    """
    return recorder('pivot_rank_le').apply('pivot_rank_le', (x, k, ), {})


def pivot_cummass_le(x: Value, p: Value) -> Tensor:
    """Top-p filter on probabilities: an element is kept when the greater ones sum to less than p, so ties are kept
    together. The greatest is always kept, p >= 1 keeps all; NaN is never kept, a negative counts as 0.

    x: f32[*s, n], p: f32[*s~] -> bool[*s, n]
    """
    return recorder('pivot_cummass_le').apply('pivot_cummass_le', (x, p, ), {})


def pivot_prob_ge(x: Value, t: Value) -> Tensor:
    """Keeps x >= t. With t = min_p * max(x) the min-p filter.

    x: f32[*s, n], t: f32[*s~] -> bool[*s, n]
    """
    return recorder('pivot_prob_ge').apply('pivot_prob_ge', (x, t, ), {})


def uniform(shape: int | tuple[int, ...], stream: int | None = None) -> Tensor:
    """Uniform in the open interval (0, 1): odd multiples of 2**-24.

    -> f32[*shape]
    shape: extents of the result.
    stream: which independent stream of the pass; set when traced.
    """
    return recorder('uniform').apply('uniform', (), {'shape': shape, 'stream': stream})


def gumbel(shape: int | tuple[int, ...], stream: int | None = None) -> Tensor:
    """Standard Gumbel: argmax(logits + gumbel) draws from softmax(logits).

    -> f32[*shape]
    shape: extents of the result.
    stream: which independent stream of the pass; set when traced.
    """
    return recorder('gumbel').apply('gumbel', (), {'shape': shape, 'stream': stream})


def normal(shape: int | tuple[int, ...], stream: int | None = None) -> Tensor:
    """Standard normal, by the Box-Muller transform.

    -> f32[*shape]
    shape: extents of the result.
    stream: which independent stream of the pass; set when traced.
    """
    return recorder('normal').apply('normal', (), {'shape': shape, 'stream': stream})


def categorical(x: Value, stream: int | None = None) -> Tensor:
    """One index per row drawn from softmax(x), by one uniform per row. NaN and -inf are never drawn; with nothing left
    0; +inf takes all.

    x: f32[*s, n] -> i32[*s]
    stream: which independent stream of the pass; set when traced.
    """
    return recorder('categorical').apply('categorical', (x, ), {'stream': stream})
