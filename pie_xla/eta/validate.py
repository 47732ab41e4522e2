"""Validation of a program's ops, one by one, as untrusted input."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pie_xla.eta import rules
from pie_xla.eta.rules import Type
from pie_xla.eta.table import TABLE
from pie_xla.eta.types import EtaError, Read, TensorType

MAX_DEPTH = 4
LEAVES = ("output", "param", "take", "read", "put")


@dataclass(frozen=True)
class Node:
    """One checked op. `body` is a loop's; its first two kinds of id are the index and the carried values."""

    name: str
    operands: tuple[int, ...]
    attrs: dict[str, Any]
    results: tuple[int, ...]
    types: tuple[Type, ...]
    cost: int
    line: str
    body: tuple[Node, ...] = ()
    body_ids: tuple[int, ...] = ()
    body_out: tuple[int, ...] = ()
    captured: frozenset[int] = frozenset()  # every outer value that this op, or its body, uses


@dataclass
class Use:
    """What a program has done with one channel so far."""

    take: bool = False
    read: bool = False
    put: bool = False


def refuse(what: str) -> EtaError:
    """An error about the program as a whole."""
    return EtaError(f"the epilogue program is refused: {what}", "programs are written by the inferlet SDK")


def fields(name: str, value: Any, required: Sequence[str], optional: Sequence[str] = ()) -> None:
    """Refuse anything but an object with exactly these keys."""
    if not isinstance(value, dict):
        raise refuse(f"{name} must be an object, got {type(value).__name__}")
    missing = [key for key in required if key not in value]
    unknown = [key for key in value if key not in (*required, *optional)]
    if missing or unknown:
        raise refuse(f"{name} lacks {missing} and has unknown keys {[key[:40] for key in unknown][:8]}")


