"""Recording: what an epilogue's calls do while it is traced.

A recorder turns each call into an op. `GuestRecorder` writes the program that the host compiles; a native process has
its own recorder with the same methods. The ops' functions find it through `recorder()`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

from inferlet._errors import PACKAGE, author_line
from inferlet.eta import _rules as rules
from inferlet.eta._errors import EtaError
from inferlet.eta._stages import SHOWN, Stage, Stages, Traffic
from inferlet.eta._table import TABLE
from inferlet.eta._tensor import Tensor

Type = tuple[str, tuple[int, ...]]
BODY_NAMES = {Stage.PROLOGUE: "prologue", Stage.PROJ: "proj", Stage.ATTN: "attn"}


class Recorder(Protocol):
    """What both modes record with. Tensors are `Tensor` in the sandbox and JAX arrays natively."""

    vocab_size: int
    page_size: int

    def apply(self, name: str, operands: Sequence[Any], attrs: dict[str, Any]) -> Any:
        """One op of the table: its result, or a tuple of them."""

    def literal(self, value: Any, dtype: str | None = None) -> Any:
        """A Python number or nested list as a tensor whose value is sent with each submit."""

    def late(self, dtype: str, shape: tuple[int, ...], source: dict[str, int]) -> Any:
        """A tensor that the host fills in for each submit, from what `source` names."""

    def output(self, row: int, name: str) -> Any:
        """The model's output `name` at a row of the pass."""

    def shown(self, name: str, row: int | None) -> Any:
        """What an attention layer shows to a layer stage: `layer`, or a row's `query`, `score` or `bound`."""

    def keep_pages(self, row: int, keep: Any) -> None:
        """The pages that a row's last token may look at in this layer."""

    def take(self, channel: Any) -> Any: ...
    def read(self, channel: Any) -> Any: ...
    def put(self, channel: Any, value: Any) -> None: ...
    def fori(self, n: int, body: Callable[..., Any], init: Any) -> Any: ...
    def while_loop(self, n: int, test: Callable[..., Any], body: Callable[..., Any], init: Any) -> Any: ...

    def type_of(self, value: Any) -> Type:
        """(dtype, shape) of a tensor, or of a number as it would be recorded."""


_CURRENT: ContextVar[Recorder | None] = ContextVar("inferlet_recorder", default=None)


def current() -> Recorder | None:
    """The recorder of the epilogue being traced, or None on the host."""
    return _CURRENT.get()


def recorder(what: str) -> Recorder:
    """The current recorder; EtaError when `what` is called outside an epilogue."""
    found = _CURRENT.get()
    if found is None:
        raise EtaError(f"{what} works inside an epilogue only: call it in the function given to fwd.epilogue(...)")
    return found


class recording:
    """`with recording(recorder):` makes it the current recorder of this context."""

    def __init__(self, chosen: Any) -> None:
        self._chosen = chosen

    def __enter__(self) -> Any:
        if _CURRENT.get() is not None:
            raise EtaError("an epilogue cannot record another one: build the inner pass outside")
        self._token = _CURRENT.set(self._chosen)
        return self._chosen

    def __exit__(self, *_: object) -> None:
        _CURRENT.reset(self._token)


@dataclass(frozen=True)
class TracedProgram:
    """A recorded epilogue: the program's text and what each submit sends beside it."""

    text: str
    params: tuple[Any, ...]  # numbers or nested lists, in order
    channels: tuple[Any, ...]  # channel objects, in order of first use
    results: tuple[Type, ...]
    scalar_result: bool


def _not_a_value(value: object) -> EtaError:
    return EtaError(f"{type(value).__name__} {value!r:.60} is not a tensor, a number or a nested list of numbers")


