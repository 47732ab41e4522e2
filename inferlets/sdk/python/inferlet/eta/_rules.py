"""Interpreter of op signatures, in pure Python: the same file types programs on the host and in the guest.

A type is a pair `(dtype, shape)`: `("f32", (8, 49152))`. A signature reads
`x: f32[*s, n] -> values: f32[*s, k], indices: u32[*s, k]`:

- element type: `f32`, `i32`, `u32`, `bool`; a class `num` (f32, i32, u32), `int` (i32, u32) or `any`, one variable per
  name, so that `num[*s], num[*s]` is one element type; the name of a dtype attribute stands for its value.
- dimension: a name binds an extent; an attribute's name or an expression (`stop - start`, `(n + 31) // 32`) must equal
  it.
- `*s` binds any number of dimensions; `*s~` may be left out by an operand (so one mask serves all rows); the `*s^` of
  several operands broadcast together as NumPy's shapes do (last dimensions first, 1 meets any extent); `*s@axis` has
  `axis` dimensions; `*shape` with a shape attribute is that shape; `+n` is the sum of that extent over a repeated operand.
- `*xs: ...`, as the last operand, stands for one or more of it.
Expressions hold integers, `+ - * //`, comparisons, `size(s)`, `rank(s)`, `log2(n)` (rounded up), `min`, `max`,
`leads(s, t)`: the dimensions of s are the first ones of t, or 1, `fits(s, t)`: s broadcasts to t as in NumPy, and
`permute(s, axes)`; shapes are joined by `+`. An `axis` attribute counts the
first operand's dimensions, from the end when negative; in signatures it is the count from the front.

Written by `python -m pie_xla.eta.emit` from pie_xla/eta; do not edit.
"""

from __future__ import annotations

from math import prod
from types import CodeType

VERSION = 1
MAX_RANK = 4
MAX_ELEMENTS = 1 << 28
MAX_OPS = 4096
MAX_OPERANDS = 256
MAX_COST = 1 << 32
MAX_STREAM = 1 << 31
OP_COST = 64
DTYPES = ("f32", "i32", "u32", "bool")
CLASSES = {"num": ("f32", "i32", "u32"), "int": ("i32", "u32"), "any": DTYPES}
F32_MAX = 3.4028234663852886e38
RANGES = {"i32": (-(1 << 31), (1 << 31) - 1), "u32": (0, (1 << 32) - 1)}

Type = tuple[str, tuple[int, ...]]


class RuleError(TypeError):
    """An op that does not accept these operands or attributes."""


def show(kind: Type) -> str:
    """`f32[8, 49152]`."""
    return f"{kind[0]}[{', '.join(map(str, kind[1]))}]"


class Attr:
    """One attribute; without `default` it must be given.

    `kind` is int (in `low`..`high`), dtype, shape, axis (a dimension of the first operand) or axes (an order of all of
    them).
    """

    def __init__(
        self, name: str, kind: str, doc: str, low: int = 0, high: int = MAX_ELEMENTS, default: int | None = None
    ) -> None:
        self.name, self.kind, self.doc = name, kind, doc
        self.low, self.high, self.default = low, high, default

    def check(self, op: str, value: object) -> object:
        """The value in canonical form, or a RuleError."""
        if self.kind == "dtype":
            if isinstance(value, str) and value in DTYPES:
                return str(value)
            raise RuleError(f"{op}: {self.name} must be one of {', '.join(DTYPES)}, got {value!r}")
        if self.kind in ("shape", "axes"):
            if isinstance(value, int) and not isinstance(value, bool):
                value = (value,)
            if not isinstance(value, tuple | list):
                raise RuleError(f"{op}: {self.name} must be a tuple of Python ints, got {_name(value)}")
            shape = tuple(self._extent(op, extent) for extent in value)
            if self.kind == "shape":
                check_shape(op, shape)
            return shape
        return self._extent(op, value)

    def _extent(self, op: str, value: object) -> int:
        if not isinstance(value, int) or isinstance(value, bool):
            raise RuleError(f"{op}: {self.name} must be a Python int (it is fixed when traced), got {_name(value)}")
        low, high = self.low, self.high
        if self.kind == "shape":
            low, high = 1, MAX_ELEMENTS
        elif self.kind in ("axis", "axes"):
            low, high = -MAX_RANK, MAX_RANK - 1
        if not low <= value <= high:
            raise RuleError(f"{op}: {self.name} must be in {low}..{high}, got {value}")
        return int(value)


