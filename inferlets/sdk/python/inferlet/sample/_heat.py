"""Temperatures: fixed, by entropy, and steered by surprise."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from inferlet._errors import UsageError
from inferlet.eta import (
    Channel,
    cast,
    entropy_from_logprobs,
    exp,
    gather,
    isfinite,
    log,
    log_softmax,
    mask_apply,
    max_elem,
    param,
    reduce_min,
    reduce_sum,
)
from inferlet.sample._sampler import Step

BITS = 1.4426950408889634  # of a nat
COLDEST = 1e-3


@dataclass(frozen=True)
class Temperature(Step):
    value: float

    def change(self, logits: Any, past: Any) -> Any:
        return logits / param(self.value)


def entropy(logits: Any) -> Any:
    """Of softmax(logits), in nats."""
    logs = log_softmax(logits)
    return entropy_from_logprobs(exp(logs), logs)


@dataclass(frozen=True)
class EntropyTemperature(Step):
    highest: float
    theta: float
    base: float

    def change(self, logits: Any, past: Any) -> Any:
        sharpness = param(self.theta) / max_elem(entropy(logits), 1e-6)
        heat = param(self.highest) * exp(log(param(self.base)) * sharpness)
        return logits / max_elem(heat, COLDEST)


@dataclass(frozen=True)
class DynamicTemperature(Step):
    low: float
    high: float
    exponent: float

    def change(self, logits: Any, past: Any) -> Any:
        most = log(max_elem(reduce_sum(cast(isfinite(logits), "f32")), 2.0))
        share = max_elem(entropy(logits) / most, 1e-9)
        low, high = param(self.low), param(self.high)
        return logits / max_elem(low + (high - low) * exp(log(share) * param(self.exponent)), COLDEST)


@dataclass(frozen=True)
class Mirostat(Step):
    """`mu`, the bound of a token's surprise, moves so that the surprise of what is drawn comes to `tau` bits."""

    has_state: ClassVar[bool] = True

    tau: float
    rate: float
    mu: Channel | None = None

    def begin(self) -> Mirostat:
        return replace(self, mu=Channel.of(2.0 * self.tau))

    def change(self, logits: Any, past: Any) -> Any:
        surprise = log_softmax(logits) * -BITS
        bound = max_elem(self._mu.read(), reduce_min(surprise))  # the likeliest token always stays
        return mask_apply(logits, surprise <= bound)

    def drawn(self, token: Any, logits: Any) -> None:
        seen = gather(log_softmax(logits), token) * -BITS
        mu = self._mu.take()
        self._mu.put(mu - param(self.rate) * (seen - param(self.tau)))

    @property
    def _mu(self) -> Channel:
        if self.mu is None:
            raise UsageError("mirostat keeps state: use sampler.begin(), one for each sequence")
        return self.mu