class GuestRecorder:
    """Writes one program.

    Args:
        outputs: name -> (shape of one position, dtype): the model's outputs.
        rows: per row of the pass, the number of readout positions, or None for the last token alone.
        vocab_size, page_size: the model's facts.
        source: "main.py:14" of the epilogue, for the host's errors.
    """

    def __init__(
        self,
        outputs: dict[str, tuple[Sequence[int], str]],
        rows: Sequence[int | None],
        vocab_size: int = 0,
        page_size: int = 0,
        source: str = "",
        stages: Stages | None = None,
    ) -> None:
        self.vocab_size, self.page_size = vocab_size, page_size
        self._outputs, self._rows, self._source = outputs, tuple(rows), source
        self._scope: object = object()
        self._scopes: list[object] = [self._scope]
        self._ops: list[Any] = []
        self._lines: list[str] = []
        self._next = 0
        self._streams = 0
        self._cost = 0
        self._reads: dict[tuple[int, str], Tensor] = {}
        self._read_table: list[Any] = []
        self._params: list[Any] = []
        self._param_table: list[Any] = []
        self._channels: list[Any] = []
        self._used: list[Traffic] = []
        self._stages = stages
        self._stage = Stage.EPILOGUE
        self._parts: dict[Stage, list[Any]] = {stage: [] for stage in Stage}
        self._layered: list[tuple[Stage, str, int, str]] = []  # what the layer stages do with channels, and where
        self._masked: set[int] = set()

    def apply(self, name: str, operands: Sequence[Any], attrs: dict[str, Any]) -> Any:
        rule = TABLE[name]
        try:
            if rule.random and attrs.get("stream") is None:
                attrs = {**attrs, "stream": self._streams}
                self._streams += 1
            values = rule.check_attrs(attrs)
            tensors = [self._operand(rule, at, operands) for at in range(len(operands))]
            types, cost = rule.infer(tuple((t.dtype, t.shape) for t in tensors), values)
        except rules.RuleError as error:
            raise EtaError(str(error)) from None
        made = self._emit(name, [t._id for t in tensors], values, types, cost)
        return made[0] if len(made) == 1 else tuple(made)

    def literal(self, value: Any, dtype: str | None = None) -> Tensor:
        kind = dtype or rules.literal_dtype(value)
        if kind is None:
            raise _not_a_value(value)
        try:
            number, shape = rules.check_literal("a literal", value, kind)
        except rules.RuleError as error:
            raise EtaError(str(error)) from None
        self._params.append(number)
        self._param_table.append([kind, list(shape)])
        return self._emit("param", [], {"i": len(self._params) - 1}, ((kind, shape),), rules.OP_COST)[0]

    def late(self, dtype: str, shape: tuple[int, ...], source: dict[str, int]) -> Tensor:
        self._params.append(source)
        self._param_table.append([dtype, list(shape)])
        return self._emit("param", [], {"i": len(self._params) - 1}, ((dtype, shape),), rules.OP_COST)[0]

    def output(self, row: int, name: str) -> Tensor:
        if self._stage is not Stage.EPILOGUE:
            raise EtaError(
                f"output({row!r}, {name!r}): the model's outputs are there in the epilogue only, not in {self._stage.value}"
            )
        if not isinstance(row, int) or isinstance(row, bool) or not 0 <= row < len(self._rows):
            raise EtaError(f"output({row!r}, {name!r}): this pass has rows 0 to {len(self._rows) - 1}")
        if name not in self._outputs:
            raise EtaError(f"the model has no output {name!r:.40}; it has: {', '.join(self._outputs)}")
        known = self._reads.get((row, name))
        if known is None or known._scope not in self._scopes:
            shape, dtype = self._outputs[name]
            count = self._rows[row]
            kind = (str(dtype), tuple(shape) if count is None else (count, *shape))
            entry = [row, name, kind[0], list(kind[1])]
            if entry not in self._read_table:
                self._read_table.append(entry)
            at = self._read_table.index(entry)
            known = self._reads[row, name] = self._emit("output", [], {"i": at}, (kind,), rules.OP_COST)[0]
        return known

    def take(self, channel: Any) -> Tensor:
        at = self._channel(channel, "take")
        self._traffic(at, "take")
        return self._emit("take", [], {"i": at}, ((channel.dtype, tuple(channel.shape)),), rules.OP_COST)[0]

    def read(self, channel: Any) -> Tensor:
        at = self._channel(channel, "read")
        return self._emit("read", [], {"i": at}, ((channel.dtype, tuple(channel.shape)),), rules.OP_COST)[0]

    def put(self, channel: Any, value: Any) -> None:
        at = self._channel(channel, "put")
        self._traffic(at, "put")
        x = self._tensor(value) if isinstance(value, Tensor) else self.literal(value, channel.dtype)
        shape = tuple(channel.shape)
        if x.dtype != channel.dtype:
            raise EtaError(f"the channel holds {channel.dtype}, got {x!r}: use cast(x, {str(channel.dtype)!r})")
        if x.shape != shape:
            x = self.apply("reshape", (x,), {"shape": shape})
        self._emit("put", [x._id], {"i": at}, (), rules.OP_COST)

    def fori(self, n: int, body: Callable[..., Any], init: Any) -> Any:
        return self._loop("fori", n, None, body, init)

    def while_loop(self, n: int, test: Callable[..., Any], body: Callable[..., Any], init: Any) -> Any:
        return self._loop("while", n, test, body, init)

    def _loop(self, name: str, n: int, test: Callable[..., Any] | None, body: Callable[..., Any], init: Any) -> Any:
        what, bound = (name, "n") if test is None else ("while_loop", "bound")
        if not isinstance(n, int) or isinstance(n, bool) or not 1 <= n < 1 << 31:
            raise EtaError(
                f"{what}: {bound} must be a Python int of at least 1 (it is fixed when recorded), got {n!r:.60}"
            )
        many = isinstance(init, tuple | list)
        carried = [self._value(x) for x in (init if many else (init,))]
        if not carried:
            raise EtaError(f"{what}: init is empty, so the loop would do nothing")
        types = tuple((t.dtype, t.shape) for t in carried)
        self._line()
        attrs: dict[str, Any] = {"n": n}
        asked = 0
        self._scopes.append(object())
        try:
            index, *values = self._define((("i32", ()), *types))
            given = (index, tuple(values) if many else values[0])
            if test is not None:
                hold, attrs["test"], asked = self._nested(lambda: self._holds(test(*given)))
                attrs["hold"] = hold._id
            out, attrs["ops"], spent = self._nested(lambda: self._carried(what, body(*given), many, types))
        finally:
            self._scopes.pop()
        cost = rules.loop_cost(n, spent) if test is None else rules.while_cost(n, asked, spent)
        self._spend(what, cost, f": {n} iterations of {cost // n}")
        attrs["out"] = [t._id for t in out]
        self._ops.append([name, [t._id for t in carried], attrs])
        done = self._define(types)
        return tuple(done) if many else done[0]

    def _nested(self, fn: Callable[[], Any]) -> tuple[Any, list[Any], int]:
        """What `fn` gives, the ops that it records, and their cost; its tensors end with it."""
        outer, cost = self._ops, self._cost
        self._ops, self._cost = [], 0
        self._scopes.append(object())
        try:
            return fn(), self._ops, self._cost
        finally:
            self._scopes.pop()
            self._ops, self._cost = outer, cost

    def _holds(self, made: Any) -> Tensor:
        hold = self._value(made)
        if (hold.dtype, hold.shape) != ("bool", ()):
            raise EtaError(f"while_loop: the test must return one bool, but returned {hold!r}")
        return hold

    def _carried(self, what: str, made: Any, many: bool, types: tuple[Type, ...]) -> list[Tensor]:
        out = [self._value(x) for x in (made if many and isinstance(made, tuple | list) else (made,))]
        got = tuple((t.dtype, t.shape) for t in out)
        if got != types:
            want, have = (", ".join(map(rules.show, kinds)) for kinds in (types, got))
            raise EtaError(f"{what}: the body must return what it carries ({want}), but returned ({have})")
        return out

    def _value(self, x: Any) -> Tensor:
        return self._tensor(x) if isinstance(x, Tensor) else self.literal(x)

    def record(self, stage: Stage, fn: Callable[[], Any]) -> None:
        """Record one of the stages before the epilogue; its tensors end with it, unless it is the prologue."""
        self._stage, outer, self._ops = stage, self._ops, self._parts[stage]
        if stage.layered:
            self._scopes.append(object())
        try:
            made = fn()
        finally:
            if stage.layered:
                self._scopes.pop()
            self._stage, self._ops = Stage.EPILOGUE, outer
        if made is not None:
            raise EtaError(f"{stage.value} gives back nothing: put what should stay into a Channel, got {made!r:.60}")

    def next_layer(self) -> None:
        """What the second layer finds in the channels must suit it too; later ones find the same."""
        for used in self._used:
            used.since = None  # puts of the layer before are not this one's
        for stage, what, at, line in self._layered:
            try:
                self._used[at].take(stage) if what == "take" else self._used[at].put(stage)
            except EtaError as error:
                raise EtaError(f"{stage.value} at {line}, in the second layer: {error}") from None

    def shown(self, name: str, row: int | None) -> Tensor:
        attrs = self._place(name, row)
        assert self._stages is not None
        kinds: dict[str, Type] = {
            "layer": ("u32", ()),
            "query": ("f32", self._stages.heads),
            "bound": ("f32", (self._stages.pages,)),
            "score": ("f32", (self._stages.width,)),
        }
        return self._emit(name, [], attrs, (kinds[name],), rules.OP_COST)[0]

    def keep_pages(self, row: int, keep: Any) -> None:
        attrs = self._place("pages", row)
        assert self._stages is not None
        if len(self._scopes) > 2 or row in self._masked:
            raise EtaError(f"keep_pages: row {row} is masked once per layer, outside of loops")
        mask = self._tensor(keep) if isinstance(keep, Tensor) else self.literal(keep, "bool")
        if (mask.dtype, mask.shape) != ("bool", (self._stages.pages,)):
            raise EtaError(f"keep_pages: one bool per page, bool[{self._stages.pages}], got {mask!r}")
        self._masked.add(row)
        self._emit("pages", [mask._id], attrs, (), rules.OP_COST)

    def _place(self, name: str, row: int | None) -> dict[str, int]:
        if self._stage not in SHOWN[name]:
            where = " and ".join(stage.value for stage in SHOWN[name])
            raise EtaError(f"this is there in {where} only, not in {self._stage.value}: see ForwardPass.{where[:7]}")
        if row is None:
            return {}
        if not isinstance(row, int) or isinstance(row, bool) or not 0 <= row < len(self._rows):
            raise EtaError(f"row {row!r:.20}: this pass has rows 0 to {len(self._rows) - 1}")
        return {"i": row}

    def type_of(self, value: Any) -> Type:
        if isinstance(value, Tensor):
            return value.dtype, value.shape
        dtype = rules.literal_dtype(value)
        if dtype is None:
            raise _not_a_value(value)
        return dtype, rules.check_literal("a literal", value, dtype)[1]

    def finish(self, result: Any) -> TracedProgram:
        """The program that gives what the epilogue returned: a tensor or number, a tuple or list of them, or None."""
        single = not isinstance(result, tuple | list) and result is not None
        if hasattr(result, "__await__") and not isinstance(result, Tensor):
            raise EtaError("an epilogue is a plain function: write def, not async def")
        results = (result,) if single else tuple(result or ())
        tensors = [self._tensor(x) if isinstance(x, Tensor) else self.literal(x) for x in results]
        body = {
            "channels": [[str(c.dtype), list(c.shape)] for c in self._channels],
            "eta": rules.VERSION,
            "ops": self._ops,
            "out": [t._id for t in tensors],
            "params": self._param_table,
            "reads": self._read_table,
            "rows": len(self._rows),
            "single": single,
        }
        if self._stages is not None:
            parts = {name: self._parts[stage] for stage, name in BODY_NAMES.items()}
            shape = {"heads": list(self._stages.heads), "width": self._stages.width, "page": self._stages.page}
            body["stages"] = {**shape, **parts}
        source = self._source or (self._lines[0] if self._lines else "")
        document = {"body": body, "lines": self._lines, "source": source}
        text = json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
        types = tuple((t.dtype, t.shape) for t in tensors)
        return TracedProgram(text, tuple(self._params), tuple(self._channels), types, single)

    def _operand(self, rule: rules.Rule, at: int, operands: Sequence[Any]) -> Tensor:
        value = operands[at]
        if isinstance(value, Tensor):
            return self._tensor(value)
        patterns = rule.patterns(len(operands))
        if at >= len(patterns):
            return self.literal(value)
        want = patterns[at].dtype
        if want in rules.DTYPES:
            return self.literal(value, want)
        for pattern, other in zip(patterns, operands, strict=False):
            if pattern.dtype == want and isinstance(other, Tensor):
                return self.literal(value, other.dtype)
        return self.literal(value)

    def _tensor(self, value: Tensor) -> Tensor:
        if value._recorder is not self:
            raise EtaError("this tensor belongs to another epilogue; pass values between passes by Output or Channel")
        if value._scope not in self._scopes:
            raise EtaError(
                "this tensor belongs to the body of a loop that has ended; carry it out of the loop "
                "(or to a layer stage: put it into a Channel)"
            )
        return value

    def _channel(self, channel: Any, what: str) -> int:
        if len(self._scopes) > 1 + self._stage.layered:
            raise EtaError(f"{what} of a channel inside a loop: take before it, put after it, and carry the value")
        for at, known in enumerate(self._channels):
            if known is channel:
                return at
        self._channels.append(channel)
        self._used.append(Traffic())
        return len(self._channels) - 1

    def _traffic(self, at: int, what: str) -> None:
        """A take or put of a channel in this stage."""
        self._used[at].take(self._stage) if what == "take" else self._used[at].put(self._stage)
        if self._stage.layered:
            self._layered.append((self._stage, what, at, author_line()))

    def _emit(self, name: str, ids: list[int], attrs: dict[str, Any], types: Sequence[Type], cost: int) -> list[Tensor]:
        self._line()
        if len(self._lines) > rules.MAX_OPS:
            raise EtaError(f"the epilogue has more than {rules.MAX_OPS} ops")
        self._spend(name, cost, "")
        self._ops.append([name, ids, attrs])
        return self._define(types)

    def _spend(self, name: str, cost: int, why: str) -> None:
        self._cost += cost
        if self._cost > rules.MAX_COST:
            raise EtaError(
                f"{name}: the epilogue costs {self._cost} element operations a pass, more than {rules.MAX_COST}{why}; "
                f"a running step cannot be interrupted, so loop fewer times or over less"
            )

    def _define(self, types: Sequence[Type]) -> list[Tensor]:
        scope, start = self._scopes[-1], self._next
        self._next += len(types)
        return [Tensor(self, scope, start + at, dtype, shape) for at, (dtype, shape) in enumerate(types)]

    def _line(self) -> None:
        frame = sys._getframe(2)
        while frame is not None:
            module = frame.f_globals.get("__name__", "")
            if module != PACKAGE and not module.startswith("inferlet."):
                code = frame.f_code
                self._lines.append(f"{code.co_filename.rpartition('/')[2]}:{frame.f_lineno}"[:200])
                return
            frame = frame.f_back  # type: ignore[assignment]
        self._lines.append("")


def trace(
    fn: Callable[[], Any],
    outputs: dict[str, tuple[Sequence[int], str]],
    rows: Sequence[int | None],
    vocab_size: int = 0,
    page_size: int = 0,
    stages: Stages | None = None,
) -> TracedProgram:
    """Run an epilogue, and the stages before it, once and record them."""
    chosen = GuestRecorder(outputs, rows, vocab_size, page_size, stages=stages)
    with recording(chosen):
        if stages is not None:
            for stage, early in stages.fns:
                chosen.record(stage, early)
            chosen.next_layer()
        return chosen.finish(fn())
