"""The recorder of a native process: eta's functions act on JAX tracers, so `jnp` code may stand between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pie_xla.eta import loops, rules
from pie_xla.eta.lowering import lower_op
from pie_xla.eta.rng import Draw
from pie_xla.eta.rules import Type
from pie_xla.eta.table import TABLE
from pie_xla.eta.types import DType, EtaError

Array = Any

DTYPE_NAMES = {dtype.numpy: str(dtype) for dtype in DType}


def _concrete(value: np.ndarray) -> Array:
    """[1, ...]: a real array in the middle of a trace. As a scalar JAX would compile it in as a literal."""
    with jax.ensure_compile_time_eval():
        return jnp.asarray(value[None])


def _staged(concrete: Array) -> Array:
    """A tracer of it without the first axis; the array is found again, by identity, among the jaxpr's constants."""
    return lax.squeeze(concrete, (0,))


def _not_a_value(value: object) -> EtaError:
    return EtaError(f"{type(value).__name__} {value!r:.60} is not an array, a number or a nested list of numbers")


@dataclass(frozen=True)
class _Spent:
    """Where a recording is: streams given out, element operations so far."""

    streams: int
    cost: int


class NativeRecorder:
    """Same methods as the SDK's `Recorder`; tensors are JAX arrays.

    Args:
        outputs: (row, name) of each array given to `begin`.
        rows: rows of the pass. vocab_size, page_size: the model's facts.
    """

    def __init__(self, outputs: Sequence[tuple[int, str]], rows: int, vocab_size: int, page_size: int) -> None:
        self.vocab_size, self.page_size = vocab_size, page_size
        self._names, self._rows = list(outputs), rows
        self.seen: list[tuple[int, str]] = []
        self.channels: list[Any] = []
        self.used: list[set[str]] = []
        self.cells: list[Array] = []
        self.literals: list[Array] = []
        self.sources: dict[int, dict[str, int]] = {}  # by the literal's id: what fills it in
        self._pending: dict[int, Array] = {}
        self._outputs: dict[tuple[int, str], Array] = {}
        self._streams = 0
        self._depth = 0
        self._cost = 0

    def begin(self, values: Sequence[Array], key: Array, ordinal: Array) -> None:
        """Give the traced inputs; called inside the trace."""
        self._outputs = dict(zip(self._names, values, strict=True))
        self._draw = Draw(key, ordinal)

    def apply(self, name: str, operands: Sequence[Any], attrs: dict[str, Any]) -> Any:
        op = TABLE[name]
        try:
            if op.rule.random and attrs.get("stream") is None:
                attrs = {**attrs, "stream": self._streams}
                self._streams += 1
            values = op.rule.check_attrs(attrs)
            arrays = [self._operand(op.rule, at, operands) for at in range(len(operands))]
            _, cost = op.rule.infer(tuple(self.type_of(x) for x in arrays), values)
        except rules.RuleError as error:
            raise EtaError(str(error)) from None
        self._cost += cost
        made = lower_op(op, self._draw, arrays, values)
        return made[0] if len(made) == 1 else made

    def literal(self, value: Any, dtype: str | None = None) -> Array:
        if isinstance(value, jax.core.Tracer):
            raise EtaError("param takes a number or an array of the host; this value is on the device already")
        if isinstance(value, jax.Array | np.ndarray | np.generic):
            dtype = dtype or DTYPE_NAMES.get(np.dtype(value.dtype))
            value = np.asarray(value).tolist()
        kind = dtype or rules.literal_dtype(value)
        if kind is None:
            raise _not_a_value(value)
        try:
            number, _ = rules.check_literal("a literal", value, kind)
        except rules.RuleError as error:
            raise EtaError(str(error)) from None
        self.literals.append(_concrete(np.asarray(number, DType(kind).numpy)))
        return _staged(self.literals[-1])

    def late(self, dtype: str, shape: tuple[int, ...], source: dict[str, int]) -> Array:
        self.literals.append(_concrete(np.zeros(shape, DType(dtype).numpy)))
        self.sources[id(self.literals[-1])] = source
        return _staged(self.literals[-1])

    def output(self, row: int, name: str) -> Array:
        if (row, name) not in self._outputs:
            names = ", ".join(dict.fromkeys(known for _, known in self._names))
            raise EtaError(f"output({row!r}, {name!r}): this pass has rows 0 to {self._rows - 1} with outputs {names}")
        if (row, name) not in self.seen:
            self.seen.append((row, name))
        return self._outputs[row, name]

    def shown(self, name: str, row: int | None) -> Array:
        raise EtaError(f"a {name} is there in on_attn_proj and on_attn only, not in the epilogue")

    def keep_pages(self, row: int, keep: Any) -> None:
        raise EtaError("pages are hidden in on_attn_proj only, not in the epilogue")

    def take(self, channel: Any) -> Array:
        at = self._channel(channel, "take")
        if self.used[at] & {"take", "put"}:
            done = "put to" if "put" in self.used[at] else "taken from"
            raise EtaError(f"this channel was already {done} in this pass: take once, before put")
        self.used[at].add("take")
        return _staged(self.cells[at])

    def read(self, channel: Any) -> Array:
        at = self._channel(channel, "read")
        if at in self._pending:
            return self._pending[at]
        if "take" not in self.used[at]:
            self.used[at].add("read")
        return _staged(self.cells[at])

    def put(self, channel: Any, value: Any) -> None:
        at = self._channel(channel, "put")
        if "put" in self.used[at]:
            raise EtaError("this channel was already put to in this pass: put once")
        kind, shape = str(channel.dtype), tuple(channel.shape)
        x = self.value(value, "put", kind)
        if self.type_of(x)[0] != kind:
            raise EtaError(f"the channel holds {kind}, got {rules.show(self.type_of(x))}: use cast(x, {kind!r})")
        if x.shape != shape:
            x = self.apply("reshape", (x,), {"shape": shape})
        self.used[at].add("put")
        self._pending[at] = x

    def puts(self) -> list[Array]:
        """The value put per channel with a put, in channel order."""
        return [self._pending[at] for at in sorted(self._pending)]

    def fori(self, n: int, body: Callable[..., Any], init: Any) -> Any:
        return self._loop("fori", n, None, body, init)

    def while_loop(self, n: int, test: Callable[..., Any], body: Callable[..., Any], init: Any) -> Any:
        return self._loop("while_loop", n, test, body, init)

    def _loop(self, what: str, n: int, test: Callable[..., Any] | None, body: Callable[..., Any], init: Any) -> Any:
        bound = "n" if test is None else "bound"
        if not isinstance(n, int) or isinstance(n, bool) or not 1 <= n < 1 << 31:
            raise EtaError(
                f"{what}: {bound} must be a Python int of at least 1 (it is fixed when recorded), got {n!r:.60}"
            )
        self._bound(what, n, 0)
        many = isinstance(init, tuple | list)
        carried = tuple(self.value(x, f"{what} init") for x in (init if many else (init,)))
        types = tuple(self.type_of(x) for x in carried)
        draw, before = self._draw, _Spent(self._streams, self._cost)
        asked = done = before

        def inside(start: _Spent, fn: Callable[..., Any], index: Array, values: tuple[Array, ...]) -> Any:
            # JAX may trace a function more than once: each time its draws are numbered alike.
            self._draw, self._streams, self._cost = draw.iteration(index.astype(jnp.uint32)), start.streams, start.cost
            return fn(index, values if many else values[0])

        def holds(index: Array, values: tuple[Array, ...]) -> Array:
            nonlocal asked
            assert test is not None
            made = self.value(inside(before, test, index, values), "while_loop test")
            asked = _Spent(self._streams, self._cost)
            if self.type_of(made) != ("bool", ()):
                raise EtaError(
                    f"while_loop: the test must return one bool, but returned {rules.show(self.type_of(made))}"
                )
            return made

        def turn(index: Array, values: tuple[Array, ...]) -> tuple[Array, ...]:
            nonlocal done
            made = inside(asked, body, index, values)
            results = tuple(made) if many and isinstance(made, tuple | list) else (made,)
            out = tuple(self.value(x, f"{what} body") for x in results)
            done = _Spent(self._streams, self._cost)
            got = tuple(self.type_of(x) for x in out)
            if got != types:
                want, have = (", ".join(map(rules.show, kinds)) for kinds in (types, got))
                raise EtaError(f"{what}: the body must return what it carries ({want}), but returned ({have})")
            return out

        self._depth += 1
        try:
            made = loops.repeat(n, turn, carried) if test is None else loops.repeat_while(n, holds, turn, carried)
        finally:
            self._depth -= 1
            self._draw = draw
        self._streams = done.streams
        self._cost = before.cost + self._bound(what, n, done.cost - before.cost)
        return made if many else made[0]

    def _bound(self, what: str, n: int, body: int) -> int:
        """Cost of a loop; `jnp` code between eta's functions is trusted and not counted."""
        cost = rules.loop_cost(n, body)
        if cost > rules.MAX_COST:
            raise EtaError(
                f"{what}: {n} iterations cost {cost} element operations a pass, more than {rules.MAX_COST}",
                "a running step cannot be interrupted: loop fewer times or over less",
            )
        return cost

    def type_of(self, value: Any) -> Type:
        if isinstance(value, jax.Array | np.ndarray | np.generic):
            name = DTYPE_NAMES.get(np.dtype(value.dtype))
            if name is None:
                raise EtaError(f"{value.dtype} is not a dtype of eta ({', '.join(DType)}): use .astype(jnp.float32)")
            return name, tuple(value.shape)
        dtype = rules.literal_dtype(value)
        if dtype is None:
            raise _not_a_value(value)
        return dtype, rules.check_literal("a literal", value, dtype)[1]

    def value(self, x: Any, what: str, dtype: str | None = None) -> Array:
        """A strongly typed array of one of the language's dtypes."""
        if not isinstance(x, jax.Array | np.ndarray | np.generic):
            return self.literal(x, dtype)
        name, _ = self.type_of(x)
        return lax.convert_element_type(jnp.asarray(x), DType(name).numpy)

    def _operand(self, rule: rules.Rule, at: int, operands: Sequence[Any]) -> Array:
        value = operands[at]
        if isinstance(value, jax.Array | np.ndarray | np.generic):
            return self.value(value, rule.name)
        patterns = rule.patterns(len(operands))
        if at >= len(patterns):
            return self.literal(value)
        want = patterns[at].dtype
        if want in rules.DTYPES:
            return self.literal(value, want)
        for pattern, other in zip(patterns, operands, strict=False):
            if pattern.dtype == want and isinstance(other, jax.Array | np.ndarray | np.generic):
                return self.literal(value, self.type_of(other)[0])
        return self.literal(value)

    def _channel(self, channel: Any, what: str) -> int:
        if self._depth:
            raise EtaError(f"{what} of a channel inside a loop: take before it, put after it, and carry the value")
        for at, known in enumerate(self.channels):
            if known is channel:
                return at
        self.channels.append(channel)
        self.used.append(set())
        self.cells.append(_concrete(np.zeros(tuple(channel.shape), DType(str(channel.dtype)).numpy)))
        return len(self.channels) - 1
