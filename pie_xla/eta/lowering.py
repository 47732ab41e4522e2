"""A checked program as JAX operations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pie_xla.eta import loops
from pie_xla.eta.op import Op
from pie_xla.eta.rng import Draw
from pie_xla.eta.table import TABLE
from pie_xla.eta.types import ChannelUse
from pie_xla.eta.validate import Node

Array = Any


def lower_op(op: Op, draw: Draw, operands: Sequence[Array], attrs: dict[str, Any]) -> tuple[Array, ...]:
    """The results of one op, in order; operands and attributes are checked already."""
    if op.rule.broadcasts:
        rank = max(x.ndim for x in operands)
        operands = [x if x.ndim in (0, rank) else lax.expand_dims(x, range(rank - x.ndim)) for x in operands]
    with jax.named_scope(op.rule.name):
        made = op.lower(draw, *operands, **attrs) if op.rule.random else op.lower(*operands, **attrs)
    return made if isinstance(made, tuple) else (made,)


@dataclass(frozen=True)
class Seen:
    """What the model shows to a layer stage: per row f32[H, d], f32[C] and f32[J]; and the layer, u32[]."""

    layer: Array = None
    queries: Sequence[Array] = ()
    scores: Mapping[int, Array] = field(default_factory=dict)
    bounds: Mapping[int, Array] = field(default_factory=dict)


@dataclass
class Run:
    """Ops being lowered for one pass.

    Args:
        cells: the front cell per channel, or what was taken from it last.
        puts: what is put so far, by channel.
        values: all values so far, by id.
        masks: pages that rows may look at, by row.
    """

    reads: Sequence[Array]
    params: Sequence[Array]
    cells: list[Array]
    puts: dict[int, Array] = field(default_factory=dict)
    values: dict[int, Array] = field(default_factory=dict)
    masks: dict[int, Array] = field(default_factory=dict)

    def ops(self, body: Sequence[Node], draw: Draw, seen: Seen) -> None:
        for node in body:
            self.values.update(zip(node.results, self._op(node, draw, seen), strict=True))

    def _op(self, node: Node, draw: Draw, seen: Seen) -> tuple[Array, ...]:
        at: int = node.attrs.get("i", -1)
        match node.name:
            case "output":
                return (self.reads[at],)
            case "param":
                return (self.params[at],)
            case "read":
                return (self.puts.get(at, self.cells[at]),)
            case "take":
                if at in self.puts:  # what an earlier stage left
                    self.cells[at] = self.puts.pop(at)
                return (self.cells[at],)
            case "put":
                self.puts[at] = self.values[node.operands[0]]
                return ()
            case "layer":
                return (seen.layer,)
            case "query":
                return (seen.queries[at],)
            case "score":
                return (seen.scores[at],)
            case "bound":
                return (seen.bounds[at],)
            case "pages":
                self.masks[at] = self.values[node.operands[0]]
                return ()
            case "fori" | "while":
                return self._loop(node, draw, seen)
            case name:
                return lower_op(TABLE[name], draw, [self.values[v] for v in node.operands], node.attrs)

    def _loop(self, node: Node, draw: Draw, seen: Seen) -> tuple[Array, ...]:
        def inside(body: Sequence[Node], index: Array, carried: tuple[Array, ...]) -> None:
            self.values.update(zip(node.body_ids, (index, *carried), strict=True))
            self.ops(body, draw.iteration(index.astype(jnp.uint32)), seen)

        def test(index: Array, carried: tuple[Array, ...]) -> Array:
            inside(node.test, index, carried)
            return self.values[node.hold]

        def turn(index: Array, carried: tuple[Array, ...]) -> tuple[Array, ...]:
            inside(node.body, index, carried)
            return tuple(self.values[value] for value in node.body_out)

        n: int = node.attrs["n"]
        start = tuple(self.values[value] for value in node.operands)
        return loops.repeat_while(n, test, turn, start) if node.name == "while" else loops.repeat(n, turn, start)


def lower_program(
    nodes: Sequence[Node],
    out: Sequence[int],
    reads: Sequence[Array],
    params: Sequence[Array],
    cells: Sequence[Array],
    key: Array,
    ordinal: Array,
    channels: Sequence[ChannelUse],
) -> tuple[list[Array], list[Array]]:
    """One pass; see `types.Program.apply`."""
    run = Run(reads, params, list(cells))
    run.ops(nodes, Draw(key, ordinal), Seen())
    return [run.values[value] for value in out], [run.puts[i] for i, use in enumerate(channels) if use.put]
