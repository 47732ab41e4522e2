"""Validation of a program's ops, one by one, as untrusted input."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from pie_xla.eta import rules
from pie_xla.eta.rules import Type
from pie_xla.eta.table import TABLE
from pie_xla.eta.types import EtaError, Read, TensorType

MAX_DEPTH = 4
LOOPS = {"fori": {"n", "ops", "out"}, "while": {"n", "test", "hold", "ops", "out"}}
LEAVES = ("output", "param", "take", "read", "put")


class Stage(Enum):
    """When ops run; in this order, the middle two once per attention layer."""

    PROLOGUE = "prologue"
    PROJ = "on_attn_proj"
    ATTN = "on_attn"
    EPILOGUE = "epilogue"

    @property
    def layered(self) -> bool:
        return self in (Stage.PROJ, Stage.ATTN)


# Where each thing that the model shows may be used.
SHOWN = {
    "output": (Stage.EPILOGUE,),
    "layer": (Stage.PROJ, Stage.ATTN),
    "query": (Stage.PROJ, Stage.ATTN),
    "bound": (Stage.PROJ,),
    "pages": (Stage.PROJ,),
    "score": (Stage.ATTN,),
}


@dataclass(frozen=True)
class Shape:
    """What layer stages were recorded for: H query heads of d numbers, C positions, pages of `page` positions."""

    heads: int
    head_dim: int
    width: int
    page: int

    @property
    def pages(self) -> int:
        """J."""
        return -(-self.width // self.page)


@dataclass(frozen=True)
class Node:
    """One checked op. `body` is a loop's; `body_ids` are the index and the carried values, for its `test` too."""

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
    test: tuple[Node, ...] = ()
    hold: int = -1  # the id of the test's answer
    captured: frozenset[int] = frozenset()  # every outer value that this op, or its body, uses


class Held(Enum):
    """What a pass finds in a channel."""

    FRONT = "front"  # the channel's own front cell
    GONE = "gone"  # taken
    PENDING = "pending"  # put in this pass