@dataclass
class Validator:
    """Checks ops in order; `run` gives the nodes and the types of the values that live at the end."""

    reads: Sequence[Read]
    params: Sequence[TensorType]
    channels: Sequence[TensorType]
    lines: Sequence[str]
    uses: list[Use] = field(init=False)
    _next: int = 0
    _count: int = 0
    _types: dict[int, Type] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.uses = [Use() for _ in self.channels]

    def run(self, ops: list[Any]) -> tuple[tuple[Node, ...], dict[int, Type]]:
        nodes = self._ops(ops, 0)
        if self.lines and len(self.lines) != self._count:
            raise refuse(f"lines has {len(self.lines)} entries for {self._count} ops")
        for index, use in enumerate(self.uses):
            if not (use.take or use.read or use.put):
                raise refuse(f"channel {index} is declared and never used")
        return nodes, self._types

    def _ops(self, ops: list[Any], depth: int) -> tuple[Node, ...]:
        nodes = []
        for op in ops:
            index, self._count = self._count, self._count + 1
            if self._count > rules.MAX_OPS:
                raise refuse(f"it has more than {rules.MAX_OPS} ops")
            line = self.lines[index] if index < len(self.lines) else ""
            try:
                nodes.append(self._op(op, line, depth))
            except rules.RuleError as error:
                at = f" at {line}" if line else ""
                raise EtaError(f"op {index}{at}: {error}") from None
        return tuple(nodes)

    def _op(self, op: Any, line: str, depth: int) -> Node:
        if not isinstance(op, list) or len(op) != 3 or not isinstance(op[0], str):
            raise rules.RuleError(f"an op is [name, operand ids, attributes], got {str(op)[:80]}")
        name, ids, attrs = op
        if not isinstance(ids, list) or not isinstance(attrs, dict):
            raise rules.RuleError(f"{name[:40]}: operands must be a list and attributes an object")
        operands = tuple(self._value(name, value) for value in ids)
        if name == "fori":
            return self._loop(operands, attrs, line, depth)
        if name in LEAVES:
            return self._leaf(name, operands, attrs, line, depth)
        if name not in TABLE:
            raise rules.RuleError(f"unknown op {name[:40]!r}")
        rule = TABLE[name].rule
        values = rule.check_attrs(attrs)
        types, cost = rule.infer(tuple(self._types[value] for value in operands), values)
        return Node(name, operands, values, self._define(types), types, cost, line, captured=frozenset(operands))

    def _value(self, name: str, value: Any) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or value not in self._types:
            raise rules.RuleError(f"{name[:40]}: operand {str(value)[:20]} is not a value that exists here")
        return value

    def _define(self, types: Sequence[Type]) -> tuple[int, ...]:
        ids = tuple(range(self._next, self._next + len(types)))
        self._next += len(types)
        self._types.update(zip(ids, types, strict=True))
        return ids

    def _leaf(self, name: str, operands: tuple[int, ...], attrs: dict[str, Any], line: str, depth: int) -> Node:
        at = attrs.get("i")
        tables: dict[str, Sequence[Read | TensorType]] = {"output": self.reads, "param": self.params}
        entries = tables.get(name, self.channels)
        if set(attrs) != {"i"} or not isinstance(at, int) or isinstance(at, bool) or not 0 <= at < len(entries):
            raise rules.RuleError(f"{name}: attribute i must be in 0..{len(entries) - 1}, got {str(attrs)[:60]}")
        if len(operands) != (name == "put"):
            raise rules.RuleError(f"{name}: takes {int(name == 'put')} operands, got {len(operands)}")
        entry = entries[at]
        own = entry.type if isinstance(entry, Read) else entry
        kind: Type = (str(own.dtype), own.shape)
        if name in ("take", "read", "put"):
            self._channel(name, at, operands, kind, depth)
        types = () if name == "put" else (kind,)
        ids, used = self._define(types), frozenset(operands)
        return Node(name, operands, {"i": at}, ids, types, rules.OP_COST, line, captured=used)

    def _channel(self, name: str, at: int, operands: tuple[int, ...], kind: Type, depth: int) -> None:
        use = self.uses[at]
        if depth:
            raise rules.RuleError(f"{name}: a channel cannot be used inside a loop; carry its value instead")
        match name:
            case "take":
                if use.take or use.put:
                    done = "put" if use.put else "taken"
                    raise rules.RuleError(f"take: channel {at} was already {done} in this pass")
                use.take = True
            case "read":
                use.read = use.read or not (use.put or use.take)
            case "put":
                if use.put:
                    raise rules.RuleError(f"put: channel {at} was already put in this pass")
                if self._types[operands[0]] != kind:
                    got = rules.show(self._types[operands[0]])
                    raise rules.RuleError(f"put: channel {at} holds {rules.show(kind)}, got {got}")
                use.put = True

    def _loop(self, operands: tuple[int, ...], attrs: dict[str, Any], line: str, depth: int) -> Node:
        lists = isinstance(attrs.get("ops"), list) and isinstance(attrs.get("out"), list)
        if set(attrs) != {"n", "ops", "out"} or not lists:
            raise rules.RuleError("fori: attributes must be n, ops and out")
        n = attrs["n"]
        if not isinstance(n, int) or isinstance(n, bool) or not 1 <= n < 1 << 31:
            raise rules.RuleError(f"fori: n must be in 1..{(1 << 31) - 1}, got {str(n)[:40]}")
        if not operands:
            raise rules.RuleError("fori: carries nothing, so it does nothing")
        if depth >= MAX_DEPTH:
            raise rules.RuleError(f"fori: loops nest at most {MAX_DEPTH} deep")
        carried = tuple(self._types[value] for value in operands)
        outer = dict(self._types)
        ids = self._define((("i32", ()), *carried))
        body = self._ops(attrs["ops"], depth + 1)
        out = tuple(self._value("fori", value) for value in attrs["out"])
        types = tuple(self._types[value] for value in out)
        if types != carried:
            got, want = (", ".join(map(rules.show, kinds)) for kinds in (types, carried))
            raise rules.RuleError(f"fori: the body must return the types it carries ({want}), got {got}")
        inner = frozenset().union(*(node.captured for node in body), out)
        self._types = outer
        cost = rules.loop_cost(n, sum(node.cost for node in body))
        captured = frozenset(operands) | (inner & outer.keys())
        return Node(
            "fori", operands, {"n": n}, self._define(carried), carried, cost, line, body, ids, out, captured
        )  # fmt: skip
