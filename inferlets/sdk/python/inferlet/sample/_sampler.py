"""A sampler: steps that change the logits, one after another, and a draw."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from inferlet._errors import UsageError
from inferlet.eta import Channel, categorical, concat, intrinsics, reduce_argmax

SHORTEST_PAST = 256  # tokens; pasts are powers of two, so that few programs serve all lengths


@dataclass(frozen=True)
class Step:
    """One change of the logits. A subclass is a frozen dataclass whose numbers become inputs of the program.

    Attributes:
        looks_back: whether `change` needs the tokens so far.
    """

    looks_back: ClassVar[bool] = False
    has_state: ClassVar[bool] = False

    def begin(self) -> Step:
        """The step for one sequence, with whatever channels it keeps between the tokens."""
        return self

    def change(self, logits: Any, past: Any) -> Any:
        """Inside an epilogue.

        Args:
            logits: f32[V].
            past: i32[N] if the step looks back, else perhaps None: the last tokens, newest last. -1 is none yet, and a token t of the
                prompt is -2 - t.
        """
        raise NotImplementedError

    def drawn(self, token: Any, logits: Any) -> None:
        """Inside an epilogue, after the draw: `logits` are those that were drawn from."""


@dataclass(frozen=True)
class Draw:
    """How a token is drawn from the final logits."""

    looks_back: ClassVar[bool] = False

    def pick(self, logits: Any, past: Any) -> Any:
        """Inside an epilogue: i32 scalar from logits f32[V] (and the past, as in `Step.change`)."""
        raise NotImplementedError


@dataclass(frozen=True)
class Categorical(Draw):
    """A draw from softmax(logits)."""

    def pick(self, logits: Any, past: Any) -> Any:
        return categorical(logits)


@dataclass(frozen=True)
class Argmax(Draw):
    """The likeliest token; the lowest id on ties."""

    def pick(self, logits: Any, past: Any) -> Any:
        return reduce_argmax(logits)


@dataclass(frozen=True)
class Sampler:
    """Steps and a draw. `a | b` takes the steps of a, then those of b, and the draw of b (of a, if b names none).

    A sampler is an epilogue: `fwd.epilogue(sampler)` draws from a row's logits. One that keeps state or looks back at the tokens serves
    one sequence: `fwd.epilogue(sampler.begin(tokens, max_tokens))`. `generate` does that by itself.

    Attributes:
        row: whose logits it draws from when it is the epilogue itself.
        past: the tokens so far, once begun, if any step looks back.
    """

    steps: tuple[Step, ...] = ()
    draw: Draw | None = None
    row: int = 0
    past: Channel | None = None
    begun: bool = False

    def __or__(self, other: Sampler) -> Sampler:
        if not isinstance(other, Sampler):
            raise UsageError(f"a sampler joins another sampler, not {type(other).__name__}")
        if self.begun or other.begun:
            raise UsageError("join samplers before begin(...): what they keep belongs to one sequence")
        draw = self.draw if other.draw is None else other.draw
        return Sampler(self.steps + other.steps, draw, other.row or self.row)

    @property
    def looks_back(self) -> bool:
        """Whether it needs the tokens so far."""
        return any(step.looks_back for step in self.steps) or (self.draw is not None and self.draw.looks_back)

    @property
    def has_state(self) -> bool:
        """Whether it keeps anything from token to token."""
        return self.looks_back or any(step.has_state for step in self.steps)

    def begin(self, tokens: Sequence[int] = (), room: int = 0) -> Sampler:
        """The sampler for one sequence.

        Args:
            tokens: what the sequence starts with (the prompt).
            room: how many tokens it may draw; where more are drawn, the oldest are forgotten.
        """
        past = None
        if self.looks_back:
            size = SHORTEST_PAST
            while size < len(tokens) + room:
                size *= 2
            past = Channel.of([-1] * (size - len(tokens)) + [-2 - token for token in tokens])
        return replace(self, steps=tuple(step.begin() for step in self.steps), past=past, begun=True)

    def __call__(self) -> Any:
        return self.pick(intrinsics.output(self.row, "logits"))

    def pick(self, logits: Any) -> Any:
        """Inside an epilogue: a token, i32 scalar, from logits f32[V]."""
        if self.has_state and not self.begun:
            raise UsageError("this sampler keeps state: use sampler.begin(tokens, max_tokens), one for each sequence")
        past = None if self.past is None else self.past.take()
        for step in self.steps:
            logits = step.change(logits, past)
        token = (self.draw or Categorical()).pick(logits, past)
        for step in self.steps:
            step.drawn(token, logits)
        if self.past is not None:
            self.past.put(concat(past[1:], token.reshape((1,))))
        return token


def number(name: str, value: Any, low: float, high: float, *, above: bool = False) -> float:
    """A parameter as a float.

    Raises:
        UsageError: it is not within low..high (above: not low itself).
    """
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not low <= value <= high or (above and value == low):
        bounds = "a finite number" if high == float("inf") else f"a number of at most {high:g}"
        raise UsageError(f"{name} {value!r:.60}: {bounds}, {'above' if above else 'at least'} {low:g}")
    if value == float("inf"):
        raise UsageError(f"{name} {value!r}: a finite number")
    return float(value)


def whole(name: str, value: Any, least: int) -> int:
    """A parameter as an int.

    Raises:
        UsageError: it is no int of at least `least`.
    """
    if type(value) is not int or value < least:
        raise UsageError(f"{name} {value!r:.60}: an int of at least {least}")
    return value
