"""Calls on grammars and matchers. Masks never cross them: a submit names the matcher, and the host fills the parameter."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import numpy as np

from pie_xla.errors import PieError
from pie_xla.eta.types import DType, TensorType
from pie_xla.process.grammar import Kind, Matcher, Vocabulary, Workers
from pie_xla.process.requests import RequestError, integers
from pie_xla.process.rooms import Answer, Request

if TYPE_CHECKING:
    from pie_xla.process.host import InferletHost

KINDS = {kind.value: kind for kind in Kind}
MOST_GRAMMARS = 64
MOST_MATCHERS = 512


class GrammarCalls:
    """`grammar.*` and `matcher.*`, for one process.

    Args:
        vocabularies: of the models, by name.
    """

    def __init__(self, host: InferletHost, vocabularies: Mapping[str, Vocabulary], workers: Workers) -> None:
        self._host, self._vocabularies, self._workers = host, vocabularies, workers
        self._grammars: dict[int, tuple[Vocabulary, Any]] = {}  # None while it compiles
        self._matchers: dict[int, Matcher] = {}
        self._handles = 0
        self.calls: Mapping[str, Callable[[Request], Any]] = {
            "grammar.drop": self._drop_grammar,
            "grammar.matcher": self._new_matcher,
            "matcher.fork": self._fork,
            "matcher.drop": self._drop,
            "matcher.accept": self._accept,
            "matcher.rollback": self._rollback,
            "matcher.forced": self._forced,
            "matcher.state": self._state,
            "matcher.follow": self._follow,
        }
        self.starts: Mapping[str, Callable[[Request, Answer], None]] = {"grammar.compile": self._compile}
        host.masks = self.mask

    def close(self) -> None:
        for matcher in self._matchers.values():
            matcher.close()
        self._matchers.clear()
        self._grammars.clear()

    def mask(self, handle: Any, kind: TensorType) -> Future[np.ndarray]:
        """The parameter of a submit that names a matcher."""
        matcher = self._matcher(handle)
        wanted = TensorType(DType.U32, (matcher.vocabulary.words,))
        if kind != wanted:
            raise RequestError(f"a matcher's mask is {wanted}, but the program takes {kind}")
        return matcher.mask()

    def _compile(self, request: Request, answer: Answer) -> None:
        kind, source = request.get("kind", str), request.get("source", str)
        model = self._host.model(request.get("model", str, None)).facts.name
        request.done()
        if kind not in KINDS:
            raise RequestError(f"a grammar's kind is {kind!r:.60}, not one of {', '.join(KINDS)}")
        vocabulary = self._vocabularies.get(model)
        if vocabulary is None:
            raise RequestError(f"the model {model} has no tokenizer that grammars work with")
        if len(self._grammars) >= MOST_GRAMMARS:
            raise RequestError(f"the process has {len(self._grammars)} grammars, as many as it may")
        handle = self._handle()
        self._grammars[handle] = vocabulary, None

        def work() -> None:
            if handle not in self._grammars:
                return  # the process has ended
            try:
                self._grammars[handle] = vocabulary, vocabulary.compile(KINDS[kind], source)
            except PieError as error:
                self._grammars.pop(handle, None)
                answer.fail(error)
                return
            answer.value(handle)

        self._workers.compiling.submit(work)

    def _drop_grammar(self, request: Request) -> None:
        handle = request.get("grammar", int)
        request.done()
        self._grammars.pop(handle, None)

    def _new_matcher(self, request: Request) -> int:
        handle = request.get("grammar", int)
        request.done()
        vocabulary, start = self._grammars.get(handle, (None, None))
        if vocabulary is None or start is None:
            raise RequestError(f"grammar {handle} is not one of this process, or is not compiled yet")
        return self._keep(lambda: Matcher(vocabulary, start.deep_copy(), self._workers))

    def _fork(self, request: Request) -> int:
        matcher = self._named(request)
        request.done()
        return self._keep(matcher.fork)

    def _drop(self, request: Request) -> None:
        handle = request.get("matcher", int)
        request.done()
        self._matchers.pop(handle, None)  # masks that it has promised come all the same

    def _accept(self, request: Request) -> int:
        matcher, tokens = self._named(request), integers(request.get("tokens", list), "tokens")
        request.done()
        return matcher.accept(tokens)

    def _rollback(self, request: Request) -> None:
        matcher, count = self._named(request), request.get("count", int)
        request.done()
        matcher.rollback(count)

    def _forced(self, request: Request) -> list[int]:
        matcher = self._named(request)
        request.done()
        return matcher.forced()

    def _state(self, request: Request) -> dict[str, Any]:
        matcher = self._named(request)
        request.done()
        done, may_stop, length = matcher.state()
        return {"done": done, "may_stop": may_stop, "length": length}

    def _follow(self, request: Request) -> None:
        matcher = self._named(request)
        ticket, result = request.get("ticket", int), request.get("result", int, 0)
        request.done()
        self._host.check_underway(max(ticket, 0), max(result, 0))
        follow = matcher.follow()

        def landed(values: tuple[np.ndarray, ...] | None, cause: str) -> None:
            value = None if values is None else values[result]
            if value is not None and (value.shape or value.dtype.kind not in "iu"):
                matcher.landed(
                    follow, None, f"result {result} of the pass is no token: {value.dtype}{list(value.shape)}"
                )
            else:
                matcher.landed(follow, None if value is None else int(value), cause)

        self._host.on_landing(ticket // 2, landed)

    def _keep(self, make: Callable[[], Matcher]) -> int:
        if len(self._matchers) >= MOST_MATCHERS:
            raise RequestError(f"the process has {len(self._matchers)} matchers, as many as it may", "drop some")
        handle = self._handle()
        self._matchers[handle] = make()
        return handle

    def _handle(self) -> int:
        self._handles += 1
        return self._handles

    def _named(self, request: Request) -> Matcher:
        return self._matcher(request.get("matcher", int))

    def _matcher(self, handle: Any) -> Matcher:
        found = self._matchers.get(handle) if type(handle) is int else None
        if found is None:
            raise RequestError(f"matcher {handle!r:.60} is not one of this process")
        return found