def _name(value: object) -> str:
    return f"{type(value).__name__} {value!r}"[:80]


def check_shape(where: str, shape: tuple[int, ...]) -> None:
    """Refuse ranks above 4, empty extents and more than 2**28 elements."""
    if len(shape) > MAX_RANK:
        raise RuleError(f"{where}: rank {len(shape)} is above {MAX_RANK}: {list(shape)}")
    if any(extent < 1 for extent in shape):
        raise RuleError(f"{where}: every extent must be at least 1: {list(shape)}")
    if prod(shape) > MAX_ELEMENTS:
        raise RuleError(f"{where}: {list(shape)} has {prod(shape)} elements, more than {MAX_ELEMENTS}")


class Pattern:
    """One operand or result of a signature, parsed."""

    def __init__(self, text: str) -> None:
        name, _, body = text.rpartition(":")
        self.many = name.strip().startswith("*")
        self.name = name.strip().removeprefix("*")
        self.text = body.strip()
        dtype, _, dims = self.text.partition("[")
        self.dtype = dtype.strip()
        self.dims = [_Dim(dim) for dim in _split(dims.rstrip().removesuffix("]"))]


class _Dim:
    def __init__(self, text: str) -> None:
        text = text.strip()
        self.star = text.startswith("*")
        self.adds = text.startswith("+")
        text = text.lstrip("*+")
        self.optional = text.endswith("~")
        self.broadcast = text.endswith("^")
        text, _, self.length = text.rstrip("~^").partition("@")
        self.name = text
        self.code = None if text.isidentifier() else _compile(text)


def _split(text: str) -> list[str]:
    parts, depth, start = [], 0, 0
    for at, char in enumerate(text):
        depth += (char in "[(") - (char in "])")
        if char == "," and depth == 0:
            parts.append(text[start:at])
            start = at + 1
    parts.append(text[start:])
    return [part for part in parts if part.strip()]


def _compile(text: str) -> CodeType:
    return compile(text.strip(), f"<rule {text.strip()}>", "eval")


def _rank(shape: tuple[int, ...]) -> int:
    return len(shape)


def _log2(n: int) -> int:
    return max(1, (n - 1).bit_length())


def _leads(small: tuple[int, ...], large: tuple[int, ...]) -> bool:
    return len(small) <= len(large) and all(a in (1, b) for a, b in zip(small, large, strict=False))


def _fits(small: tuple[int, ...], large: tuple[int, ...]) -> bool:
    return merge(small, large) == large


def _permute(shape: tuple[int, ...], axes: tuple[int, ...]) -> tuple[int, ...]:
    if sorted(axis % len(shape) if -len(shape) <= axis < len(shape) else -1 for axis in axes) != [*range(len(shape))]:
        raise RuleError(f"axes must name each of the {len(shape)} dimensions once, got {list(axes)}")
    return tuple(shape[axis] for axis in axes)


def merge(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...] | None:
    """The shape that a and b broadcast to as in NumPy, or None."""
    if len(a) < len(b):
        a, b = b, a
    tail = a[len(a) - len(b) :]
    if any(x != y and x != 1 and y != 1 for x, y in zip(tail, b, strict=True)):
        return None
    return a[: len(a) - len(b)] + tuple(y if x == 1 else x for x, y in zip(tail, b, strict=True))


