"""A whole program in NumPy, op by op: the meaning that the lowering is tested against."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pie_xla.eta.program import EtaProgram
from pie_xla.eta.rng import OracleDraw
from pie_xla.eta.table import TABLE
from pie_xla.eta.validate import Node


def oracle_op(name: str, draw: OracleDraw, operands: Sequence[np.ndarray], attrs: dict[str, Any]) -> list[np.ndarray]:
    """The results of one op."""
    op = TABLE[name]
    with np.errstate(all="ignore"):
        made = op.oracle(draw, *operands, **attrs) if op.rule.random else op.oracle(*operands, **attrs)
    return [np.asarray(part) for part in (made if isinstance(made, tuple) else (made,))]


@dataclass(frozen=True)
class Layer:
    """What one attention layer shows: queries f32[H, d] per row, scores f32[C] and bounds f32[J] by row."""

    queries: Sequence[np.ndarray] = ()
    scores: Mapping[int, np.ndarray] = field(default_factory=dict)
    bounds: Mapping[int, np.ndarray] = field(default_factory=dict)


@dataclass
class _Walk:
    """One pass: its inputs, and what its ops have made so far."""

    reads: Sequence[np.ndarray]
    params: Sequence[np.ndarray]
    cells: list[np.ndarray]
    puts: dict[int, np.ndarray] = field(default_factory=dict)
    values: dict[int, np.ndarray] = field(default_factory=dict)
    masks: dict[int, np.ndarray] = field(default_factory=dict)
    layer: int = 0
    shown: Layer = field(default_factory=Layer)

    def ops(self, nodes: Sequence[Node], draw: OracleDraw) -> None:
        for node in nodes:
            made = self._op(node, draw)
            self.values.update(zip(node.results, made, strict=True))

    def _op(self, node: Node, draw: OracleDraw) -> list[np.ndarray]:
        operands = [self.values[value] for value in node.operands]
        at = node.attrs.get("i", 0)
        match node.name:
            case "output":
                return [self.reads[at]]
            case "param":
                return [self.params[at]]
            case "put":
                self.puts[at] = operands[0]
                return []
            case "read":
                return [self.puts.get(at, self.cells[at])]
            case "take":
                if at in self.puts:
                    self.cells[at] = self.puts.pop(at)
                return [self.cells[at]]
            case "layer":
                return [np.asarray(self.layer, np.uint32)]
            case "query":
                return [self.shown.queries[at]]
            case "score":
                return [self.shown.scores[at]]
            case "bound":
                return [self.shown.bounds[at]]
            case "pages":
                self.masks[at] = operands[0]
                return []
            case "fori" | "while":
                for index in range(node.attrs["n"]):
                    self.values.update(zip(node.body_ids, [np.asarray(index, np.int32), *operands], strict=True))
                    self.ops(node.test, draw.iteration(index))
                    if node.name == "while" and not self.values[node.hold]:
                        break
                    self.ops(node.body, draw.iteration(index))
                    operands = [self.values[value] for value in node.body_out]
                return operands
        return oracle_op(node.name, draw, operands, node.attrs)


def run(
    program: EtaProgram,
    reads: Sequence[np.ndarray],
    params: Sequence[np.ndarray],
    cells: Sequence[np.ndarray],
    key: tuple[int, int],
    ordinal: int,
    layers: Sequence[Layer] = (),
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """One pass: results and puts, as `types.Program.apply`; `layers`: what the attention layers show, first to last."""
    walk, draw = _Walk(reads, params, list(cells)), OracleDraw(key, ordinal)
    if program.stages is not None:
        walk.ops(program.stages.prologue, draw)
        for walk.layer, walk.shown in enumerate(layers):
            walk.ops(program.stages.proj, draw.iteration(walk.layer))
            walk.ops(program.stages.attn, draw.iteration(walk.layer))
    walk.ops(program.nodes, draw)
    puts = [walk.puts[i] for i, use in enumerate(program.channels) if use.put]
    return [walk.values[value] for value in program.out], puts
