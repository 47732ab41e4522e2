"""Beam search: the likeliest texts that a search of a given width finds, each beam a fork of the state."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from inferlet import model as models
from inferlet._errors import UsageError
from inferlet._generate import Prompt, tokens_of
from inferlet.eta import ForwardPass, Pipeline, StateGeometry, WorkingSet, intrinsics, log_softmax, stack, top_k


@dataclass(frozen=True)
class Hypothesis:
    """A text that the search found.

    Attributes:
        tokens: without a stop token at the end.
        logprob: of all its tokens together, the stop token included, in nats.
        score: what hypotheses are ordered by: logprob / length ** length_penalty.
        is_complete: whether it ended with a stop token.
    """

    tokens: tuple[int, ...]
    logprob: float
    score: float
    is_complete: bool


async def search(
    prompt: Prompt,
    width: int = 4,
    max_tokens: int = 64,
    *,
    length_penalty: float = 1.0,
    stop: Iterable[int] = (),
    model_stops: bool = True,
) -> list[Hypothesis]:
    """The hypotheses found, the best first, at most `width`. Width 1 is greedy decoding.

    All beams are rows of one pass. After each, the likeliest `width` of all continuations go on. A continuation that ends is set
    aside, if it is among the best `width` then; the search is over when `width` of them are, or at `max_tokens`.

    Args:
        length_penalty: above 0 favours longer texts (Wu et al. 2016, arXiv:1609.08144, without its constant).
    """
    if type(width) is not int or width < 1 or type(max_tokens) is not int or max_tokens < 1:
        raise UsageError(f"beam.search: width {width!r} and max_tokens {max_tokens!r} are ints of at least 1")
    tokens = tokens_of(prompt)
    room = models.context_length() - len(tokens)
    if room < 1:
        raise UsageError(f"beam.search: the prompt has {len(tokens)} tokens; the context is {models.context_length()}")
    ends = frozenset(stop) | (frozenset(models.stop_tokens()) if model_stops else frozenset())
    count = min(2 * width, models.vocab_size())  # half of them may end

    def candidates(rows: int) -> Any:
        def best() -> Any:
            found = [top_k(log_softmax(intrinsics.output(row, "logits")), count) for row in range(rows)]
            return stack([logs for logs, _ in found]), stack([ids for _, ids in found])

        return best

    pipe, done = Pipeline(), list[Hypothesis]()
    sets, beams = [WorkingSet()], [((), 0.0)]
    fwd, recorded = ForwardPass().embed(tokens).state(sets, StateGeometry.folding()), 1
    fwd.epilogue(candidates(1))
    for length in range(1, min(max_tokens, room) + 1):
        logs, ids = pipe.submit(fwd)
        rows = zip(beams, await logs, await ids, strict=True)
        found = [
            (total + log, row, token, said)
            for row, ((said, total), row_logs, row_ids) in enumerate(rows)
            for log, token in zip(row_logs, row_ids, strict=True)
        ]
        found.sort(key=lambda one: (-one[0], one[1], one[2]))
        live: list[tuple[float, int, int, tuple[int, ...]]] = []
        for rank, one in enumerate(found):
            if one[2] in ends:
                if rank < width:
                    done.append(Hypothesis(one[3], one[0], one[0] / length**length_penalty, True))
            elif len(live) < width:
                live.append(one)
        beams = [((*said, token), total) for total, _, token, said in live]
        if len(done) >= width or not live or length == min(max_tokens, room):
            break
        sets = _moved(sets, [row for _, row, _, _ in live])
        if len(live) != recorded:
            fwd, recorded = ForwardPass(), len(live)
            fwd.embed([[token] for _, _, token, _ in live]).epilogue(candidates(recorded))
        fwd.embed([[token] for _, _, token, _ in live]).state(sets, StateGeometry.folding())
    done += [Hypothesis(said, total, total / len(said) ** length_penalty, False) for said, total in beams]
    complete = sorted((one for one in done if one.is_complete), key=lambda one: -one.score)
    others = sorted((one for one in done if not one.is_complete), key=lambda one: -one.score)
    return sorted((complete + others)[:width], key=lambda one: -one.score)


def _moved(sets: list[WorkingSet], parents: list[int]) -> list[WorkingSet]:
    """The state of each beam's parent: the parent's own for its first child, forks for the others."""
    return [sets[parent].fork() if parent in parents[:at] else sets[parent] for at, parent in enumerate(parents)]
