"""Filters: which tokens may still be drawn. Tokens that are equally likely stay or go together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from inferlet.eta import (
    abs_,
    cast,
    cumsum,
    entropy_from_logprobs,
    exp,
    fori,
    isfinite,
    log_softmax,
    mask_apply,
    max_elem,
    min_elem,
    pad,
    param,
    pivot_cummass_le,
    pivot_rank_le,
    reduce_max,
    reduce_min,
    reduce_sum,
    softmax,
    sqrt,
    top_k,
    uniform,
    where,
)
from inferlet.sample._sampler import Step

BISECTIONS = 30  # halvings of a threshold's range, 20 nats or so: finer than what f32 tells apart there
COLUMNS = 256
WINDOW = 1024  # likeliest tokens among which the tail is looked for
INF = float("inf")


def least(holds: Callable[[Any], Any], high: Any) -> Any:
    """The least f32 from 0 to `high` for which `holds`, which is false up to a point and true from there to `high`."""

    def halve(_: Any, bounds: tuple[Any, Any]) -> tuple[Any, Any]:
        low, top = bounds
        middle = (low + top) * 0.5
        enough = holds(middle)
        return where(enough, low, middle), where(enough, middle, top)

    return fori(BISECTIONS, halve, (high * 0.0, high))[1]


def total(x: Any) -> Any:
    """The sum of f32[V], down columns first, which XLA's CPU backend does several elements at a time."""
    rows = -(-x.shape[0] // COLUMNS)
    padded = pad(x, 0.0, high=rows * COLUMNS - x.shape[0]) if rows * COLUMNS != x.shape[0] else x
    return reduce_sum(reduce_sum(padded.reshape((rows, COLUMNS)), axis=0))


def only_finite(x: Any, instead: float) -> Any:
    """x, with a number in the place of what is not finite."""
    return where(isfinite(x), x, instead)


@dataclass(frozen=True)
class Usual(Step):
    """Temperature, top-k, top-p and min-p: one program, whichever are in use. k 0, p 1 and floor 0 are off."""

    temperature: float
    k: int
    p: float
    floor: float

    def change(self, logits: Any, past: Any) -> Any:
        logits = logits / param(self.temperature)
        k, p = param(self.k), param(self.p)
        # What is off looks for the likeliest token alone: a filter that keeps everything is the dearest.
        logits = mask_apply(logits, pivot_rank_le(logits, where(k == 0, 1, k)) | (k == 0))
        mass = softmax(logits)
        nucleus = pivot_cummass_le(mass, where(p >= 1.0, 1e-9, p)) | (p >= 1.0)
        return mask_apply(logits, nucleus & (mass >= reduce_max(mass) * param(self.floor)))


@dataclass(frozen=True)
class TopA(Step):
    a: float

    def change(self, logits: Any, past: Any) -> Any:
        mass = softmax(logits)
        best = reduce_max(mass)
        return mask_apply(logits, mass >= best * best * param(self.a))


@dataclass(frozen=True)
class Epsilon(Step):
    epsilon: float

    def change(self, logits: Any, past: Any) -> Any:
        mass = softmax(logits)
        return mask_apply(logits, mass >= min_elem(reduce_max(mass), param(self.epsilon)))


@dataclass(frozen=True)
class Eta(Step):
    epsilon: float

    def change(self, logits: Any, past: Any) -> Any:
        logs = log_softmax(logits)
        mass, epsilon = exp(logs), param(self.epsilon)
        bound = min_elem(epsilon, sqrt(epsilon) * exp(-entropy_from_logprobs(mass, logs)))
        return mask_apply(logits, mass >= min_elem(reduce_max(mass), bound))


@dataclass(frozen=True)
class Typical(Step):
    mass: float

    def change(self, logits: Any, past: Any) -> Any:
        logs = log_softmax(logits)
        p = exp(logs)
        distance = abs_(logs + entropy_from_logprobs(p, logs))  # of a token's information from the expected one
        wanted = param(self.mass)

        def enough(bound: Any) -> Any:
            return total(where(distance <= bound, p, 0.0)) >= wanted

        bound = least(enough, reduce_max(only_finite(distance, 0.0)))
        return mask_apply(logits, distance <= bound)


@dataclass(frozen=True)
class TailFree(Step):
    z: float

    def change(self, logits: Any, past: Any) -> Any:
        mass = softmax(logits)
        # A full sort is dear, and what is beyond the window adds at most twice its greatest probability to all bends.
        falling, _ = top_k(mass, min(WINDOW, mass.shape[0]))
        slope = falling[:-1] - falling[1:]
        bend = abs_(slope[:-1] - slope[1:])
        share = cumsum(bend) / max_elem(reduce_sum(bend), 1e-30)
        # The second difference of three tokens belongs to the one in the middle; the first token always stays.
        z = param(self.z)
        kept = where(share <= z, falling[1:-1], INF)
        return mask_apply(logits, (mass >= min_elem(falling[0], reduce_min(kept))) | (z >= 1.0))


@dataclass(frozen=True)
class TopNSigma(Step):
    n: float

    def change(self, logits: Any, past: Any) -> Any:
        alive = cast(isfinite(logits), "f32")
        count = reduce_sum(alive)
        mean = reduce_sum(only_finite(logits, 0.0)) / count
        off = (only_finite(logits, 0.0) - mean) * alive
        sigma = sqrt(reduce_sum(off * off) / count)
        return mask_apply(logits, logits >= reduce_max(logits) - param(self.n) * sigma)


@dataclass(frozen=True)
class Xtc(Step):
    threshold: float
    probability: float

    def change(self, logits: Any, past: Any) -> Any:
        mass = softmax(logits)
        top = mass >= param(self.threshold)
        least_of_top = reduce_min(where(top, mass, INF))
        now = uniform(()) < param(self.probability)
        return mask_apply(logits, ~(top & (mass > least_of_top) & now))
