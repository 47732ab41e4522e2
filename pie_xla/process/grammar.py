"""Grammars over a model's tokens: compiled once, followed by matchers, whose masks are computed off everybody's way.

llguidance does the parsing. A matcher is a queue of things to do in the order they were asked for: a mask that was promised is of the
state the matcher had then, whatever is asked of it afterwards, and a token that is still on the device holds up what stands behind it.
"""

from __future__ import annotations

import enum
import json
import math
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from pie_xla.errors import PieError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from llguidance._lib import JsonCompileOptions

JSON_STYLE: JsonCompileOptions = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "lenient": False,
}
"""Whitespace as `json.dumps` writes it: a model that may write any number of spaces sometimes never stops."""


class Kind(enum.Enum):
    """What a grammar is written in."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    LARK = "lark"


class GrammarError(PieError):
    """A grammar that cannot be compiled, a matcher that cannot go on; the message goes to the program's author."""


@dataclass(frozen=True)
class GrammarLimits:
    """What one grammar may cost; beyond it, it is refused.

    Attributes:
        source_bytes: its text.
        symbols: of its productions.
        compile_fuel: of building its lexer; a million is about 20 ms.
        mask_fuel: of one mask in the lexer; a million is about 70 ms.
        mask_items: of one mask in the parser; 20 thousand are about 1 ms.
        states: of its lexer, 1 to 2 kB each.
    """

    source_bytes: int = 256 << 10
    symbols: int = 100_000
    compile_fuel: int = 4_000_000
    mask_fuel: int = 400_000
    mask_items: int = 50_000
    states: int = 20_000


class Vocabulary:
    """A model's tokens as llguidance knows them; read when the first grammar comes.

    Args:
        tokenizer_json: gives the text of the model's tokenizer.json.
        size: number of token ids, V; the model may have more than the tokenizer.
        stop_tokens: what ends a text; allowed where the grammar may end.
    """

    def __init__(
        self,
        tokenizer_json: Callable[[], str],
        size: int,
        stop_tokens: Sequence[int],
        limits: GrammarLimits | None = None,
    ) -> None:
        self._json, self.size, self.stop_tokens = tokenizer_json, size, tuple(stop_tokens)
        self._limits = limits or GrammarLimits()
        self._lock = threading.Lock()

    @property
    def words(self) -> int:
        """u32 words of a mask: one bit per token, the lowest first."""
        return -(-self.size // 32)

    @cached_property
    def _tokens(self) -> LLTokenizer:
        from llguidance import LLTokenizer

        if not self.stop_tokens:
            raise GrammarError("this model has no stop token, so no grammar could end")
        try:
            return LLTokenizer(
                self._json(),
                n_vocab=self.size,
                eos_token=list(self.stop_tokens),
                slices=LLTokenizer.json_slices(),
            )
        except ValueError as error:
            raise GrammarError(f"grammars do not work with this model's tokenizer: {error}") from None

    def compile(self, kind: Kind, source: str) -> LLMatcher:
        """A matcher at the grammar's start, to be copied.

        Raises:
            GrammarError: the grammar is wrong, too large, or uses what is not supported.
        """
        from llguidance import LLMatcher, LLParserLimits

        limits = self._limits
        if len(source.encode("utf-8", "replace")) > limits.source_bytes:
            raise GrammarError(f"the grammar has more than {limits.source_bytes} bytes")
        with self._lock:
            tokens = self._tokens
        bounds = LLParserLimits(
            initial_lexer_fuel=limits.compile_fuel,
            step_lexer_fuel=limits.mask_fuel,
            step_max_items=limits.mask_items,
            max_lexer_states=limits.states,
            max_grammar_size=limits.symbols,
            verbose_errors=False,
        )
        try:
            match kind:
                case Kind.JSON_SCHEMA:
                    _check_multiples(source)
                    schema = "{}" if source.strip() == "true" else source  # the same, and an object
                    text = LLMatcher.grammar_from_json_schema(schema, overrides=JSON_STYLE)
                case Kind.REGEX:
                    text = LLMatcher.grammar_from_regex(source)
                case Kind.LARK:
                    text = LLMatcher.grammar_from_lark(source)
        except (ValueError, RecursionError) as error:
            raise GrammarError(f"the {kind.value} grammar cannot be read: {error}") from None
        made = LLMatcher(tokens, text, log_level=0, limits=bounds)
        if made.is_error():
            raise GrammarError(f"the {kind.value} grammar cannot be compiled: {made.get_error():.2000}")
        return made


MOST_MULTIPLE = (
    10_000  # an automaton of as many states, which llguidance's fuel does not bound: 200,000 take 2 s and 80 MB
)


def _check_multiples(schema: str) -> None:
    """Refuse a schema whose `multipleOf`s, taken together, need an automaton that is too large."""
    try:
        found = [Fraction(str(value)).numerator for value in _values(json.loads(schema), "multipleOf")]
    except (ValueError, ZeroDivisionError, RecursionError):
        return  # no schema: llguidance says why
    together = 1
    for multiple in found:
        together = math.lcm(together, abs(multiple) or 1)
        if together > MOST_MULTIPLE:
            raise GrammarError(
                f"the schema's multipleOf values need {together:,} states together; {MOST_MULTIPLE:,} are possible",
                "use a smaller multipleOf, or check the number afterwards",
            )


def _values(node: Any, name: str) -> Iterator[Any]:
    """Every number under a key of this name."""
    if isinstance(node, dict):
        value = node.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool):
            yield value
    for child in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        yield from _values(child, name)


