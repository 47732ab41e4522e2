"""The device side of the engine: owns weights, state pools and words, packs a launch and queues its executables without a sync."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pie_xla.engine.buckets import Bucket
from pie_xla.engine.device_words import DeviceWords
from pie_xla.engine.executables import ExecutableTable, Key
from pie_xla.engine.packing import words_of
from pie_xla.engine.programs import ProgramEntry, ProgramTable
from pie_xla.engine.records import Pass
from pie_xla.engine.sights import NO_WINDOW
from pie_xla.engine.state import Copy, StateLedger
from pie_xla.engine.steps import StepShapes, power_of_two

COPIES = 4  # pages copied at once: every count is made of planned sizes


@dataclass(frozen=True)
class RowInput:
    """One row of a launch, with everything the host knows about it.

    Attributes:
        tokens: host tokens of this launch, or None.
        source: word offset of the first token when they are on the device, or -1.
        start: cells in the set before; `start_word`: the word that holds the number to add to it, or -1.
        moved: position of the next token - its cell.
        places: position of each token after the set's length; None: one after the other.
        bases, live: per page of the set, the position of its first cell, and its cells that may be seen as bits.
        window, sinks: positions seen: the last `window`, and those below `sinks`.
        mask: i32[count, words], a bit per token and cell, or None.
        slots: recurrent slot read and written.
        readout: indices within this launch's tokens.
    """

    tokens: np.ndarray | None
    source: int
    count: int
    start: int
    pages: Mapping[str, Sequence[int]]
    slots: tuple[int, int]
    readout: tuple[int, ...]
    start_word: int = -1
    moved: int = 0
    places: np.ndarray | None = None
    bases: Sequence[int] = ()
    live: Sequence[int] = ()
    window: int = NO_WINDOW
    sinks: int = 0
    mask: np.ndarray | None = None


@dataclass(frozen=True)
class ProgramInput:
    """One pass whose epilogue runs in this launch.

    Attributes:
        first_rows: the index in the launch of each of its rows.
        positions: per row, its readout positions in the launch's outputs.
        cells: word offset of each channel's front cell (-1 where nothing is taken).
        leaves: word offsets of its results, then of its puts.
    """

    item: Pass
    first_rows: tuple[int, ...]
    positions: tuple[tuple[int, ...], ...]
    cells: tuple[int, ...]
    leaves: tuple[int, ...]


@dataclass
class Group:
    """Passes of one program in one executable call; `values` is u32[P, R] on the device: what leaves it, not what is put."""

    entry: ProgramEntry
    inputs: list[ProgramInput]
    values: Any


@dataclass
class Flight:
    """A launch on its way: what to read when it lands."""

    bucket: Bucket
    inputs: list[ProgramInput]
    faults: Any
    groups: list[Group]
    fused: bool


class Launcher:
    """Queues launches on the device.

    Args:
        shapes, table, programs: what to call.
        structs: the state pools to make, with their shardings.
        device: the words of all models.
    """

    def __init__(
        self,
        shapes: StepShapes,
        table: ExecutableTable,
        programs: ProgramTable,
        structs: Any,
        device: DeviceWords,
    ) -> None:
        self._shapes = shapes
        self._table = table
        self._programs = programs
        self.params: dict[str, Any] = {}  # set before the first launch
        self._structs = structs
        self._device = device
        self.state: Any = {}

    def rebuild(self) -> None:
        """Fresh, zeroed state: at start, and after a failed step has taken it along."""
        self.state = jax.tree.map(_zeros, self._structs)

    @property
    def lost(self) -> bool:
        """Whether a failed executable has consumed the donated state."""
        return any(leaf.is_deleted() for leaf in jax.tree.leaves(self.state))

    def sound(self) -> bool:
        """Whether the state can be read; waits for the device."""
        try:
            jax.block_until_ready(self.state)
        except Exception:
            return False
        return True

    # -- launching -----------------------------------------------------------------------------------------------

    def launch(self, bucket: Bucket, rows: list[RowInput], inputs: list[ProgramInput], tapped: bool = False) -> Flight:
        """Queue a launch. `tapped`: all its passes are of one program with layer stages."""
        layout = self._shapes.step_layout(bucket)
        block, f = layout.buffer()
        f["source"].fill(-1)
        f["start_word"].fill(-1)
        f["places"][:] = np.arange(bucket.tokens)
        readouts = 0
        for i, row in enumerate(rows):
            n = row.count
            if row.tokens is not None:
                f["tokens"][i, :n] = row.tokens
            else:
                f["source"][i, :n] = np.arange(row.source, row.source + n)
            f["starts"][i] = row.start
            f["start_word"][i] = row.start_word
            f["moved"][i] = row.moved
            if row.places is not None:
                f["places"][i, :n] = row.places
            if self._shapes.views:
                self._fill_view(f, i, row)
            if bucket.masked:
                width = f["mask"].shape[2] if row.mask is None else row.mask.shape[1]
                f["mask"][i, :n, :width] = -1 if row.mask is None else row.mask
            f["counts"][i] = n
            f["slots_in"][i], f["slots_out"][i] = row.slots
            for name, table in row.pages.items():
                f[f"pages.{name}"][i, : len(table)] = table
            for index in row.readout:
                f["readout"][readouts] = i * bucket.tokens + index
                readouts += 1
        if tapped:
            return self._launch_tapped(inputs[0].item.entry, bucket, block, inputs)
        entry = self._fusable(bucket, inputs)
        if entry is not None:
            return self._launch_fused(entry, bucket, block, inputs)
        step = self._table.build_on_step_path(self._programs.step_key(bucket), lambda: self._shapes.step(bucket))
        self.state, outputs, faults = step(self.params, self.state, self._device.array, block)
        faults.copy_to_host_async()
        groups = [
            group
            for entry, members in _by_program(inputs)
            for group in self._launch_program(entry, members, bucket, outputs)
        ]
        return Flight(bucket, inputs, faults, groups, False)

    def _fill_view(self, f: dict[str, np.ndarray], i: int, row: RowInput) -> None:
        pages = len(row.bases)
        f["bases"][i, :pages] = row.bases
        live = np.asarray(row.live, object if f["live"].shape[2] > 1 else np.int64)
        for word in range(f["live"].shape[2]):
            f["live"][i, :pages, word] = (live >> 32 * word & 0xFFFFFFFF).astype(np.uint32).view(np.int32)
        f["window"][i], f["sinks"][i] = row.window, row.sinks

    def _fusable(self, bucket: Bucket, inputs: list[ProgramInput]) -> ProgramEntry | None:
        """The program whose fused step may serve this launch: it is alone, and pass i is row i."""
        if not inputs or bucket.readouts != bucket.rows:
            return None
        entry = inputs[0].item.entry
        alone = all(p.item.entry is entry and p.positions == ((i,),) for i, p in enumerate(inputs))
        return entry if alone and bucket in entry.fused else None

    def _launch_fused(
        self, entry: ProgramEntry, bucket: Bucket, block: np.ndarray, inputs: list[ProgramInput]
    ) -> Flight:
        fused = self._table.planned(self._programs.fused_key(entry.program, bucket))
        program_block, offsets = self._pack_program(entry, inputs, bucket.rows)
        self.state, self._device.array, values, faults = fused(
            self.params, self.state, self._device.array, block, program_block, offsets
        )
        values.copy_to_host_async()
        faults.copy_to_host_async()
        return Flight(bucket, inputs, faults, [Group(entry, inputs, values)], True)

    def _launch_tapped(
        self, entry: ProgramEntry, bucket: Bucket, block: np.ndarray, inputs: list[ProgramInput]
    ) -> Flight:
        program = entry.program
        run = self._table.planned(self._programs.tapped_key(program, bucket))
        passes = self._shapes.tapped_passes(program, bucket)
        program_block, offsets = self._pack_program(entry, inputs, passes)
        where, f = self._shapes.reads_layout(program, passes).buffer()
        for p, member in enumerate(inputs):
            for i, read in enumerate(program.reads):
                at = member.positions[read.row]
                f[f"read{i}"][p] = at[-1] if self._shapes.positions_of(read) is None else at
        self.state, self._device.array, values, faults = run(
            self.params, self.state, self._device.array, block, program_block, where, offsets
        )
        values.copy_to_host_async()
        faults.copy_to_host_async()
        self._programs.tapped_launched(entry, bucket)
        return Flight(bucket, inputs, faults, [Group(entry, inputs, values)], True)

    def _launch_program(
        self, entry: ProgramEntry, members: list[ProgramInput], bucket: Bucket, outputs: Any
    ) -> list[Group]:
        program = entry.program
        if not (program.results or program.channels):
            return []
        groups = []
        while members:
            passes = _size(entry, len(members), bucket.readouts)
            best = next((n for n in self._sizes(bucket) if n >= len(members)), passes)
            if best != passes and best not in entry.sizes:
                self._programs.wish(entry, best)
            part, members = members[:passes], members[passes:]
            run = self._table.planned(Key("program", program.key, str(passes)))
            reads = [self._select(read, part, passes, bucket, outputs) for read in program.reads]
            block, offsets = self._pack_program(entry, part, passes)
            values, results = run(reads, self._device.array, block)
            results.copy_to_host_async()
            sizes = self._shapes.segments(program)
            if sizes:
                build = partial(self._shapes.commit, sizes, passes)
                commit = self._small(self._programs.commit_key(sizes, passes), build)
                self._device.array = commit(self._device.array, values, offsets)
            groups.append(Group(entry, part, results))
        return groups

    def _sizes(self, bucket: Bucket) -> list[int]:
        """Pass counts worth compiling for a bucket: the planned ones, and its own row count (whose outputs need no selection)."""
        return sorted({bucket.rows, *(b.rows for b in self._programs.ready_steps if b.rows <= bucket.rows)})

    def _select(self, read: Any, part: list[ProgramInput], passes: int, bucket: Bucket, outputs: Any) -> Any:
        """[P, ...] of one output: the output itself where pass i reads position i, else a selection."""
        spans = self._shapes.positions_of(read)
        where = np.zeros((passes,) if spans is None else (passes, spans), np.int32)
        for i, member in enumerate(part):
            positions = member.positions[read.row]
            where[i] = positions[-1] if spans is None else positions
        output = outputs[read.name]
        whole = spans is None and passes == bucket.readouts and output.dtype == read.dtype.numpy
        if whole and all(where[i] == i for i in range(len(part))):
            return output
        key = self._programs.rows_key(read, bucket.readouts, passes)
        return self._small(key, lambda: self._shapes.rows(read, bucket.readouts, passes))(output, where)

    def _pack_program(
        self, entry: ProgramEntry, part: list[ProgramInput], passes: int
    ) -> tuple[np.ndarray, np.ndarray]:
        program = entry.program
        block, f = self._shapes.program_layout(program, passes).buffer()
        offsets = np.full((passes, len(self._shapes.segments(program))), -1, np.int32)
        for i, member in enumerate(part):
            item = member.item
            f["key"][i] = np.array(item.pipeline.seed, np.uint32).view(np.int32)
            f["ordinal"][i] = np.uint32(item.ordinal & 0xFFFFFFFF).view(np.int32)
            for k, (kind, value) in enumerate(zip(program.params, item.params, strict=True)):
                f[f"param{k}"][i] = words_of(value, kind)
            for k, cell in enumerate(member.cells):
                f[f"cell{k}"][i] = cell
            offsets[i] = member.leaves
        return block, offsets

    # -- small moves ---------------------------------------------------------------------------------------------

    def copy_pages(self, copies: list[Copy]) -> None:
        for group in {c.group for c in copies}:
            mine = [c for c in copies if c.group == group]
            for first in range(0, len(mine), COPIES):
                part = mine[first : first + COPIES]
                n = power_of_two(len(part))
                source, target = np.zeros(n, np.int32), np.zeros(n, np.int32)
                source[: len(part)] = [c.source for c in part]
                target[: len(part)] = [c.target for c in part]
                run = self._small(Key("copy", "", f"{group}:{n}"), lambda g=group, n=n: self._shapes.copy(g, n))
                self.state = {**self.state, group: run(self.state[group], source, target)}

    def _small(self, key: Key, work: Any) -> Any:
        return self._table.build_on_step_path(key, work)

    def warm(self, ledger: StateLedger) -> list[tuple[Key, Any]]:
        """The small moves every model needs: (key, work) to build before serving."""
        moves: list[tuple[Key, Any]] = []
        for group in ledger.paged:
            for n in (1, 2, COPIES):
                moves.append((Key("copy", "", f"{group}:{n}"), lambda g=group, n=n: self._shapes.copy(g, n)))
        return moves


def _zeros(struct: jax.ShapeDtypeStruct) -> Any:
    zeros = jnp.zeros(struct.shape, struct.dtype)
    return zeros if struct.sharding is None else jax.device_put(zeros, struct.sharding)


def _by_program(inputs: list[ProgramInput]) -> list[tuple[ProgramEntry, list[ProgramInput]]]:
    groups: dict[str, tuple[ProgramEntry, list[ProgramInput]]] = {}
    for member in inputs:
        entry = member.item.entry
        groups.setdefault(entry.program.key, (entry, []))[1].append(member)
    return list(groups.values())


def _size(entry: ProgramEntry, n: int, readouts: int) -> int:
    """The compiled pass count to use for n passes of a launch: the smallest that holds them all, else the largest there is.

    No size beyond the launch's readouts is used: their selections are not planned. One pass always fits.
    """
    planned = [size for size in entry.sizes if size <= readouts]
    enough = [size for size in planned if size >= n]
    return min(enough) if enough else max(planned)
