"""The traced program: canonical JSON in, one typed, bounded, pure function out.

The text is `{"body": {...}, "lines": [...], "source": "main.py:14"}`. Identity is the SHA-256 of the canonical body
(sorted keys, no spaces, ASCII); `lines` (the author's file and line per op) and `source` are for errors and stay
outside it. The body:

- `eta`: format version. `rows`: rows of the pass. `single`: whether the author returned one tensor.
- `reads`: `[row, name, dtype, shape]`. `params`, `channels`: `[dtype, shape]`.
- `ops`: `[name, operand ids, attributes]`. Results are numbered in order of appearance. Leaves: `output`, `param`,
  `take`, `read` and `put` name their table entry by attribute `i`. `fori` has `n`, `ops`, `out`: inside, the next ids
  are the i32 index and the carried values; they and the body's values end with it. `while` has also `test`, ops before
  each turn, whose values end with the test, and `hold`, the id of the bool that lets a turn begin; n bounds the turns.
- `out`: ids of the results.
- `stages`, where attention layers are looked at: `{"heads": [H, d], "width": C, "page": n, "prologue": ops, "proj": ops, "attn": ops}`.
  These ops come before `ops` in the numbering (and in `lines`); values of `proj` and `attn` end with them. Their leaves are `layer`, and
  by row (attribute `i`) `query`, `score` (after attention), `bound` and the mask `pages` (before it).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import jax

from pie_xla.eta import rules
from pie_xla.eta.lowering import lower_program
from pie_xla.eta.rules import Type
from pie_xla.eta.stages import EtaStages, registers_of
from pie_xla.eta.types import ChannelUse, DType, EtaError, Read, TensorType
from pie_xla.eta.validate import Node, Shape, Stage, Validator, fields, refuse

MAX_TEXT = 1 << 20


@dataclass(frozen=True)
class Limits:
    """What one pass of a program may cost: element operations, live intermediate bytes."""

    cost: int = rules.MAX_COST
    memory: int = 1 << 30


@dataclass(frozen=True, eq=False)
class EtaProgram:
    """A validated program of the guest SDKs; implements `types.Program`."""

    key: str
    rows: int
    reads: tuple[Read, ...]
    params: tuple[TensorType, ...]
    channels: tuple[ChannelUse, ...]
    results: tuple[TensorType, ...]
    scalar_result: bool
    cost: int
    memory: int
    source: str
    text: str  # the canonical document, without lines: another process rebuilds the program from it
    nodes: tuple[Node, ...]
    out: tuple[int, ...]
    stages: EtaStages | None

    @staticmethod
    def from_json(text: str, limits: Limits | None = None) -> EtaProgram:
        """Validate a program's text, which is untrusted.

        Raises:
            EtaError: naming the op, the author's line where the text gives it, and the rule that was broken.
        """
        document = _parse(text)
        fields("program", document, required=("body",), optional=("lines", "source"))
        return _build(document, limits or Limits())

    def apply(
        self,
        reads: Sequence[jax.Array],
        params: Sequence[jax.Array],
        cells: Sequence[jax.Array],
        key: jax.Array,
        ordinal: jax.Array,
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        """See `types.Program.apply`."""
        return lower_program(self.nodes, self.out, reads, params, cells, key, ordinal, self.channels)


def canonical(body: Any) -> str:
    """The one spelling of a body: sorted keys, no spaces, ASCII."""
    return json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def _parse(text: str) -> Any:
    if len(text) > MAX_TEXT:
        raise refuse(f"its text has {len(text)} characters, more than {MAX_TEXT}")

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(dict(items)) != len(items):
            raise refuse(f"it names a key twice: {', '.join(sorted(name for name, _ in items))[:200]}")
        return dict(items)

    def constant(name: str) -> Any:
        raise refuse(f"{name} is not a value of the format")

    try:
        return json.loads(text, object_pairs_hook=pairs, parse_constant=constant)
    except EtaError:
        raise
    except (ValueError, RecursionError) as error:
        raise refuse(f"it is not JSON: {str(error)[:200]}") from None


def _build(document: dict[str, Any], limits: Limits) -> EtaProgram:
    body = document["body"]
    required = ("eta", "rows", "single", "reads", "params", "channels", "ops", "out")
    fields("body", body, required=required, optional=("stages",))
    if body["eta"] != rules.VERSION or isinstance(body["eta"], bool):
        raise refuse(f"it is version {body['eta']!r} of the format, this server reads {rules.VERSION}")
    rows = _whole("rows", body["rows"], 0, 4096)
    if not isinstance(body["single"], bool):
        raise refuse(f"single must be true or false, got {body['single']!r}")
    reads = tuple(_read(item, rows) for item in _list("reads", body["reads"]))
    if len({(read.row, read.name) for read in reads}) != len(reads):
        raise refuse("it reads one output of one row twice")
    params = tuple(_type("params", item) for item in _list("params", body["params"]))
    channels = tuple(_type("channels", item) for item in _list("channels", body["channels"]))
    staged = body.get("stages")
    shape = None if "stages" not in body else _shape(staged)
    validator = Validator(reads, params, channels, _lines(document), shape, rows)
    parts: dict[Stage, tuple[Node, ...]] = {}
    if shape is not None:
        for stage, name in ((Stage.PROLOGUE, "prologue"), (Stage.PROJ, "proj"), (Stage.ATTN, "attn")):
            parts[stage] = validator.part(stage, _list(name, staged[name]))
        if not (parts[Stage.PROJ] or parts[Stage.ATTN]):
            raise refuse("its layer stages do nothing")
        validator.next_layer([(Stage.PROJ, parts[Stage.PROJ]), (Stage.ATTN, parts[Stage.ATTN])])
    registers = registers_of(validator.uses)
    nodes, types = validator.run(_list("ops", body["ops"]))
    out = tuple(_whole("out", item, 0, rules.MAX_OPS * 4) for item in _list("out", body["out"]))
    for value in out:
        if value not in types:
            raise refuse(f"out names value {value}, which does not exist")
    if body["single"] and len(out) != 1:
        raise refuse(f"single is true, but it has {len(out)} results")
    every = [node for part in (*parts.values(), nodes) for node in part]
    cost = sum(node.cost for node in every)
    memory = sum(_peak(part, ()) for part in parts.values()) + _peak(nodes, out)
    source = document.get("source", "")
    if not isinstance(source, str) or len(source) > 200:
        raise refuse("source must be a text of at most 200 characters")
    where = f" at {source}" if source else ""
    if cost > limits.cost:
        dearest = max(every, key=lambda node: node.cost)
        at = f" at {dearest.line}" if dearest.line else where
        raise EtaError(
            f"the program costs {cost} element operations a pass, more than the limit of {limits.cost}; "
            f"the dearest op is {dearest.name}{at} with {dearest.cost}",
            "a running step cannot be interrupted, so the bound is static: loop fewer times or over less",
        )
    if memory > limits.memory:
        raise EtaError(f"the program{where} needs {memory} bytes of intermediate values, more than {limits.memory}")
    spelled = canonical(body)
    uses = tuple(
        ChannelUse(kind, use.take, use.read, use.put) for kind, use in zip(channels, validator.uses, strict=True)
    )
    stages = None
    if shape is not None:
        used = {name: tuple(sorted(validator.used.get(name, ()))) for name in ("score", "bound", "pages")}
        stages = EtaStages(
            shape=shape,
            prologue=parts[Stage.PROLOGUE],
            proj=parts[Stage.PROJ],
            attn=parts[Stage.ATTN],
            epilogue=nodes,
            out=out,
            channels=uses,
            registers=registers,
            scored=used["score"],
            bounded=used["bound"],
            masked=used["pages"],
        )
    return EtaProgram(
        key=sha256(spelled.encode()).hexdigest(),
        rows=rows,
        reads=reads,
        params=params,
        channels=uses,
        results=tuple(tensor(types[value]) for value in out),
        scalar_result=body["single"],
        cost=cost,
        memory=memory,
        source=source,
        text=f'{{"body":{spelled}}}',
        nodes=nodes,
        out=out,
        stages=stages,
    )


def tensor(kind: Type) -> TensorType:
    """A rules type as a `TensorType`."""
    return TensorType(DType(kind[0]), kind[1])


def _peak(nodes: Sequence[Node], out: Sequence[int]) -> int:
    """Largest sum of bytes of values that are live at once; a loop body counts beside what lives around it."""
    last = dict.fromkeys(out, len(nodes))
    for index, node in enumerate(nodes):
        for value in node.captured:
            last[value] = max(last.get(value, 0), index)
    live = peak = 0
    ends: dict[int, int] = {}
    for index, node in enumerate(nodes):
        inner = max(_peak(node.body, node.body_out), _peak(node.test, (node.hold,))) if node.body_ids else 0
        made = 0
        for value, kind in zip(node.results, node.types, strict=True):
            size = 4 * tensor(kind).size
            made += size
            until = max(last.get(value, index), index)
            ends[until] = ends.get(until, 0) + size
        live += made
        peak = max(peak, live + inner)
        live -= ends.pop(index, 0)
    return peak


def _list(name: str, value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise refuse(f"{name} must be a list, got {type(value).__name__}")
    if len(value) > rules.MAX_OPS:
        raise refuse(f"{name} has {len(value)} entries, more than {rules.MAX_OPS}")
    return value


def _whole(name: str, value: Any, low: int, high: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise refuse(f"{name} must be an integer in {low}..{high}, got {str(value)[:60]}")
    return value


def _type(name: str, item: Any) -> TensorType:
    if not isinstance(item, list) or len(item) != 2 or item[0] not in rules.DTYPES or not isinstance(item[1], list):
        raise refuse(f"{name} must hold [dtype, shape] pairs, got {str(item)[:80]}")
    shape = tuple(_whole(f"{name} extent", extent, 1, rules.MAX_ELEMENTS) for extent in item[1])
    try:
        rules.check_shape(name, shape)
    except rules.RuleError as error:
        raise refuse(str(error)) from None
    return TensorType(DType(item[0]), shape)


def _shape(stages: Any) -> Shape:
    """What the layer stages were recorded for."""
    fields("stages", stages, required=("heads", "width", "page", "prologue", "proj", "attn"))
    heads = _list("stages heads", stages["heads"])
    if len(heads) != 2:
        raise refuse(f"stages heads must be [H, d], got {str(heads)[:80]}")
    H, d = (_whole("stages heads", n, 1, rules.MAX_ELEMENTS) for n in heads)
    width = _whole("stages width", stages["width"], 1, rules.MAX_ELEMENTS)
    try:
        rules.check_shape("stages", (H, d))
    except rules.RuleError as error:
        raise refuse(str(error)) from None
    return Shape(H, d, width, _whole("stages page", stages["page"], 1, 1 << 20))


def _read(item: Any, rows: int) -> Read:
    if not isinstance(item, list) or len(item) != 4 or not isinstance(item[1], str) or len(item[1]) > 64:
        raise refuse(f"reads must hold [row, name, dtype, shape], got {str(item)[:80]}")
    kind = _type("reads", item[2:])
    return Read(_whole("reads row", item[0], 0, rows - 1), item[1], kind.shape, kind.dtype)


def _lines(document: dict[str, Any]) -> list[str]:
    lines = _list("lines", document.get("lines", []))
    if not all(isinstance(line, str) and len(line) <= 200 for line in lines):
        raise refuse("lines must hold texts of at most 200 characters")
    return lines
