"""Watermarks: samplers that leave a trace that only the holder of a key can find, and the detectors that find it.

    mark = watermark.Greenlist(key=42)
    generation = generate(prompt, sampler=mark.sampler(), max_tokens=200)
    mark.detect(await generation.all_tokens()).z          # about 0 for text that is not marked

What is drawn depends on pseudorandom numbers of (key, the last `context` tokens, token). The detector computes the same ones, without
the model. It counts a token after the same context once only, since repeated text would count the same chance again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from inferlet._errors import UsageError
from inferlet.eta import (
    bit_and,
    bit_xor,
    broadcast,
    cast,
    exp,
    fori,
    intrinsics,
    iota,
    log,
    log_softmax,
    max_elem,
    param,
    reduce_argmax,
    shift_right,
    where,
)
from inferlet.sample import Draw, Sampler, Step, number, tokens_of, whole
from inferlet.sample._filters import total

_WORD = (1 << 32) - 1
_ODD = 0x9E3779B1  # spreads consecutive numbers
_ROUNDS = ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 1))  # of the "lowbias32" hash: shift, then multiply


@dataclass(frozen=True)
class Detection:
    """What a detector found.

    Attributes:
        z: standard deviations above what unmarked text shows on average.
        p_value: how often unmarked text looks at least so marked (normal approximation).
        counted: tokens that the score is of.
    """

    z: float
    p_value: float
    counted: int


@dataclass(frozen=True)
class Greenlist:
    """Half of the tokens (a share `gamma`) are green after each context, and have `delta` added to their logits.

    Kirchenbauer et al. 2023, "A Watermark for Large Language Models", arXiv:2301.10226 (its soft rule). `delta` 0 leaves no mark.
    """

    key: int
    gamma: float = 0.5
    delta: float = 2.0
    context: int = 1

    def __post_init__(self) -> None:
        _check(self.key, self.context)
        number("greenlist gamma", self.gamma, 0, 1, above=True)
        number("greenlist delta", self.delta, 0, math.inf)

    def sampler(self) -> Sampler:
        """Adds the mark to the logits; joins with others: `mark.sampler() | sample.top_p(0.9)`."""
        return Sampler((_Green(self.key, float(self.gamma), float(self.delta), self.context),))

    def detect(self, tokens: Sequence[int]) -> Detection:
        """Of tokens, their first ones taken as context."""
        drawn = [_share(value) < self.gamma for value in _values(tokens, self.key, self.context)]
        spread = math.sqrt(max(len(drawn), 1) * self.gamma * (1 - self.gamma)) or 1.0
        return _found((sum(drawn) - self.gamma * len(drawn)) / spread, len(drawn))


@dataclass(frozen=True)
class Gumbel:
    """The draw itself is pseudorandom: the token with the largest log p + Gumbel noise of the key. On average no token is favoured.

    Aaronson 2022, "Watermarking of Large Language Models"; Kuditipudi et al. 2023, arXiv:2307.15593, on freedom from distortion.
    The same prompt gives the same text always.
    """

    key: int
    context: int = 4

    def __post_init__(self) -> None:
        _check(self.key, self.context)

    def sampler(self) -> Sampler:
        """Draws; filters and temperatures come before it: `sample.top_p(0.9) | mark.sampler()`."""
        return Sampler(draw=_GumbelDraw(self.key, self.context))

    def detect(self, tokens: Sequence[int]) -> Detection:
        """Of tokens, their first ones taken as context."""
        scores = [-math.log1p(-_share(value)) for value in _values(tokens, self.key, self.context)]
        return _found((sum(scores) - len(scores)) / math.sqrt(max(len(scores), 1)), len(scores))


@dataclass(frozen=True)
class Tournament:
    """Tokens play `layers` rounds; in each, pairs drawn from the distribution meet and the one with the pseudorandom bit 1 wins.

    Dathathri et al. 2024, "Scalable watermarking for identifying large language model outputs" (SynthID-Text), Nature 634: two players a
    match, computed exactly on the distribution instead of by matches. 0 layers leave no mark.
    """

    key: int
    layers: int = 30
    context: int = 4

    def __post_init__(self) -> None:
        _check(self.key, self.context)
        if type(self.layers) is not int or not 0 <= self.layers <= 32:
            raise UsageError(f"tournament layers {self.layers!r:.60}: an int from 0 to 32")

    def sampler(self) -> Sampler:
        """Changes the distribution; filters and temperatures come before it: `sample.top_p(0.9) | mark.sampler()`."""
        return Sampler((_Rounds(self.key, self.layers, self.context),) if self.layers else ())

    def detect(self, tokens: Sequence[int]) -> Detection:
        """Of tokens, their first ones taken as context."""
        keep = (1 << self.layers) - 1
        bits = [(value & keep).bit_count() for value in _values(tokens, self.key, self.context)]
        total = len(bits) * self.layers
        return _found((sum(bits) - total / 2) / math.sqrt(max(total, 1) / 4), len(bits))


@dataclass(frozen=True)
class _Green(Step):
    looks_back: ClassVar[bool] = True

    key: int
    gamma: float
    delta: float
    context: int

    def change(self, logits: Any, past: Any) -> Any:
        green = _shares(_device_values(self.key, past, self.context)) < param(self.gamma)
        return logits + where(green, param(self.delta), 0.0)


@dataclass(frozen=True)
class _GumbelDraw(Draw):
    looks_back: ClassVar[bool] = True

    key: int
    context: int

    def pick(self, logits: Any, past: Any) -> Any:
        noise = -log(-log(_shares(_device_values(self.key, past, self.context))))
        return reduce_argmax(log_softmax(logits) + noise)


@dataclass(frozen=True)
class _Rounds(Step):
    looks_back: ClassVar[bool] = True

    key: int
    layers: int
    context: int

    def change(self, logits: Any, past: Any) -> Any:
        values, mass = _device_values(self.key, past, self.context), exp(log_softmax(logits))

        def play(layer: Any, carry: tuple[Any, Any]) -> tuple[Any, Any]:
            mass, left = carry
            bit = cast(cast(bit_and(left, 1), "i32"), "f32")
            return mass * (1.0 + bit - total(mass * bit)), shift_right(left, 1)

        # In a loop: XLA would fuse unrolled rounds, and compute the earlier ones anew for each.
        mass, _ = fori(self.layers, play, (mass, values))
        return where(mass > 0.0, log(max_elem(mass, 1e-38)), -math.inf)


def _check(key: int, context: int) -> None:
    whole("watermark key", key, 0)
    if key > _WORD:
        raise UsageError(f"watermark key {key}: at most {_WORD}")
    whole("watermark context", context, 1)


def _found(z: float, counted: int) -> Detection:
    return Detection(z, math.erfc(z / math.sqrt(2)) / 2, counted)


def _mix(x: int) -> int:
    for shift, factor in _ROUNDS:
        x = ((x ^ (x >> shift)) * factor) & _WORD
    return x


def _share(value: int) -> float:
    """In the open interval (0, 1)."""
    return ((value >> 8) + 0.5) / (1 << 24)


def _values(tokens: Sequence[int], key: int, context: int) -> Iterator[int]:
    """The pseudorandom word of each token after its context; the same context and token once only."""
    seen: set[tuple[int, ...]] = set()
    for at in range(context, len(tokens)):
        run = tuple(tokens[at - context : at + 1])
        if run in seen:
            continue
        seen.add(run)
        seed = key
        for token in run[:-1]:
            seed = _mix(seed ^ ((token * _ODD + 1) & _WORD))
        yield _mix(seed ^ ((run[-1] * _ODD) & _WORD))


def _device_mix(x: Any) -> Any:
    for shift, factor in _ROUNDS:
        x = bit_xor(x, shift_right(x, shift))
        if factor != 1:
            x = x * param(factor, "u32")
    return x


def _device_values(key: int, past: Any, context: int) -> Any:
    """u32[V]: `_values` of each token, after the last tokens of the past."""
    tokens = cast(tokens_of(past), "u32")
    odd, seed = param(_ODD, "u32"), param(key, "u32")
    for at in range(tokens.shape[0] - context, tokens.shape[0]):
        seed = _device_mix(bit_xor(seed, tokens[at] * odd + param(1, "u32")))
    vocab = intrinsics.vocab()
    return _device_mix(bit_xor(broadcast(seed, (vocab,)), iota(vocab) * odd))


def _shares(values: Any) -> Any:
    # i32 on the way: XLA converts unsigned integers to f32 more slowly
    return (cast(cast(shift_right(values, 8), "i32"), "f32") + 0.5) * (1.0 / (1 << 24))
