"""Penalties and biases: how likely a token is, given which came before. All of it stays on the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from inferlet.eta import (
    argsort,
    broadcast,
    cast,
    concat,
    fori,
    gather,
    intrinsics,
    param,
    pow_,
    reduce_any,
    scatter_add,
    scatter_set,
    where,
)
from inferlet.sample._sampler import Step

LONGEST_MATCH = 48  # tokens of a repetition that DRY tells apart


def tokens_of(past: Any) -> Any:
    """i32[N]: the past without the mark of the prompt; -1 is none."""
    return where(past < -1, -2 - past, past)


def counts(tokens: Any) -> Any:
    """f32[V]: how often each token is among i32[N]; negative ones are not counted."""
    return scatter_add(broadcast(param(0.0), (intrinsics.vocab(),)), tokens, 1.0)


@dataclass(frozen=True)
class Penalties(Step):
    """`repetition` looks at all tokens, `presence` and `frequency` at those drawn."""

    looks_back: ClassVar[bool] = True

    repetition: float
    presence: float
    frequency: float

    def change(self, logits: Any, past: Any) -> Any:
        ratio = param(self.repetition)
        seen = counts(tokens_of(past)) > 0.0
        logits = where(seen, where(logits > 0.0, logits / ratio, logits * ratio), logits)
        said = counts(past)  # the prompt's tokens are negative there
        return logits - said * param(self.frequency) - cast(said > 0.0, "f32") * param(self.presence)


@dataclass(frozen=True)
class Dry(Step):
    """A token that would continue a repetition of n >= allowed tokens loses multiplier * base ** (n - allowed)."""

    looks_back: ClassVar[bool] = True

    multiplier: float
    base: float
    allowed: int
    breakers: tuple[int, ...]

    def change(self, logits: Any, past: Any) -> Any:
        tokens = tokens_of(past)
        size = tokens.shape[0]
        breaks = tokens < 0
        if self.breakers:
            own = param(list(self.breakers))
            many = broadcast(tokens.reshape((size, 1)), (size, len(self.breakers)))
            breaks = breaks | reduce_any(many == broadcast(own.reshape((1, len(self.breakers))), many.shape))
        usable = where(breaks, -1, tokens)
        ends = concat(broadcast(param(-1), (1,)), usable[:-1])  # before place i ends what token i continued
        lengths = broadcast(param(0), (size,))

        def longer(step: Any, carry: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
            length, going, back = carry  # back[i] = usable[i - 1 - step]
            last = gather(usable, size - 1 - step)
            going = going & (back == last) & (back >= 0)
            shifted = concat(broadcast(param(-1), (1,)), back[:-1])
            return length + cast(going, "i32"), going, shifted

        length, _, _ = fori(min(LONGEST_MATCH, size - 1), longer, (lengths, tokens >= 0, ends))
        order = argsort(length)
        longest = scatter_set(
            broadcast(param(0), (intrinsics.vocab(),)), gather(tokens, order), gather(length, order)
        )  # the longest is written last
        allowed = param(self.allowed)
        excess = cast(longest - allowed, "f32")
        loss = param(self.multiplier) * pow_(param(self.base), excess)
        return where((longest >= allowed) & (longest > 0), logits - loss, logits)


@dataclass(frozen=True)
class NoRepeat(Step):
    """No run of n tokens comes twice."""

    looks_back: ClassVar[bool] = True

    n: int

    def change(self, logits: Any, past: Any) -> Any:
        tokens = tokens_of(past)
        size = tokens.shape[0]
        same = tokens >= 0
        for back in range(1, self.n):
            shifted = concat(broadcast(param(-1), (back,)), tokens[:-back])
            same = same & (shifted == tokens[size - back]) & (shifted >= 0)
        banned = counts(where(same, tokens, -1)) > 0.0
        return where(banned, float("-inf"), logits)


@dataclass(frozen=True)
class Bias(Step):
    tokens: tuple[int, ...]
    biases: tuple[float, ...]

    def change(self, logits: Any, past: Any) -> Any:
        return scatter_add(logits, param(list(self.tokens)), param(list(self.biases)))
