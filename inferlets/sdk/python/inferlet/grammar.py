"""Text that a grammar allows: compile one, follow it with a matcher, and mask logits with it.

    g = await grammar.json_schema({"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]})
    m = g.matcher()
    out = fwd.epilogue(lambda: reduce_argmax(grammar.apply(intrinsics.output(0, "logits"), m)))

The mask is of the matcher's state when the pass is submitted. It is computed beside everything else and never comes to the program.
"""

from __future__ import annotations

import json as _json
from collections.abc import Iterable
from typing import Any

from inferlet._errors import PassError, RefusedError, UsageError
from inferlet._host import Runtime, runtime
from inferlet.eta._compose import mask_apply
from inferlet.eta._output import Output
from inferlet.eta._recorder import recorder


async def json_schema(schema: dict[str, Any] | bool | str, *, model: str | None = None) -> Grammar:
    """JSON that a schema allows, with whitespace as `json.dumps` writes it.

    Args:
        schema: of JSON Schema, or its text. Keywords that cannot be kept are refused.
        model: whose tokens; None is the default model.
    Raises:
        RefusedError: the schema is wrong or too large.
    """
    return await _compile("json_schema", schema if isinstance(schema, str) else _json.dumps(schema), model)


async def json(*, model: str | None = None) -> Grammar:
    """Any JSON value, written like that of `json_schema`."""
    return await _compile("json_schema", "{}", model)


async def regex(pattern: str, *, model: str | None = None) -> Grammar:
    """Text that a regular expression (without look-around and back references) matches as a whole."""
    return await _compile("regex", pattern, model)


async def lark(rules: str, *, model: str | None = None) -> Grammar:
    """Text of a context-free grammar in Lark's notation, from its rule `start`."""
    return await _compile("lark", rules, model)


async def _compile(kind: str, source: str, model: str | None) -> Grammar:
    if not isinstance(source, str):
        raise UsageError(f"grammar.{kind} takes a text, not {type(source).__name__}")
    here = runtime()
    facts = here.facts.of(model)
    shot = here.shot(here.transport.start("grammar.compile", {"kind": kind, "source": source, "model": facts.name}))
    if not shot.done:
        await shot.arrived()
    try:
        handle = shot.value()
    except PassError as error:
        raise RefusedError(error.cause) from None
    return Grammar(here, handle, facts.name, facts.vocab_size)


class Grammar:
    """A compiled grammar. `matcher()` starts to follow it; any number may."""

    __slots__ = ("_handle", "_runtime", "_vocab", "model")

    def __init__(self, owner: Runtime, handle: int, model: str, vocab: int) -> None:
        self._runtime, self._handle, self.model, self._vocab = owner, handle, model, vocab

    def matcher(self) -> Matcher:
        """At the start of a text."""
        self._runtime.sweep()
        made = self._runtime.transport.call("grammar.matcher", {"grammar": self._handle})
        return Matcher(self._runtime, made, self.model, self._vocab)

    def __del__(self) -> None:
        owner, handle = self._runtime, self._handle
        owner.discard(lambda: owner.transport.call("grammar.drop", {"grammar": handle}))


class Matcher:
    """Where one text stands in its grammar."""

    __slots__ = ("_handle", "_runtime", "_vocab", "model")

    def __init__(self, owner: Runtime, handle: int, model: str, vocab: int) -> None:
        self._runtime, self._handle, self.model, self._vocab = owner, handle, model, vocab

    def fork(self) -> Matcher:
        """Another one at the same place."""
        self._runtime.sweep()
        return Matcher(self._runtime, self._ask("fork"), self.model, self._vocab)

    def accept(self, tokens: int | Iterable[int]) -> int:
        """Go on by these tokens, as far as they are legal; how many were."""
        given = [tokens] if isinstance(tokens, int) else list(tokens)
        return int(self._ask("accept", tokens=given))

    def rollback(self, count: int) -> None:
        """Take the last `count` accepted tokens back."""
        self._ask("rollback", count=count)

    def forced(self) -> list[int]:
        """The tokens that the grammar leaves no choice about, from here on: `accept` them and embed them in one pass."""
        return list(self._ask("forced"))

    def follow(self, output: Output) -> None:
        """Accept the token that a submitted pass gives, as soon as the host has it: so the next pass can be submitted now.

        Until it is there, only `mask` and `follow` can be asked for. A pass whose mask comes after a token that the grammar does not
        allow fails.
        """
        if not isinstance(output, Output):
            raise UsageError(f"follow takes an Output, a token of a submitted pass, not {type(output).__name__}")
        shot, result = output._source
        if not shot.done:
            self._ask("follow", ticket=shot.ticket, result=result)
            return
        token = shot.value()[result]
        if self.accept([token]) != 1:
            raise UsageError(f"follow: token {token} is not what the grammar allows here")

    @property
    def is_done(self) -> bool:
        """Whether the text is complete and nothing but a stop token can follow."""
        return bool(self._ask("state")["done"])

    @property
    def may_stop(self) -> bool:
        """Whether the text would be complete as it is."""
        return bool(self._ask("state")["may_stop"])

    def __len__(self) -> int:
        """Accepted tokens."""
        return int(self._ask("state")["length"])

    def __bool__(self) -> bool:
        return True

    def mask(self) -> Any:
        """Inside an epilogue: u32 words, a bit per token that may come next, as `mask_apply` takes them."""
        return recorder("Matcher.mask").late("u32", (-(-self._vocab // 32),), {"matcher": self._handle})

    def _ask(self, what: str, **fields: Any) -> Any:
        return self._runtime.transport.call(f"matcher.{what}", {"matcher": self._handle, **fields})

    def __del__(self) -> None:
        owner, handle = self._runtime, self._handle
        owner.discard(lambda: owner.transport.call("matcher.drop", {"matcher": handle}))


def apply(logits: Any, matcher: Matcher) -> Any:
    """Inside an epilogue: logits [V] with -inf for every token that the matcher does not allow next."""
    if not isinstance(matcher, Matcher):
        raise UsageError(f"grammar.apply takes a Matcher, such as g.matcher(), not {type(matcher).__name__}")
    return mask_apply(logits, matcher.mask())
