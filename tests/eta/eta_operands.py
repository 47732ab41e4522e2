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
    """Random elements among which ties, extremes, infinities and NaN are common; now and then all are alike."""
    alike = rng.random() < 0.15
    if dtype == "bool":
        return np.full(shape, rng.random() < 0.3) if alike else rng.random(shape) < 0.5
    if dtype == "f32" and alike:
        return np.full(shape, rng.choice(FLOATS), np.float32)
    if dtype == "f32":
        plain = np.round(rng.normal(size=shape) * 3, 1).astype(np.float32)
        return np.where(rng.random(shape) < 0.25, rng.choice(FLOATS, shape), plain).astype(np.float32)
    plain = rng.integers(-9, 10, shape)
    mixed = np.where(rng.random(shape) < 0.4, rng.choice(INTS, shape), plain)
    return (mixed & 0xFFFFFFFF).astype(np.uint32).view(NUMPY[dtype])


def attributes(rule: Rule, rng: np.random.Generator, bound: dict[str, Any]) -> dict[str, Any]:
    """Attributes that fit the dimensions in `bound`."""
    n = bound.get("n", 6)
    if "axis" in rule.attrs and isinstance(bound.get("a"), tuple):
        from_end = rng.random() < 0.5
        bound["axis"] = len(bound["a"]) - (len(bound["a"]) + 1 + len(bound.get("b", bound.get("r"))) if from_end else 0)
    match rule.name:
        case "top_k":
            return {"k": int(rng.integers(1, n + 1)), "axis": bound["axis"]}
        case "reshape":
            size = prod(bound["s"])
            return {"shape": [(size,), (1, size), (*bound["s"][::-1],), (size, 1, 1)][rng.integers(4)]}
        case "broadcast":
            return {"shape": (*bound["s"], 3)}
        case "slice":
            start, step = int(rng.integers(0, n)), int(rng.integers(1, 4))
            return {"start": start, "stop": int(rng.integers(start + 1, n + 1)), "axis": bound["axis"], "step": step}
        case "permute":
            return {"axes": tuple(int(axis) for axis in rng.permutation(len(bound["s"])))}
    made: dict[str, Any] = {"axis": bound.get("axis", -1), "low": 2, "high": 1}
    made |= {"stream": int(rng.integers(0, 5)), "shape": (3, 5), "n": 37, "length": 9}
    made |= {"window": 3, "sink": 2}
    made["dtype"] = ["f32", "i32", "u32", "bool"][rng.integers(4)]
    return {name: made[name] for name in rule.attrs}


def case(rule: Rule, form: int, seed: int, batch: int) -> tuple[list[list[np.ndarray]], dict[str, Any]]:
    """`batch` sets of operands of one type, and attributes: `form` decides types and attributes, `seed` the values.

    A form is compiled once, so tests draw many seeds and few forms.
    """
    rng, content = np.random.default_rng(form), np.random.default_rng(seed)
    bound: dict[str, Any] = {}
    stars = [d.name for p in rule.operands for d in p.dims if d.star]
    for pattern in rule.operands:
        for dim in pattern.dims:
            if dim.name not in rule.attrs and dim.code is None:
                rank = int(rng.integers(0, 2 if len(set(stars) - {"v"}) > 1 else 3))
                extents = tuple(int(rng.choice([1, 2, 5])) for _ in range(rank))
                if not dim.star and dim.name in rule.attrs:
                    continue
                bound.setdefault(dim.name, extents if dim.star else int(rng.choice([1, 3, 33])))
    attrs = attributes(rule, rng, bound)
    if "v" in bound:  # of the updates: what broadcasts to their full shape
        full = bound["a"] + bound["s"] + bound["r"]
        lead = full[int(rng.integers(0, len(full) + 1)) :]
        bound["v"] = tuple(1 if rng.random() < 0.3 else extent for extent in lead)
    bound = attrs | bound
    dtypes: dict[str, str] = {}
    sets: list[list[np.ndarray]] = [[] for _ in range(batch)]
    optional = [p.name for p in rule.operands if any(d.optional for d in p.dims)]
    scalar = optional[rng.integers(len(optional))] if optional and rng.random() < 0.5 else None
    for pattern in rule.patterns(3 if rule.many else len(rule.operands)):
        choices = CLASSES.get(pattern.dtype, (pattern.dtype,))
        dtype = dtypes.setdefault(pattern.dtype, choices[form % len(choices)])
        shape = extents_of(pattern, bound, pattern.name == scalar)
        if any(d.broadcast for d in pattern.dims):
            keep = len(pattern.dims) - 1
            lead = shape[: len(shape) - keep][int(rng.integers(0, 2)) :]
            lead = tuple(1 if rng.random() < 0.3 else extent for extent in lead)
            shape = lead + shape[len(shape) - keep :]
        for made in sets:
            made.append(operand(rule, pattern, content, dtype, shape, bound))
    return sets, attrs


def extents_of(pattern: Pattern, bound: dict[str, Any], bare: bool) -> tuple[int, ...]:
    shape: list[int] = []
    for dim in pattern.dims:
        if bare and dim.optional:
            continue
        value = eval(dim.code, {}, bound) if dim.code else bound[dim.name]
        if dim.adds:
            bound[dim.name] = 1 + value % 4  # the next one's differs
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
    sums = (
        "cumsum",
        "cumprod",
        "reduce_sum",
        "reduce_prod",
        "matmul",
        "batch_matmul",
        "logsumexp",
        "softmax",
        "log_softmax",
        "scatter_add",
    )
    if rule.name in sums and dtype == "f32":
        made = np.where(np.abs(made) > 1e9, np.float32(1.5), made)
    if rule.name in ("matmul", "batch_matmul", "cumsum", "cumprod", "reduce_sum", "reduce_prod"):
        made = np.where(np.isnan(made), np.float32(0.25), made) if dtype == "f32" else made
    return made.astype(NUMPY[dtype])
