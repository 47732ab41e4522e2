"""`generate`: a model's continuation as an async iterator of tokens and text."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from inferlet import chat
from inferlet import model as models
from inferlet._errors import RefusedError, UsageError
from inferlet._host import runtime
from inferlet._stops import StopStrings
from inferlet.eta import (
    ForwardPass,
    Output,
    Pipeline,
    StateGeometry,
    WorkingSet,
    gather,
    intrinsics,
    log_softmax,
    top_k,
)
from inferlet.evict import Policy
from inferlet.grammar import Matcher, apply
from inferlet.sample import Sampler, greedy

MOST_TOP = 20  # alternatives that can be asked for; always so many are computed, so that one program serves all
DEPTH = 4

Prompt = str | Sequence[int] | Sequence[dict[str, Any]]


class Reason(Enum):
    """Why a generation ended."""

    STOP_TOKEN = "stop_token"
    STOP_STRING = "stop_string"
    LENGTH = "length"


@dataclass(frozen=True)
class Item:
    """One token of a generation.

    Attributes:
        token: its id.
        text: what it makes certain. Never half a character; text that may begin a stop string comes with a later token.
        logprob: of the token, in nats, under the model's own distribution (before grammar and sampler); None if not asked for.
        top: (token, logprob) of the likeliest tokens, the likeliest first, as many as were asked for.
        reason: set on the last item.
    """

    token: int
    text: str
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    reason: Reason | None = None


class Generation:
    """A continuation underway: `async for item in generation`, or `await generation.all_text()`.

    Attributes:
        prompt: the tokens that it was given to embed.
        tokens: what was drawn so far, without a stop token at the end.
        text: their text so far, without a stop string.
        reason: why it ended, None before.
        stop: the stop token or stop string that ended it, else None.
        working_set: holds, once it has ended, what it held before, the prompt and `tokens` except for the last drawn token, which no pass
            has embedded.
        seed: what its random draws come from; None is the process's.
    """

    def __init__(
        self,
        prompt: list[int],
        *,
        sampler: Sampler,
        most: int,
        stop_tokens: frozenset[int],
        strings: StopStrings,
        top: int | None,
        seed: int | None,
        matcher: Matcher | None,
        working_set: WorkingSet | None,
        model: str | None,
        kv: Policy,
        depth: int,
    ) -> None:
        self.prompt, self.seed = prompt, seed
        self.tokens: list[int] = []
        self.text = ""
        self.reason: Reason | None = None
        self.stop: int | str | None = None
        self.working_set = WorkingSet(model) if working_set is None else working_set
        self._is_ours = working_set is None
        self._start = len(self.working_set) + len(prompt)
        self._stop_tokens, self._strings, self._top, self._matcher = stop_tokens, strings, top, matcher
        self._stream = models.TextStream(model=model)
        self._pipe = Pipeline(seed)
        self._left, self._most, self._depth = most, most, depth
        self._flying: deque[Any] = deque()
        self._kv, self._forgotten, self._page = kv, 0, runtime().facts.of(model).page_size
        self._fwd = ForwardPass(model).embed(prompt).state([self.working_set], kv.sight(StateGeometry.folding()))
        made = self._fwd.epilogue(_epilogue(sampler, matcher, top))
        self._drawn: Output = made if isinstance(made, Output) else made[0]
        self._submit()
        self._fwd.embed(self._drawn)
        simple = matcher is None and depth > 1 and kv == Policy()  # others act at each submit
        self._ahead = self._pipe.run_ahead(self._fwd, self._left, depth - 1) if simple else None

    def _submit(self) -> None:
        sent = self._pipe.submit(self._fwd)
        if self._matcher is not None:
            self._matcher.follow(sent if isinstance(sent, Output) else sent[0])
        self._flying.append(sent)
        self._left -= 1
        self._forget()

    def _forget(self) -> None:
        """Give the pages back that no later token sees."""
        dead = self._kv.dead(max(0, len(self.working_set) - self._depth))  # what ran ahead may be taken back
        count = sum(end - begin for begin, end in dead)
        if count >= self._forgotten + self._page:  # what is less frees no page
            self.working_set.evict(dead)
            self._forgotten = count

    def __aiter__(self) -> Generation:
        return self

    async def __anext__(self) -> Item:
        if self.reason is not None:
            raise StopAsyncIteration
        return self._item(await self._next())

    async def _next(self) -> tuple[Any, ...]:
        if self._ahead is not None and not self._flying:
            value = await anext(self._ahead)
        else:
            while self._ahead is None and self._left and len(self._flying) < self._depth:
                self._submit()
            oldest = self._flying.popleft()
            if isinstance(oldest, Output):
                value = await oldest
            else:
                value = tuple([await part for part in oldest])
        return value if isinstance(value, tuple) else (value,)

    def _item(self, value: tuple[Any, ...]) -> Item:
        token = value[0]
        logprob = value[1] if self._top is not None else None
        top = tuple(zip(value[3], value[2], strict=True))[: self._top] if self._top else ()
        if token in self._stop_tokens:
            self.stop = token
            return self._end(Item(token, self._say(self._stream.finish(), last=True), logprob, top, Reason.STOP_TOKEN))
        self.tokens.append(token)
        text = self._say(self._stream.push(token))
        if self._strings.found is not None:
            self.stop = self._strings.found
            return self._end(Item(token, text, logprob, top, Reason.STOP_STRING))
        if len(self.tokens) < self._most:
            return Item(token, text, logprob, top)
        text += self._say(self._stream.finish(), last=True)
        if self._strings.found is not None:
            self.stop = self._strings.found
            return self._end(Item(token, text, logprob, top, Reason.STOP_STRING))
        return self._end(Item(token, text, logprob, top, Reason.LENGTH))

    def _say(self, text: str, last: bool = False) -> str:
        said = self._strings.push(text)
        if last:
            said += self._strings.finish()
        self.text += said
        return said

    def _end(self, item: Item) -> Item:
        self.reason = item.reason
        if self._is_ours:
            self._pipe.cancel()
            return item
        self._pipe.close()  # not cancelled: the set's length is counted on
        drawn = len(self.tokens) + (item.reason is Reason.STOP_TOKEN)
        held = self._start + drawn - 1
        if len(self.working_set) > held:
            try:
                self.working_set.truncate(held)
            except RefusedError as error:
                raise UsageError(
                    f"passes ran ahead of the end and cannot be taken back ({error}); use generate(..., run_ahead=1)"
                ) from None
        return item

    async def all_text(self) -> str:
        """Run to the end; the whole text."""
        async for _ in self:
            pass
        return self.text

    async def all_tokens(self) -> list[int]:
        """Run to the end; all tokens."""
        async for _ in self:
            pass
        return list(self.tokens)

    def cancel(self) -> None:
        """Stop here: what is in flight is dropped."""
        self._pipe.cancel()


def generate(
    prompt: Prompt,
    *,
    sampler: Sampler | None = None,
    max_tokens: int | None = None,
    stop: Iterable[str | int] | str | int = (),
    model_stops: bool = True,
    logprobs: int | None = None,
    seed: int | None = None,
    grammar: Matcher | None = None,
    working_set: WorkingSet | None = None,
    history: Sequence[int] = (),
    model: str | None = None,
    kv: Policy | None = None,
    run_ahead: int = DEPTH,
) -> Generation:
    """Continue a prompt. It starts at once and stays up to `run_ahead` passes ahead of the reader.

    Args:
        prompt: tokens; a text, which becomes `chat.prefix()` and its tokens; or messages, which the model's chat template renders.
        sampler: of `inferlet.sample`; greedy if None. One that keeps state is begun here, with `history` and the prompt.
        max_tokens: how many tokens to draw at most; None is as many as the context has room for, which bounds it anyway.
        stop: strings that end the text (and are not part of it) wherever tokens meet, and tokens that end it.
        model_stops: whether the model's own stop tokens end it too.
        logprobs: None for none; 0 for that of each token, or how many of the likeliest tokens (up to 20) beside it.
        seed: see `Pipeline`.
        grammar: a matcher; nothing else can be drawn, and it follows the text. When the text is complete, a stop token ends it.
        working_set: where to go on from; the prompt is appended. None is a new one.
        history: tokens that the working set holds already, for samplers that look back.
        model: whose continuation; None is the default model.
        kv: what the state may forget (`inferlet.evict`); None keeps everything.
        run_ahead: passes in flight; 1 submits each pass when the token before has been read.
    Raises:
        UsageError: an argument that cannot be, or a prompt that leaves no room in the context.
    """
    tokens = tokens_of(prompt, model, bare=working_set is not None)
    room = models.context_length(model=model) - len(tokens) - (0 if working_set is None else len(working_set))
    if room < 1:
        raise UsageError(
            f"generate: the prompt has {len(tokens)} tokens, which leaves no room in a context of "
            f"{models.context_length(model=model)}"
        )
    for name, value, least in (("max_tokens", max_tokens, 1), ("logprobs", logprobs, 0), ("run_ahead", run_ahead, 1)):
        if value is not None and (type(value) is not int or value < least):
            raise UsageError(f"generate: {name} {value!r:.60}: an int of at least {least}")
    if logprobs is not None and logprobs > MOST_TOP:
        raise UsageError(f"generate: logprobs {logprobs}: at most {MOST_TOP}")
    if sampler is not None and not isinstance(sampler, Sampler):
        raise UsageError(f"generate: sampler is one of inferlet.sample, not {type(sampler).__name__}")
    if grammar is not None and not isinstance(grammar, Matcher):
        raise UsageError(f"generate: grammar is a matcher, such as compiled.matcher(), not {type(grammar).__name__}")
    most = room if max_tokens is None else min(max_tokens, room)
    ends, strings = _stops(stop, model)
    if model_stops:
        ends |= set(models.stop_tokens(model=model))
    drawing = sampler or greedy()
    if not drawing.begun:
        drawing = drawing.begin([*history, *tokens], most)
    return Generation(
        tokens,
        sampler=drawing,
        most=most,
        stop_tokens=frozenset(ends),
        strings=StopStrings(strings),
        top=None if logprobs is None else min(logprobs, MOST_TOP),
        seed=seed,
        matcher=grammar,
        working_set=working_set,
        model=model,
        kv=Policy() if kv is None else kv,
        depth=run_ahead,
    )


def generate_many(prompt: Prompt, n: int, *, seed: int | None = None, **options: Any) -> list[Generation]:
    """n continuations of one prompt, which is computed once: `generate` on n forks of its state.

    Args:
        seed: of the first one; the others count on from it. None gives each its own.
        working_set: among the options; it is forked, and stays as it is.
        options: those of `generate`, but for `grammar`, which each would need one of.
    """
    if type(n) is not int or n < 1:
        raise UsageError(f"generate_many: n {n!r:.60}: an int of at least 1")
    if options.get("grammar") is not None and n > 1:
        raise UsageError("generate_many: a matcher follows one text; call generate(...) with a matcher for each")
    model, given = options.get("model"), options.pop("working_set", None)
    tokens = tokens_of(prompt, model, bare=given is not None)
    seeds = [None if seed is None else (seed + i) % (1 << 64) for i in range(n)]
    if n == 1:
        return [generate(tokens, seed=seeds[0], working_set=None if given is None else given.fork(), **options)]
    shared = WorkingSet(model) if given is None else given.fork()
    if len(tokens) > 1:
        Pipeline().submit(ForwardPass(model).embed(tokens[:-1]).state([shared], StateGeometry.folding()))
    history = [*options.pop("history", ()), *tokens[:-1]]
    return [generate(tokens[-1:], seed=one, working_set=shared.fork(), history=history, **options) for one in seeds]


def tokens_of(prompt: Prompt, model: str | None = None, bare: bool = False) -> list[int]:
    """The tokens of a prompt in any of its forms.

    Args:
        bare: a text goes on where something else ended, so it gets no prefix.
    """
    if isinstance(prompt, str):
        return ([] if bare else chat.prefix(model=model)) + models.encode(prompt, model=model)
    parts = list(prompt)
    if parts and all(isinstance(part, dict) for part in parts):
        return chat.render(parts, model=model)
    if not parts or any(type(part) is not int for part in parts):
        raise UsageError(f"a prompt is a text, a list of tokens or a list of messages, not {prompt!r:.60}")
    return parts


def _epilogue(sampler: Sampler, matcher: Matcher | None, top: int | None) -> Callable[[], Any]:
    if matcher is None and top is None:
        return sampler

    def draw() -> Any:
        logits = intrinsics.output(0, "logits")
        token = sampler.pick(logits if matcher is None else apply(logits, matcher))
        if top is None:
            return token
        logs = log_softmax(logits)
        own = gather(logs, token)
        return (token, own) if top == 0 else (token, own, *top_k(logs, min(MOST_TOP, intrinsics.vocab())))

    return draw


def _stops(stop: Any, model: str | None) -> tuple[set[int], list[str]]:
    given = [stop] if isinstance(stop, (str, int)) else list(stop)
    tokens, strings = set(), []
    for one in given:
        if isinstance(one, str) and one:
            strings.append(one)
        elif type(one) is int and 0 <= one < models.vocab_size(model=model):
            tokens.add(one)
        else:
            raise UsageError(f"generate: stop names {one!r:.60}: a text of at least one character, or a token id")
    return tokens, strings
