"""Ready epilogues: `out = fwd.epilogue(sample.top_p(0.9, temperature=0.7))`.

Each gives a function that draws one token (i32 scalar) from a row's logits. Numbers are inputs of the traced program,
so changing a temperature never compiles anything. Filters keep ties together.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from inferlet._errors import UsageError
from inferlet.eta import (
    categorical,
    intrinsics,
    mask_apply,
    pivot_cummass_le,
    pivot_prob_ge,
    pivot_rank_le,
    reduce_argmax,
    reduce_max,
    softmax,
)

Epilogue = Callable[[], Any]


def greedy(row: int = 0) -> Epilogue:
    """The likeliest token; the lowest id on ties."""
    return lambda: reduce_argmax(intrinsics.output(row, "logits"))


def temperature(value: float, row: int = 0) -> Epilogue:
    """A draw from softmax(logits / value); value 0 is greedy."""
    return sampler(temperature=value, row=row)


def top_k(k: int, temperature: float = 1.0, row: int = 0) -> Epilogue:
    """A draw among the k likeliest tokens."""
    return sampler(temperature=temperature, top_k=k, row=row)


def top_p(p: float, temperature: float = 1.0, row: int = 0) -> Epilogue:
    """A draw among the likeliest tokens that together have probability p (Holtzman et al. 2019, arXiv:1904.09751)."""
    return sampler(temperature=temperature, top_p=p, row=row)


def min_p(p: float, temperature: float = 1.0, row: int = 0) -> Epilogue:
    """A draw among tokens at least p times as likely as the likeliest (Nguyen et al. 2024, arXiv:2407.01082)."""
    return sampler(temperature=temperature, min_p=p, row=row)


def sampler(
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    row: int = 0,
) -> Epilogue:
    """All filters together, in the usual order: temperature, top-k, top-p, min-p, then the draw."""
    if not 0 <= temperature < float("inf"):
        raise UsageError(f"temperature {temperature!r}: a finite number of at least 0")
    if top_k is not None and (type(top_k) is not int or top_k < 1):
        raise UsageError(f"top_k {top_k!r}: an int of at least 1")
    for name, value in (("top_p", top_p), ("min_p", min_p)):
        if value is not None and not 0 < value <= 1:
            raise UsageError(f"{name} {value!r}: a number above 0, at most 1")
    if temperature == 0:
        return greedy(row)
    heat, p, floor = (
        float(temperature),
        None if top_p is None else float(top_p),
        None if min_p is None else float(min_p),
    )

    def draw() -> Any:
        logits = intrinsics.output(row, "logits") / heat
        if top_k is not None:
            logits = mask_apply(logits, pivot_rank_le(logits, top_k))
        if p is not None:
            logits = mask_apply(logits, pivot_cummass_le(softmax(logits), p))
        if floor is not None:
            likelihood = softmax(logits)
            logits = mask_apply(logits, pivot_prob_ge(likelihood, reduce_max(likelihood) * floor))
        return categorical(logits)

    return draw