_FUNCTIONS = {
    "__builtins__": {},
    "size": prod,
    "rank": _rank,
    "min": min,
    "max": max,
    "log2": _log2,
    "leads": _leads,
    "fits": _fits,
    "permute": _permute,
}


def _evaluate(code: CodeType, bound: dict[str, object]) -> int:
    """Evaluate text of the table; never a program's."""
    value: int = eval(code, _FUNCTIONS, bound)
    return value


class Rule:
    """The static half of one op: what it accepts, what it gives and what it costs."""

    def __init__(
        self,
        name: str,
        signature: str,
        doc: str,
        attrs: tuple[Attr, ...] = (),
        where: tuple[str, ...] = (),
        cost: str = "",
        random: bool = False,
    ) -> None:
        self.name, self.signature, self.doc, self.where, self.cost, self.random = (
            name, signature, doc, where, cost, random,
        )  # fmt: skip
        self.attrs = {attr.name: attr for attr in attrs}
        left, _, right = signature.partition("->")
        self.operands = [Pattern(part) for part in _split(left)]
        self.results = [Pattern(part) for part in _split(right)]
        self.many = bool(self.operands) and self.operands[-1].many
        self.broadcasts = any(dim.broadcast for pattern in self.operands for dim in pattern.dims)
        self._where = [(text, _compile(text)) for text in where]
        self._cost = _compile(cost) if cost else None
        self._memo: dict[tuple, tuple[tuple[Type, ...], int]] = {}  # type: ignore[type-arg]

    def check_attrs(self, given: dict[str, object]) -> dict[str, object]:
        """The attributes in canonical form, defaults filled in."""
        for name in given:
            if name not in self.attrs:
                raise RuleError(f"{self.name}: unknown attribute {name!r}; it has: {', '.join(self.attrs) or 'none'}")
        values = {}
        for name, attr in self.attrs.items():
            value = given.get(name, attr.default)
            if value is None:
                raise RuleError(f"{self.name}: attribute {name} is missing ({attr.doc})")
            values[name] = attr.check(self.name, value)
        return values

    def patterns(self, count: int) -> list[Pattern]:
        """What each of `count` operands must be; of another length when there cannot be so many."""
        if not self.many:
            return self.operands
        return [*self.operands, *self.operands[-1:] * (count - len(self.operands))]

    def infer(self, operands: tuple[Type, ...], attrs: dict[str, object]) -> tuple[tuple[Type, ...], int]:
        """Result types and cost (element operations) for checked attributes; RuleError when the types do not fit."""
        key = (operands, *attrs.values())
        known = self._memo.get(key)
        if known is None:
            known = self._infer(operands, attrs)
            if len(self._memo) < 512:
                self._memo[key] = known
        return known

    def _infer(self, operands: tuple[Type, ...], attrs: dict[str, object]) -> tuple[tuple[Type, ...], int]:
        patterns = self.patterns(len(operands))
        if len(operands) != len(patterns) or len(operands) > MAX_OPERANDS:
            names = ", ".join(pattern.name for pattern in self.operands)
            count = f"1 to {MAX_OPERANDS}" if self.many else len(self.operands)
            raise RuleError(f"{self.name}: takes {count} operands ({names}), got {len(operands)}")
        dtypes: dict[str, tuple[str, str]] = {}
        bound: dict[str, object] = dict(attrs) | {
            name: self._axis(name, attrs[name], operands[0]) for name, attr in self.attrs.items() if attr.kind == "axis"
        }
        owners: dict[str, str] = {}
        for pattern, kind in zip(patterns, operands, strict=True):
            self._match_dtype(pattern, kind, dtypes, attrs)
            self._match_shape(pattern, kind, bound, owners, operands)
        for pattern in (*self.operands, *self.results):
            for dim in pattern.dims:
                if dim.star and dim.name not in bound:
                    bound[dim.name] = ()
        for text, code in self._where:
            if not _evaluate(code, bound):
                raise RuleError(f"{self.name}: needs {text}, but {_bindings(text, bound)}")
        results = []
        for pattern in self.results:
            free = dtypes.get(pattern.dtype)
            dtype = free[0] if free else str(attrs.get(pattern.dtype, pattern.dtype))
            shape: list[int] = []
            for dim in pattern.dims:
                value = bound[dim.name] if dim.code is None else _evaluate(dim.code, bound)
                shape.extend(value if isinstance(value, tuple) else (int(value),))  # type: ignore[call-overload]
            check_shape(f"{self.name} result", tuple(shape))
            results.append((dtype, tuple(shape)))
        size = max([prod(kind[1]) for kind in (*operands, *results)], default=1)
        cost = _evaluate(self._cost, bound | {"elements": size}) if self._cost else size
        return tuple(results), max(cost, OP_COST)

    def _axis(self, name: str, axis: object, operand: Type) -> int:
        rank = len(operand[1])
        if not isinstance(axis, int) or not -rank <= axis < rank:
            raise RuleError(f"{self.name}: {name} {axis} is outside {show(operand)}, which has {rank} dimensions")
        return axis % rank

    def _match_dtype(
        self, pattern: Pattern, kind: Type, dtypes: dict[str, tuple[str, str]], attrs: dict[str, object]
    ) -> None:
        allowed = CLASSES.get(pattern.dtype)
        if allowed is None:
            want = attrs.get(pattern.dtype, pattern.dtype)
            if kind[0] != want:
                raise RuleError(f"{self.name}: {pattern.name} must be {want}, but is {show(kind)}{_cast_hint(kind[0])}")
            return
        if kind[0] not in allowed:
            wanted = ", ".join(allowed)
            raise RuleError(f"{self.name}: {pattern.name} must be {wanted}, but is {show(kind)}{_cast_hint(kind[0])}")
        first = dtypes.setdefault(pattern.dtype, (kind[0], f"{pattern.name} is {show(kind)}"))
        if first[0] != kind[0]:
            raise RuleError(
                f"{self.name}: operands must share one dtype, but {first[1]} and {pattern.name} is {show(kind)}; "
                f"use cast(x, dtype)"
            )

    def _match_shape(
        self, pattern: Pattern, kind: Type, bound: dict[str, object], owners: dict[str, str], operands: tuple[Type, ...]
    ) -> None:
        shape = kind[1]

        def refuse(why: str) -> RuleError:
            patterns = self.patterns(len(operands))
            listed = ", ".join(f"{p.name} {show(k)}" for p, k in zip(patterns, operands, strict=True))
            return RuleError(f"{self.name}: {pattern.name} must be {pattern.text}, but {why}; operands: {listed}")

        at = 0
        for index, dim in enumerate(pattern.dims):
            if not dim.star:
                if at >= len(shape):
                    raise refuse(f"{show(kind)} has too few dimensions")
                extent = shape[at]
                at += 1
                if dim.adds:
                    total = bound.get(dim.name, 0)
                    assert isinstance(total, int)
                    bound[dim.name] = total + extent
                    continue
                want = bound.get(dim.name) if dim.code is None else _evaluate(dim.code, bound)
                if want is None:
                    bound[dim.name] = extent
                    owners[dim.name] = f"{dim.name} = {extent} from {pattern.name}"
                elif want != extent:
                    raise refuse(f"dimension {at - 1} of {show(kind)} is not {want} ({owners.get(dim.name, dim.name)})")
                continue
            left = len(shape) - at - sum(not d.star for d in pattern.dims[index + 1 :])
            if left < 0:
                raise refuse(f"{show(kind)} has too few dimensions")
            known = bound.get(dim.name)
            if dim.broadcast:
                own = shape[at : at + left]
                merged = merge(known if isinstance(known, tuple) else (), own)
                if merged is None:
                    raise refuse(f"{show(kind)} does not broadcast with {owners[dim.name]}")
                bound[dim.name] = merged
                if merged == own:
                    owners[dim.name] = f"{dim.name} = {list(own)} from {pattern.name}"
                at += left
                continue
            if dim.optional and left == 0:
                continue
            if known is None:
                rest = [bound.get(d.name, ()) for d in pattern.dims[index + 1 :] if d.star]
                later = sum(len(dims) for dims in rest if isinstance(dims, tuple))
                count = bound[dim.length] if dim.length else left - later
                if not isinstance(count, int) or not 0 <= count <= left:
                    raise refuse(f"{show(kind)} has too few dimensions")
                bound[dim.name] = shape[at : at + count]
                owners[dim.name] = f"{dim.name} = {list(shape[at : at + count])} from {pattern.name}"
                at += count
            else:
                assert isinstance(known, tuple)
                if shape[at : at + len(known)] != known:
                    raise refuse(f"{show(kind)} does not fit {owners.get(dim.name, f'{dim.name} = {list(known)}')}")
                at += len(known)
        if at != len(shape):
            raise refuse(f"{show(kind)} has too many dimensions")