class Workers:
    """Threads for all processes: one compiles, two compute masks. llguidance lets go of the interpreter meanwhile."""

    def __init__(self) -> None:
        self.compiling = ThreadPoolExecutor(1, "pie-grammar-compile")
        self.masking = ThreadPoolExecutor(2, "pie-grammar-mask")

    def close(self) -> None:
        for pool in (self.compiling, self.masking):
            pool.shutdown(wait=False, cancel_futures=True)


class Follow:
    """A token that a pass will give: a matcher accepts it when it lands."""

    def __init__(self) -> None:
        self.token: int | None = None
        self.failure: str | None = None

    @property
    def here(self) -> bool:
        return self.token is not None or self.failure is not None


class Matcher:
    """One text's way through a grammar. Calls come from its process's thread, `landed` from any.

    Args:
        at: where it stands; its own from now on.
    """

    def __init__(self, vocabulary: Vocabulary, at: LLMatcher, workers: Workers, took: Sequence[bool] = ()) -> None:
        self.vocabulary, self._at, self._workers = vocabulary, at, workers
        self._took = list(
            took
        )  # per accepted token, whether the parser took it: stop tokens after the end are only counted
        self._queue: deque[Follow | Future[np.ndarray]] = deque()
        self._lock = threading.Lock()
        self._closed = False

    def fork(self) -> Matcher:
        with self._lock:
            self._settle("fork")
            return Matcher(self.vocabulary, self._at.deep_copy(), self._workers, self._took)

    def accept(self, tokens: Sequence[int]) -> int:
        """Go on by these tokens as far as they are legal; how many were."""
        with self._lock:
            self._settle("accept")
            count = 0
            while count < len(tokens) and self._accept(tokens[count]):
                count += 1
            self._check()
            return count

    def rollback(self, count: int) -> None:
        """Take the last `count` accepted tokens back."""
        with self._lock:
            self._settle("rollback")
            if not 0 <= count <= len(self._took):
                raise GrammarError(f"rollback({count}): the matcher has accepted {len(self._took)} tokens")
            back = sum(self._took[len(self._took) - count :])
            if back and not self._at.rollback(back):
                self._check()
            del self._took[len(self._took) - count :]

    def forced(self) -> list[int]:
        """The tokens that the grammar leaves no choice about, from here on; none of them is accepted."""
        with self._lock:
            self._settle("forced")
            found = [] if self._at.is_stopped() else list(self._at.compute_ff_tokens())
            self._check()
            return found

    def state(self) -> tuple[bool, bool, int]:
        """(whether only a stop token can follow, whether one may, accepted tokens)."""
        with self._lock:
            self._settle("ask")
            self._check()
            return self._at.is_stopped(), self._at.is_accepting(), len(self._took)

    def mask(self) -> Future[np.ndarray]:
        """u32[words]: what may come next, after everything asked so far."""
        promise: Future[np.ndarray] = Future()
        with self._lock:
            self._queue.append(promise)
        self._workers.masking.submit(self._work)
        return promise

    def follow(self) -> Follow:
        """A token to come; tell its `landed`."""
        made = Follow()
        with self._lock:
            self._queue.append(made)
        return made

    def landed(self, follow: Follow, token: int | None, failure: str = "") -> None:
        """The token of a follow, or why there is none: then it is as if never asked for, and masks behind it fail."""
        follow.token, follow.failure = token, failure if token is None else None
        try:
            self._workers.masking.submit(self._work)
        except RuntimeError:
            return  # shutting down

    def close(self) -> None:
        """No mask is computed any more."""
        with self._lock:
            self._closed = True
            for waiting in self._queue:
                if isinstance(waiting, Future):
                    waiting.cancel()
            self._queue.clear()

    def _work(self) -> None:
        with self._lock:
            self._drain()

    def _drain(self) -> None:
        while self._queue:
            first = self._queue[0]
            if isinstance(first, Follow):
                if not first.here:
                    return
                self._queue.popleft()
                if first.token is None:
                    self._fail(f"the token before this mask never came: {first.failure}")
                elif not self._accept(first.token):
                    self._fail(f"token {first.token}, after {len(self._took)} others, is not what the grammar allows")
                continue
            self._queue.popleft()
            if not first.set_running_or_notify_cancel():
                continue
            try:
                first.set_result(self._fill())
            except PieError as error:
                first.set_exception(error)

    def _fail(self, why: str) -> None:
        """Masks that are promised cannot be kept."""
        for waiting in self._queue:
            if isinstance(waiting, Future) and waiting.set_running_or_notify_cancel():
                waiting.set_exception(GrammarError(why))
        self._queue = deque(waiting for waiting in self._queue if isinstance(waiting, Follow))

    def _settle(self, what: str) -> None:
        self._drain()
        if self._queue:
            raise GrammarError(f"{what}: this matcher follows a pass that has not run yet", "await its Output first")

    def _accept(self, token: int) -> bool:
        if self._at.is_stopped() and token in self.vocabulary.stop_tokens and not self._at.is_error():
            self._took.append(False)
            return True
        if not 0 <= token < self.vocabulary.size or self._at.try_consume_tokens([token]) != 1:
            return False
        self._took.append(True)
        return True

    def _fill(self) -> np.ndarray:
        words = np.zeros(self.vocabulary.words, np.uint32)
        self._at.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        self._check()
        if not words.any():
            raise GrammarError(f"after {len(self._took)} tokens the grammar allows no token at all")
        return words

    def _check(self) -> None:
        if self._at.is_error():
            raise GrammarError(f"the grammar cannot be followed any further: {self._at.get_error():.2000}")
