"""A checked program as JAX operations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

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
    inputs = {"output": reads, "param": params, "take": cells, "read": cells}
    puts: dict[int, Array] = {}
    values: dict[int, Array] = {}

    def run(body: Sequence[Node], draw: Draw) -> None:
        for node in body:
            at: int = node.attrs.get("i", -1)
            match node.name:
                case "output" | "param" | "take" | "read":
                    pending = puts.get(at) if node.name == "read" else None
                    made: tuple[Array, ...] = (inputs[node.name][at] if pending is None else pending,)
                case "put":
                    puts[at] = values[node.operands[0]]
                    made = ()
                case "fori":
                    made = loop(node, draw)
                case name:
                    made = lower_op(TABLE[name], draw, [values[v] for v in node.operands], node.attrs)
            values.update(zip(node.results, made, strict=True))

    def loop(node: Node, draw: Draw) -> tuple[Array, ...]:
        def iteration(index: Array, carried: tuple[Array, ...]) -> tuple[Array, ...]:
            values.update(zip(node.body_ids, (index, *carried), strict=True))
            run(node.body, draw.iteration(index.astype(jnp.uint32)))
            return tuple(values[value] for value in node.body_out)

        start = tuple(values[value] for value in node.operands)
        return tuple(lax.fori_loop(jnp.int32(0), jnp.int32(node.attrs["n"]), iteration, start))

    run(nodes, Draw(key, ordinal))
    return [values[value] for value in out], [puts[i] for i, use in enumerate(channels) if use.put]
