"""A whole program in NumPy, op by op: the meaning that the lowering is tested against."""

from __future__ import annotations

from collections.abc import Sequence
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


def run(
    program: EtaProgram,
    reads: Sequence[np.ndarray],
    params: Sequence[np.ndarray],
    cells: Sequence[np.ndarray],
    key: tuple[int, int],
    ordinal: int,
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """One pass: results and puts, as `types.Program.apply`."""
    values: dict[int, np.ndarray] = {}
    puts: dict[int, np.ndarray] = {}

    def step(node: Node, draw: OracleDraw) -> list[np.ndarray]:
        operands = [values[value] for value in node.operands]
        at = node.attrs.get("i", 0)
        if node.name == "output":
            return [reads[at]]
        if node.name == "param":
            return [params[at]]
        if node.name == "put":
            puts[at] = operands[0]
            return []
        if node.name in ("take", "read"):
            return [puts[at] if node.name == "read" and at in puts else cells[at]]
        if node.name != "fori":
            return oracle_op(node.name, draw, operands, node.attrs)
        for index in range(node.attrs["n"]):
            values.update(zip(node.body_ids, [np.asarray(index, np.int32), *operands], strict=True))
            walk(node.body, draw.iteration(index))
            operands = [values[value] for value in node.body_out]
        return operands

    def walk(nodes: Sequence[Node], draw: OracleDraw) -> None:
        for node in nodes:
            made = step(node, draw)
            values.update(zip(node.results, made, strict=True))

    walk(program.nodes, OracleDraw(key, ordinal))
    return [values[value] for value in program.out], [puts[i] for i, use in enumerate(program.channels) if use.put]