@dataclass
class Use:
    """What a program has done with one channel so far.

    Attributes:
        take, read: of the channel's own front cell.
        since: the stage of the put that is pending.
        early: it is put to before the epilogue.
    """

    take: bool = False
    read: bool = False
    held: Held = Held.FRONT
    since: Stage | None = None
    early: bool = False
    touched: bool = False

    @property
    def put(self) -> bool:
        """Whether the pass leaves a value."""
        return self.held is Held.PENDING


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
    shape: Shape | None = None
    rows: int = 0
    uses: list[Use] = field(init=False)
    stage: Stage = Stage.EPILOGUE
    used: dict[str, set[int]] = field(default_factory=dict)  # rows of "query", "bound", "pages", "score"
    _next: int = 0
    _count: int = 0
    _types: dict[int, Type] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.uses = [Use() for _ in self.channels]

    def run(self, ops: list[Any]) -> tuple[tuple[Node, ...], dict[int, Type]]:
        nodes = self.part(Stage.EPILOGUE, ops)
        if self.lines and len(self.lines) != self._count:
            raise refuse(f"lines has {len(self.lines)} entries for {self._count} ops")
        for index, use in enumerate(self.uses):
            if not use.touched:
                raise refuse(f"channel {index} is declared and never used")
        return nodes, self._types

    def part(self, stage: Stage, ops: list[Any]) -> tuple[Node, ...]:
        """One stage's ops. Values of layer stages end with them; those of the prologue do not."""
        self.stage = stage
        outer = dict(self._types)
        nodes = self._ops(ops, 0)
        if stage.layered:
            self._types = outer
        return nodes

    def next_layer(self, bodies: Sequence[tuple[Stage, Sequence[Node]]]) -> None:
        """What the second layer finds in the channels must suit it too; later ones find the same."""
        for stage, nodes in bodies:
            self.stage = stage
            for use in self.uses:
                use.since = None  # puts of the layer before are not this one's
            for node in nodes:
                if node.name in ("take", "read", "put"):
                    try:
                        self._traffic(node.name, node.attrs["i"])
                    except rules.RuleError as error:
                        at = f" at {node.line}" if node.line else ""
                        raise EtaError(f"{stage.value}{at}, in the second layer: {error}") from None

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
        if name in LOOPS:
            return self._loop(name, operands, attrs, line, depth)
        if name in SHOWN and self.stage not in SHOWN[name]:
            where = " and ".join(stage.value for stage in SHOWN[name])
            raise rules.RuleError(f"{name}: it is there in {where} only, not in {self.stage.value}")
        if name in LEAVES:
            return self._leaf(name, operands, attrs, line, depth)
        if name in SHOWN:
            return self._shown(name, operands, attrs, line, depth)
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
        if depth:
            raise rules.RuleError(f"{name}: a channel cannot be used inside a loop; carry its value instead")
        if name == "put" and self._types[operands[0]] != kind:
            got = rules.show(self._types[operands[0]])
            raise rules.RuleError(f"put: channel {at} holds {rules.show(kind)}, got {got}")
        self._traffic(name, at)

    def _traffic(self, name: str, at: int) -> None:
        """A take, read or put of a channel in this stage."""
        use = self.uses[at]
        use.touched = True
        match name:
            case "take":
                if use.held is Held.GONE or (use.held is Held.PENDING and use.since is self.stage):
                    done = "taken" if use.held is Held.GONE else "put"
                    raise rules.RuleError(f"take: channel {at} was already {done} in this pass")
                use.take = use.take or use.held is Held.FRONT
                use.held = Held.GONE
            case "read":
                use.read = use.read or use.held is Held.FRONT
            case "put":
                if use.held is Held.PENDING and (use.since is self.stage or not self.stage.layered):
                    raise rules.RuleError(f"put: channel {at} was already put in this pass")
                use.held, use.since = Held.PENDING, self.stage
                use.early = use.early or self.stage is not Stage.EPILOGUE

    def _shown(self, name: str, operands: tuple[int, ...], attrs: dict[str, Any], line: str, depth: int) -> Node:
        """Something that the model shows to a layer stage, or the pages that are hidden from it."""
        assert self.shape is not None
        H, d, J = self.shape.heads, self.shape.head_dim, self.shape.pages
        kinds: dict[str, Type] = {
            "layer": ("u32", ()),
            "query": ("f32", (H, d)),
            "bound": ("f32", (J,)),
            "score": ("f32", (self.shape.width,)),
        }
        if len(operands) != (name == "pages"):
            raise rules.RuleError(f"{name}: takes {int(name == 'pages')} operands, got {len(operands)}")
        wanted = set() if name == "layer" else {"i"}
        row = attrs.get("i", 0)
        if set(attrs) != wanted or not isinstance(row, int) or isinstance(row, bool) or not 0 <= row < self.rows:
            raise rules.RuleError(f"{name}: attribute i must be a row in 0..{self.rows - 1}, got {str(attrs)[:60]}")
        if name == "pages":
            mask = self._types[operands[0]]
            if mask != ("bool", (J,)):
                raise rules.RuleError(f"pages: the mask is bool[{J}], one per page, got {rules.show(mask)}")
            if depth or row in self.used.get(name, ()):
                raise rules.RuleError(f"pages: row {row} is masked once per layer, outside of loops")
        self.used.setdefault(name, set()).add(row)
        types = () if name == "pages" else (kinds[name],)
        return Node(name, operands, dict(attrs), self._define(types), types, rules.OP_COST, line,
                    captured=frozenset(operands))  # fmt: skip

    def _loop(self, name: str, operands: tuple[int, ...], attrs: dict[str, Any], line: str, depth: int) -> Node:
        wanted = LOOPS[name]
        if set(attrs) != wanted or not all(isinstance(attrs[key], list) for key in wanted & {"ops", "out", "test"}):
            raise rules.RuleError(f"{name}: attributes must be {', '.join(sorted(wanted))}")
        n = attrs["n"]
        if not isinstance(n, int) or isinstance(n, bool) or not 1 <= n < 1 << 31:
            raise rules.RuleError(f"{name}: n must be in 1..{(1 << 31) - 1}, got {str(n)[:40]}")
        if not operands:
            raise rules.RuleError(f"{name}: carries nothing, so it does nothing")
        if depth >= MAX_DEPTH:
            raise rules.RuleError(f"{name}: loops nest at most {MAX_DEPTH} deep")
        carried = tuple(self._types[value] for value in operands)
        outer = dict(self._types)
        ids = self._define((("i32", ()), *carried))
        test, hold = self._test(name, attrs, depth) if name == "while" else ((), -1)
        body = self._ops(attrs["ops"], depth + 1)
        out = tuple(self._value(name, value) for value in attrs["out"])
        types = tuple(self._types[value] for value in out)
        if types != carried:
            got, want = (", ".join(map(rules.show, kinds)) for kinds in (types, carried))
            raise rules.RuleError(f"{name}: the body must return the types it carries ({want}), got {got}")
        inner = frozenset((*out, hold)).union(*(node.captured for node in (*test, *body)))
        self._types = outer
        asked, spent = (sum(node.cost for node in nodes) for nodes in (test, body))
        cost = rules.while_cost(n, asked, spent) if name == "while" else rules.loop_cost(n, spent)
        captured = frozenset(operands) | (inner & outer.keys())
        return Node(
            name, operands, {"n": n}, self._define(carried), carried, cost, line, body, ids, out, test, hold, captured
        )  # fmt: skip

    def _test(self, name: str, attrs: dict[str, Any], depth: int) -> tuple[tuple[Node, ...], int]:
        """A loop's test, and the id of its answer; what else it makes ends with it."""
        outer = dict(self._types)
        test = self._ops(attrs["test"], depth + 1)
        hold = self._value(name, attrs["hold"])
        if self._types[hold] != ("bool", ()):
            raise rules.RuleError(f"{name}: the test must give bool[], got {rules.show(self._types[hold])}")
        self._types = outer
        return test, hold
