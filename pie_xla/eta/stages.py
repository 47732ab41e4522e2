"""The attention-layer part of a recorded program: its ops by stage, and their lowering."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax

from pie_xla.eta.lowering import Run, Seen
from pie_xla.eta.rng import Draw
from pie_xla.eta.types import Arrays, ChannelUse
from pie_xla.eta.validate import Node, Shape, Use


@dataclass(frozen=True)
class Register:
    """A channel that the prologue or a layer stage puts to. `left`: whether the last layer leaves a value there, or has taken it."""

    channel: int
    left: bool


def registers_of(uses: Sequence[Use]) -> tuple[Register, ...]:
    """Asked between the layer stages and the epilogue."""
    return tuple(Register(i, use.put) for i, use in enumerate(uses) if use.early)


@dataclass(frozen=True, eq=False)
class EtaStages:
    """Implements `types.LayerStages`."""

    shape: Shape
    prologue: tuple[Node, ...]
    proj: tuple[Node, ...]
    attn: tuple[Node, ...]
    epilogue: tuple[Node, ...]
    out: tuple[int, ...]
    channels: tuple[ChannelUse, ...]
    registers: tuple[Register, ...]
    scored: tuple[int, ...]
    bounded: tuple[int, ...]
    masked: tuple[int, ...]

    @property
    def heads(self) -> tuple[int, int]:
        return self.shape.heads, self.shape.head_dim

    @property
    def width(self) -> int:
        return self.shape.width

    @property
    def page(self) -> int:
        return self.shape.page

    @property
    def cost(self) -> int:
        return sum(node.cost for node in (*self.proj, *self.attn))

    def start(
        self, params: Sequence[jax.Array], cells: Sequence[jax.Array], key: jax.Array, ordinal: jax.Array
    ) -> tuple[Arrays, Arrays]:
        """See `types.LayerStages.start`."""
        run = Run((), params, list(cells))
        run.ops(self.prologue, Draw(key, ordinal), Seen())
        values = [run.values[value] for node in self.prologue for value in node.results]
        return values, self._registers(run)

    def projected(
        self,
        values: Sequence[jax.Array],
        registers: Sequence[jax.Array],
        layer: jax.Array,
        queries: Sequence[jax.Array],
        bounds: Sequence[jax.Array],
        params: Sequence[jax.Array],
        cells: Sequence[jax.Array],
        key: jax.Array,
        ordinal: jax.Array,
    ) -> tuple[Arrays, Arrays]:
        """See `types.LayerStages.projected`."""
        seen = Seen(layer, queries, bounds=dict(zip(self.bounded, bounds, strict=True)))
        run = self._run(values, registers, params, cells)
        run.ops(self.proj, Draw(key, ordinal).iteration(layer), seen)
        return self._registers(run), [run.masks[row] for row in self.masked]

    def attended(
        self,
        values: Sequence[jax.Array],
        registers: Sequence[jax.Array],
        layer: jax.Array,
        queries: Sequence[jax.Array],
        scores: Sequence[jax.Array],
        params: Sequence[jax.Array],
        cells: Sequence[jax.Array],
        key: jax.Array,
        ordinal: jax.Array,
    ) -> Arrays:
        """See `types.LayerStages.attended`."""
        seen = Seen(layer, queries, scores=dict(zip(self.scored, scores, strict=True)))
        run = self._run(values, registers, params, cells)
        run.ops(self.attn, Draw(key, ordinal).iteration(layer), seen)
        return self._registers(run)

    def finish(
        self,
        values: Sequence[jax.Array],
        registers: Sequence[jax.Array],
        reads: Sequence[jax.Array],
        params: Sequence[jax.Array],
        cells: Sequence[jax.Array],
        key: jax.Array,
        ordinal: jax.Array,
    ) -> tuple[Arrays, Arrays]:
        """See `types.LayerStages.finish`."""
        run = self._run(values, registers, params, cells)
        run.reads = reads
        run.puts |= {r.channel: run.cells[r.channel] for r in self.registers if r.left}
        run.ops(self.epilogue, Draw(key, ordinal), Seen())
        puts = [run.puts[i] for i, use in enumerate(self.channels) if use.put]
        return [run.values[value] for value in self.out], puts

    def _run(
        self,
        values: Sequence[jax.Array],
        registers: Sequence[jax.Array],
        params: Sequence[jax.Array],
        cells: Sequence[jax.Array],
    ) -> Run:
        """Registers stand in the channels' cells: what a layer stage takes or reads is what the one before has put."""
        held = list(cells)
        for register, value in zip(self.registers, registers, strict=True):
            held[register.channel] = value
        run = Run((), params, held)
        made = (value for node in self.prologue for value in node.results)
        run.values.update(zip(made, values, strict=True))
        return run

    def _registers(self, run: Run) -> Arrays:
        """What is pending in each channel, or the front cell."""
        return [run.puts[i] if i in run.puts else run.cells[i] for i in (r.channel for r in self.registers)]
