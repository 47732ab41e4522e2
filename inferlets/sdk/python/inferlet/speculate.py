"""Speculative decoding: a drafter guesses the next tokens, and one pass of the model checks all of them.

    spoken = speculate.speculate(prompt, speculate.NGram(), max_tokens=100)
    async for item in spoken: ...

The model draws a token at every position of the guess, and the guess stands as far as it is what the model drew; so the text follows
the model's own law whatever the drafter says, and with a greedy sampler it is the text of greedy decoding. A drafter is any object with
`async propose(tokens, width) -> list[int]`.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Any, Protocol

from inferlet import model as models
from inferlet._errors import UsageError
from inferlet._generate import Prompt, tokens_of
from inferlet.eta import ForwardPass, Pipeline, StateGeometry, WorkingSet, intrinsics, reduce_argmax, stack
from inferlet.grammar import Matcher, apply
from inferlet.sample import Sampler, greedy


class Drafter(Protocol):
    """Guesses what comes next."""

    async def propose(self, tokens: list[int], width: int) -> list[int]:
        """At most `width` tokens that may follow these (the prompt and all that was said)."""

    def saw(self, tokens: list[int], drawn: list[int]) -> None:
        """After each check: the tokens as they are now, and what the model drew at the positions of the last guess."""


class NGram:
    """What followed the last time that the text ended like this: prompt lookup (Saxena 2023; Yang et al. 2023, arXiv:2304.04487).

    Args:
        longest, shortest: how many tokens of the end are looked for, the longest run first.
    """

    def __init__(self, longest: int = 3, shortest: int = 1) -> None:
        if type(longest) is not int or type(shortest) is not int or not 1 <= shortest <= longest:
            raise UsageError(f"NGram({longest!r}, {shortest!r}): 1 <= shortest <= longest")
        self._sizes = range(longest, shortest - 1, -1)
        self._ends: dict[tuple[int, ...], int] = {}  # a run -> where its last occurrence ends, but for the text's end
        self._read = 0

    async def propose(self, tokens: list[int], width: int) -> list[int]:
        for end in range(max(self._read, 1), len(tokens)):
            for size in self._sizes:
                if size <= end:
                    self._ends[tuple(tokens[end - size : end])] = end
        self._read = len(tokens)
        for size in self._sizes:
            at = self._ends.get(tuple(tokens[-size:])) if size <= len(tokens) else None
            if at is not None:
                return tokens[at : at + width]
        return []

    def saw(self, tokens: list[int], drawn: list[int]) -> None:
        pass


class DraftModel:
    """What a smaller model says, greedily (Leviathan et al. 2023, arXiv:2211.17192). Its tokenizer must be the same one.

    Args:
        model: its name.
    """

    def __init__(self, model: str) -> None:
        self._model = model
        self._set, self._held = WorkingSet(model), list[int]()
        self._pipe = Pipeline()

    async def propose(self, tokens: list[int], width: int) -> list[int]:
        same = 0
        while same < min(len(self._held), len(tokens) - 1) and self._held[same] == tokens[same]:
            same += 1
        self._set.truncate(same)
        fwd = ForwardPass(self._model).embed(tokens[same:]).state([self._set], StateGeometry.folding())
        out = fwd.epilogue(greedy())
        drawn = [self._pipe.submit(fwd)]
        fwd.embed(out)
        drawn += [self._pipe.submit(fwd) for _ in range(width - 1)]
        guess = [await one for one in drawn]
        self._held = tokens + guess[:-1]
        return guess

    def saw(self, tokens: list[int], drawn: list[int]) -> None:
        pass


class Jacobi:
    """What the model itself drew for the later positions of the last guess (Santilli et al. 2023, arXiv:2305.10427)."""

    def __init__(self) -> None:
        self._guess: list[int] = []

    async def propose(self, tokens: list[int], width: int) -> list[int]:
        guess = self._guess[:width]
        return guess + [tokens[-1]] * (width - len(guess))

    def saw(self, tokens: list[int], drawn: list[int]) -> None:
        self._guess = drawn


class Junk:
    """Random tokens, nearly always wrong: the control. The text is the same, and every pass says one token."""

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)

    async def propose(self, tokens: list[int], width: int) -> list[int]:
        return [self._random.randrange(models.vocab_size()) for _ in range(width)]

    def saw(self, tokens: list[int], drawn: list[int]) -> None:
        pass


class Known:
    """A text that is known already: the control on the other side, every guess is right if the text is what the model says."""

    def __init__(self, continuation: Iterable[int]) -> None:
        self._text, self._start = list(continuation), -1

    async def propose(self, tokens: list[int], width: int) -> list[int]:
        if self._start < 0:
            self._start = len(tokens) - 1  # the first token is drawn already
        at = len(tokens) - self._start
        return self._text[at : at + width]

    def saw(self, tokens: list[int], drawn: list[int]) -> None:
        pass


class Speculation:
    """A speculative generation: an async iterator of tokens.

    Attributes:
        tokens: what was said so far.
        passes: passes of the model, the prompt's included.
        proposed, accepted: tokens that the drafter guessed, and how many of them stand.
    """

    def __init__(
        self,
        prompt: list[int],
        drafter: Drafter,
        width: int,
        sampler: Sampler,
        most: int,
        stops: frozenset[int],
        seed: int | None,
        matcher: Matcher | None,
    ) -> None:
        self.tokens: list[int] = []
        self.passes = self.proposed = self.accepted = 0
        self._text = list(prompt)
        self._drafter, self._width, self._sampler, self._most, self._stops = drafter, width, sampler, most, stops
        self._set, self._pipe, self._matcher = WorkingSet(), Pipeline(seed), matcher
        self._iterator = self._run(prompt)

    def __aiter__(self) -> AsyncIterator[int]:
        return self._iterator

    async def all_tokens(self) -> list[int]:
        """Run to the end; all tokens, without the stop token."""
        async for _ in self:
            pass
        return list(self.tokens)

    async def _run(self, prompt: list[int]) -> AsyncIterator[int]:
        first = ForwardPass().embed(prompt).state([self._set], StateGeometry.folding())
        first.epilogue(self._checks(1, [] if self._matcher is None else [self._matcher], single=True))
        drawn = [await self._pipe.submit(first)]
        self.passes = 1
        while True:
            for token in drawn:
                if token in self._stops:
                    return
                self.tokens.append(token)
                self._text.append(token)
                if self._matcher is not None:
                    self._matcher.accept(token)
                yield token
                if len(self.tokens) >= self._most:
                    return
            drawn = await self._round()

    async def _round(self) -> list[int]:
        """One check: the tokens that are certain after it, at least one."""
        width = min(self._width, models.context_length() - len(self._set) - 1)
        guess = (await self._drafter.propose(self._text, width))[:width] if width > 0 else []
        matchers = [] if self._matcher is None else [self._matcher]
        if self._matcher is not None:
            guess = self._legal(guess, matchers)
        # Guesses are filled up with a token, so that one program serves all lengths.
        fill = [self._text[-1]] * (max(width, 0) - len(guess))
        matchers += matchers[-1:] * len(fill)
        block = [self._text[-1], *guess, *fill]
        check = ForwardPass().embed(block).state([self._set], StateGeometry.buffering()).readout(range(len(block)))
        check.epilogue(self._checks(len(block), matchers))
        drawn = await self._pipe.submit(check)
        self.passes += 1
        stand = 0
        while stand < len(guess) and guess[stand] == drawn[stand]:
            stand += 1
        self._set.commit(1 + stand)
        self.proposed += len(guess)
        self.accepted += stand
        said = drawn[: stand + 1]
        self._drafter.saw(self._text + said, drawn[stand + 1 :])
        return said

    def _legal(self, guess: list[int], matchers: list[Matcher]) -> list[int]:
        """The guess as far as the grammar allows it; a matcher for each position is added."""
        kept: list[int] = []
        for token in guess:
            after = matchers[-1].fork()
            if token in self._stops or after.accept(token) != 1:
                break
            kept.append(token)
            matchers.append(after)
        return kept

    def _checks(self, count: int, matchers: Sequence[Matcher], single: bool = False) -> Callable[[], Any]:
        sampler = self._sampler

        def draw() -> Any:
            logits = intrinsics.output(0, "logits")
            if single:
                return sampler.pick(apply(logits, matchers[0]) if matchers else logits)
            if not matchers and sampler == greedy():
                return reduce_argmax(logits)
            rows = [apply(logits[i], matchers[i]) if matchers else logits[i] for i in range(count)]
            return stack([sampler.pick(row) for row in rows])

        return draw


def speculate(
    prompt: Prompt,
    drafter: Drafter,
    *,
    width: int = 4,
    sampler: Sampler | None = None,
    max_tokens: int = 64,
    stop: Iterable[int] = (),
    model_stops: bool = True,
    seed: int | None = None,
    grammar: Matcher | None = None,
) -> Speculation:
    """Continue a prompt with the help of a drafter.

    Args:
        width: tokens of a guess; each check runs the model over one more.
        sampler: one without state; greedy if None. With others the text follows the same law as without a drafter, but is not the same one.
        stop: tokens that end it, besides the model's own.
        grammar: a matcher; the guess is cut where it does not allow it. Its forced tokens are a drafter too: `speculate.Forced(matcher)`.
    """
    tokens = tokens_of(prompt)
    drawing = greedy() if sampler is None else sampler
    if drawing.has_state:
        raise UsageError("speculate: a sampler that keeps state would have to take back what did not stand")
    if type(width) is not int or width < 1 or type(max_tokens) is not int or max_tokens < 1:
        raise UsageError(f"speculate: width {width!r} and max_tokens {max_tokens!r} are ints of at least 1")
    room = models.context_length() - len(tokens)
    if room < 1:
        raise UsageError(f"speculate: the prompt has {len(tokens)} tokens; the context is {models.context_length()}")
    ends = frozenset(stop) | (frozenset(models.stop_tokens()) if model_stops else frozenset())
    return Speculation(tokens, drafter, width, drawing, min(max_tokens, room), ends, seed, grammar)


class Forced:
    """The tokens about which a grammar leaves no choice: JSON's quotes, names and colons cost no pass of their own.

    Args:
        matcher: the one that `speculate` is given.
        otherwise: who guesses where there is a choice.
    """

    def __init__(self, matcher: Matcher, otherwise: Drafter | None = None) -> None:
        self._matcher, self._otherwise = matcher, otherwise

    async def propose(self, tokens: list[int], width: int) -> list[int]:
        forced = self._matcher.fork().forced()[:width]
        if forced or self._otherwise is None:
            return forced
        return await self._otherwise.propose(tokens, width)

    def saw(self, tokens: list[int], drawn: list[int]) -> None:
        if self._otherwise is not None:
            self._otherwise.saw(tokens, drawn)
