"""Operands and attributes for any op of the table, made from its signature."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from pie_xla.eta.rules import CLASSES, Pattern, Rule

NUMPY = {"f32": np.float32, "i32": np.int32, "u32": np.uint32, "bool": np.bool_}
FLOATS = np.array([0.0, -0.0, 1.0, -1.0, 0.5, 2.5, -3.25, 1e-30, 3e38, -3e38, np.inf, -np.inf, np.nan], np.float32)
INTS = np.array([0, 1, -1, 2, 3, 7, 31, 32, 33, 2**31 - 1, -(2**31), -7, 5], np.int64)


def values(rng: np.random.Generator, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    """Random elements among which ties, extremes, infinities and NaN are common."""
    if dtype == "bool":
        return rng.random(shape) < 0.5
    if dtype == "f32":
        plain = np.round(rng.normal(size=shape) * 3, 1).astype(np.float32)
        return np.where(rng.random(shape) < 0.25, rng.choice(FLOATS, shape), plain).astype(np.float32)
    plain = rng.integers(-9, 10, shape)
    mixed = np.where(rng.random(shape) < 0.4, rng.choice(INTS, shape), plain)
    return (mixed & 0xFFFFFFFF).astype(np.uint32).view(NUMPY[dtype])


def attributes(rule: Rule, rng: np.random.Generator, bound: dict[str, Any]) -> dict[str, Any]:
    """Attributes that fit the dimensions in `bound`."""
    n = bound.get("n", 6)
    match rule.name:
        case "top_k":
            return {"k": int(rng.integers(1, n + 1))}
        case "reshape":
            size = prod(bound["s"])
            return {"shape": [(size,), (1, size), (*bound["s"][::-1],), (size, 1, 1)][rng.integers(4)]}
        case "broadcast":
            return {"shape": (*bound["s"], 3)}
        case "slice":
            start = int(rng.integers(0, n))
            return {"start": start, "stop": int(rng.integers(start + 1, n + 1)), "axis": len(bound["a"])}
        case "concat":
            return {"axis": len(bound["a"])}
    made: dict[str, Any] = {"stream": int(rng.integers(0, 5)), "shape": (3, 5), "n": 9, "length": 9}
    made |= {"window": 3, "sink": 2}
    made["dtype"] = ["f32", "i32", "u32", "bool"][rng.integers(4)]
    return {name: made[name] for name in rule.attrs}


def case(rule: Rule, seed: int, batch: int) -> tuple[list[list[np.ndarray]], dict[str, Any]]:
    """`batch` sets of operands of one type, and attributes."""
    rng = np.random.default_rng(seed)
    bound: dict[str, Any] = {}
    stars = [d.name for p in rule.operands for d in p.dims if d.star]
    for pattern in rule.operands:
        for dim in pattern.dims:
            if dim.name not in rule.attrs and dim.code is None:
                rank = int(rng.integers(0, 2 if len(set(stars)) > 1 else 3))
                extents = tuple(int(rng.choice([1, 2, 5])) for _ in range(rank))
                bound.setdefault(dim.name, extents if dim.star else int(rng.choice([1, 3, 33])))
    attrs = attributes(rule, rng, bound)
    dtypes: dict[str, str] = {}
    sets: list[list[np.ndarray]] = [[] for _ in range(batch)]
    optional = [p.name for p in rule.operands if any(d.optional for d in p.dims)]
    scalar = optional[rng.integers(len(optional))] if optional and rng.random() < 0.5 else None
    for pattern in rule.operands:
        dtype = dtypes.setdefault(pattern.dtype, str(rng.choice(CLASSES.get(pattern.dtype, (pattern.dtype,)))))
        shape = extents_of(pattern, bound, pattern.name == scalar)
        for made in sets:
            made.append(operand(rule, pattern, rng, dtype, shape, bound))
    return sets, attrs


def extents_of(pattern: Pattern, bound: dict[str, Any], bare: bool) -> tuple[int, ...]:
    shape: list[int] = []
    for dim in pattern.dims:
        if bare and dim.optional:
            continue
        value = eval(dim.code, {}, bound) if dim.code else bound[dim.name]
        shape.extend(value if isinstance(value, tuple) else (value,))
    return tuple(shape)


def operand(
    rule: Rule, pattern: Pattern, rng: np.random.Generator, dtype: str, shape: tuple[int, ...], bound: dict[str, Any]
) -> np.ndarray:
    made = values(rng, dtype, shape)
    if pattern.name in ("idx", "positions"):
        extent = bound["m"] if rule.name == "transpose" else bound.get("n", 9)
        near = rng.integers(0, extent, shape)
        made = np.where(rng.random(shape) < 0.7, near.astype(made.dtype), made)
    sums = ("cumsum", "cumprod", "reduce_sum", "matmul", "softmax", "log_softmax", "scatter_add")
    if rule.name in sums and dtype == "f32":
        made = np.where(np.abs(made) > 1e9, np.float32(1.5), made)
    if rule.name in ("matmul", "cumsum", "cumprod", "reduce_sum"):
        made = np.where(np.isnan(made), np.float32(0.25), made) if dtype == "f32" else made
    return made.astype(NUMPY[dtype])