def _cast_hint(dtype: str) -> str:
    return "; use cast(x, dtype): nothing is promoted silently" if dtype in DTYPES else ""


def _bindings(text: str, bound: dict[str, object]) -> str:
    words = {word for word in "".join(c if c.isalnum() or c == "_" else " " for c in text).split() if word in bound}
    shown = {word: list(value) if isinstance(value := bound[word], tuple) else value for word in sorted(words)}
    return ", ".join(f"{word} = {value}" for word, value in shown.items())


def literal_dtype(value: object) -> str | None:
    """The dtype of a Python number or nested list when nothing else decides: f32, i32, bool; None if it is neither."""
    while isinstance(value, list | tuple) and value:
        if any(isinstance(item, float) for item in value):
            return "f32"
        value = value[0]
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, int):
        return "i32"
    return "f32" if isinstance(value, float) else None


def check_literal(where: str, value: object, dtype: str) -> tuple[object, tuple[int, ...]]:
    """A Python number or nested list as `dtype`: canonical value and shape; RuleError when it would lose anything."""
    if isinstance(value, list | tuple):
        if not value:
            raise RuleError(f"{where}: an empty list has no type; every extent must be at least 1")
        parts = [check_literal(where, item, dtype) for item in value]
        if any(part[1] != parts[0][1] for part in parts):
            raise RuleError(f"{where}: a nested list must be rectangular")
        shape = (len(parts), *parts[0][1])
        check_shape(where, shape)
        return [part[0] for part in parts], shape
    if isinstance(value, bool):
        if dtype == "bool":
            return value, ()
    elif isinstance(value, int):
        if abs(value) > F32_MAX:
            raise RuleError(f"{where}: an integer of {value.bit_length()} bits does not fit {dtype}")
        if dtype == "f32":
            return float(value), ()
        if dtype in RANGES:
            low, high = RANGES[dtype]
            if low <= value <= high:
                return value, ()
            raise RuleError(f"{where}: {value} does not fit {dtype} ({low}..{high})")
    elif isinstance(value, float) and dtype == "f32":
        if abs(value) > F32_MAX and value not in (float("inf"), float("-inf")):
            raise RuleError(f"{where}: {value} does not fit f32 (largest {F32_MAX})")
        return value, ()
    if not isinstance(value, int | float):
        raise RuleError(f"{where}: {_name(value)} is not a tensor, a number or a nested list of numbers")
    raise RuleError(f"{where}: {_name(value)} cannot become {dtype} without losing something; write it as {dtype}")


def loop_cost(n: int, body: int) -> int:
    """Element operations of a loop of n iterations."""
    return n * max(body, OP_COST)


def while_cost(n: int, test: int, body: int) -> int:
    """Element operations of a loop of n iterations at most, with a test before each and after the last."""
    return loop_cost(n, test + body) + test
