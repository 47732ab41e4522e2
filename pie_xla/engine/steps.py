"""The pure functions that become executables, and the shapes they are compiled for.

A launch is a chain queued without a sync: `step` (the model; state donated), `rows` (outputs of the passes of one program), `program`
(the author's code; nothing donated, so a failing program cannot take anyone's state with it) and `commit` (results into the device
words; words donated). `fused` is the chain as one function, for programs that have proven themselves, `tapped` the same for those that
look into the layers, which is why they cannot be apart from the step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pie_xla.engine.buckets import Bucket
from pie_xla.engine.packing import Layout, from_words, struct, to_words
from pie_xla.engine.taps import StageTaps
from pie_xla.eta.types import Program, Read
from poem.spec import Batch, StateKind, View

SCATTERED = 64  # words; longer segments are moved whole


@dataclass(frozen=True)
class Compilable:
    """A function with everything `jax.jit(...).lower` needs."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    donate: tuple[int, ...]


class StepShapes:
    """Layouts and functions of one lowered model with its pools' sizes.

    Args:
        lowered: `poem.lower.LoweredModel`.
        units: pages or slots per state group, the dummy included.
        word_count: u32 words of the device register file.
        max_context: longest sequence; decides the width of page tables.
        structs: (params, state) as trees of ShapeDtypeStruct, with shardings where there is a mesh.
    """

    def __init__(
        self, lowered: Any, units: Mapping[str, int], word_count: int, max_context: int, structs: tuple[Any, Any]
    ) -> None:
        self._lowered = lowered
        self._facts = lowered.facts
        self._paged = tuple(g.name for g in lowered.groups if g.kind is StateKind.PAGED)
        self._groups = {g.name: g for g in lowered.groups}
        self._params, self._state = structs
        self._words = struct((word_count,), jnp.uint32)
        self.table_width = -(-max_context // lowered.facts.page_size)
        self.units = dict(units)
        self.views = bool(self._paged) and lowered.views
        attention = lowered.facts.attention
        self.attention_layers = 0 if attention is None else attention.layers
        self.mask_width = -(-self.table_width * lowered.facts.page_size // 32)

    # -- the model step ------------------------------------------------------------------------------------------

    def step_layout(self, bucket: Bucket) -> Layout:
        b, q = bucket.rows, bucket.tokens
        fields: dict[str, tuple[int, ...]] = {
            "tokens": (b, q),
            "source": (b, q),  # word that holds the token, or -1 for a host token
            "starts": (b,),
            "start_word": (b,),  # word that holds the cells before `starts` more were appended, or -1
            "moved": (b,),  # position - cell of the next token
            "places": (b, q),  # position of each token after the set's length
            "counts": (b,),
            "slots_in": (b,),
            "slots_out": (b,),
            "readout": (bucket.readouts,),
        }
        fields |= {f"pages.{name}": (b, self.table_width) for name in self._paged}
        if self.views:
            words = -(-self._facts.page_size // 32)
            fields |= {"bases": (b, self.table_width), "live": (b, self.table_width, words)}
            fields |= {"window": (b,), "sinks": (b,)}
        if bucket.masked:
            fields["mask"] = (b, q, self.mask_width)
        return Layout(fields)

    def _batch(self, bucket: Bucket, words: jax.Array, block: jax.Array) -> tuple[Batch, jax.Array]:
        """-> the launch, bool[B]: rows with a bad token."""
        f = self.step_layout(bucket).unpack(block)
        carried = jax.lax.bitcast_convert_type(words[jnp.maximum(f["source"], 0)], jnp.int32)
        tokens = jnp.where(f["source"] >= 0, carried, f["tokens"])
        place = jnp.arange(bucket.tokens, dtype=jnp.int32)[None, :]  # [1, Q]
        real = place < f["counts"][:, None]
        bad = jnp.any(real & ((tokens < 0) | (tokens >= self._facts.vocab_size)), axis=1)
        counted = jax.lax.bitcast_convert_type(words[jnp.maximum(f["start_word"], 0)], jnp.int32)
        starts = f["starts"] + jnp.where(f["start_word"] >= 0, counted, 0)
        view = None
        if self.views:
            view = View(f["bases"], f["live"], f["window"], f["sinks"], f["mask"] if bucket.masked else None)
        batch = Batch(
            tokens=jnp.clip(tokens, 0, self._facts.vocab_size - 1),
            positions=jnp.where(real, (starts + f["moved"])[:, None] + f["places"], -1),
            starts=starts,
            view=view,
            counts=f["counts"],
            pages={name: f[f"pages.{name}"] for name in self._paged},
            slots_in=f["slots_in"],
            slots_out=f["slots_out"],
            readout=f["readout"],
        )
        return batch, bad

    def _run_step(
        self, bucket: Bucket, params: Any, state: Any, words: jax.Array, block: jax.Array
    ) -> tuple[Any, Any, jax.Array]:
        """-> state, outputs {name: [R, ...]}, faults bool[B + R]: a bad token per row, a non-finite output per readout."""
        batch, bad = self._batch(bucket, words, block)
        state, outputs = self._lowered.step(params, state, batch)
        return state, outputs, self._faults(outputs, bad)

    @staticmethod
    def _faults(outputs: Any, bad: jax.Array) -> jax.Array:
        probe = outputs["hidden"] if "hidden" in outputs else next(iter(outputs.values()))
        broken = ~jnp.isfinite(jnp.sum(probe.astype(jnp.float32), axis=tuple(range(1, probe.ndim))))
        return jnp.concatenate([bad, broken])

    def step(self, bucket: Bucket) -> Compilable:
        def fn(params: Any, state: Any, words: jax.Array, block: jax.Array) -> Any:
            return self._run_step(bucket, params, state, words, block)

        return Compilable(fn, (self._params, self._state, self._words, self.step_layout(bucket).argument), (1,))

    # -- programs ------------------------------------------------------------------------------------------------

    def read_struct(self, read: Read, passes: int) -> jax.ShapeDtypeStruct:
        return struct((passes, *read.shape), read.dtype.numpy)

    def positions_of(self, read: Read) -> int | None:
        """How many readout positions a read spans; None for one position without that axis."""
        suffix, _ = self._facts.outputs[read.name]
        return None if len(read.shape) == len(suffix) else read.shape[0]

    def rows(self, read: Read, readouts: int, passes: int) -> Compilable:
        """(output [R, ...], index i32[P] or [P, positions]) -> [P, ...]: a program's share of the batch's outputs."""
        suffix, dtype = self._facts.outputs[read.name]
        spans = self.positions_of(read)
        index = (passes,) if spans is None else (passes, spans)

        def fn(output: jax.Array, where: jax.Array) -> jax.Array:
            return output[where].astype(read.dtype.numpy)

        return Compilable(fn, (struct((readouts, *suffix), jnp.dtype(dtype)), struct(index, jnp.int32)), ())

    @staticmethod
    def program_layout(program: Program, passes: int) -> Layout:
        fields: dict[str, tuple[int, ...]] = {"key": (passes, 2), "ordinal": (passes,)}
        fields |= {f"param{i}": (passes, kind.size) for i, kind in enumerate(program.params)}
        fields |= {f"cell{i}": (passes,) for i in range(len(program.channels))}
        return Layout(fields)

    @staticmethod
    def _inputs(
        program: Program, passes: int, words: jax.Array, block: jax.Array
    ) -> tuple[list[jax.Array], list[jax.Array], jax.Array, jax.Array]:
        """-> params and cells [P, ...], keys u32[P, 2], ordinals u32[P]."""
        f = StepShapes.program_layout(program, passes).unpack(block)
        key = jax.lax.bitcast_convert_type(f["key"], jnp.uint32)
        ordinal = jax.lax.bitcast_convert_type(f["ordinal"], jnp.uint32)
        params = [jax.vmap(lambda w, k=kind: from_words(w, k))(f[f"param{i}"]) for i, kind in enumerate(program.params)]
        cells = []
        for i, use in enumerate(program.channels):
            offsets = jnp.maximum(f[f"cell{i}"], 0)
            if use.take or use.read:
                span = jax.vmap(lambda at, n=use.type.size: jax.lax.dynamic_slice(words, (at,), (n,)))(offsets)
            else:
                span = jnp.zeros((passes, use.type.size), jnp.uint32)
            cells.append(jax.vmap(lambda w, k=use.type: from_words(w, k))(span))
        return params, cells, key, ordinal

    @staticmethod
    def _left(program: Program, results: Sequence[jax.Array], puts: Sequence[jax.Array]) -> jax.Array:
        """u32[O]: what one pass leaves on the device."""
        kinds = [*program.results, *(use.type for use in program.channels if use.put)]
        parts = [to_words(value, kind) for value, kind in zip([*results, *puts], kinds, strict=True)]
        return jnp.concatenate(parts) if parts else jnp.zeros((0,), jnp.uint32)

    @staticmethod
    def _run_program(
        program: Program, passes: int, reads: Sequence[jax.Array], words: jax.Array, block: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """-> u32[P, O]: results, then puts, as words; and the results alone, which is what the host gets to see."""
        params, cells, key, ordinal = StepShapes._inputs(program, passes, words, block)

        def one(reads: Any, params: Any, cells: Any, key: jax.Array, ordinal: jax.Array) -> jax.Array:
            results, puts = program.apply(reads, params, cells, key, ordinal)
            return StepShapes._left(program, results, puts)

        values = jax.vmap(one)(list(reads), params, cells, key, ordinal)
        return values, values[:, : sum(kind.size for kind in program.results)]

    def program(self, program: Program, passes: int) -> Compilable:
        """(reads, words, block) -> results and puts u32[P, O], results u32[P, R]."""

        def fn(reads: list[jax.Array], words: jax.Array, block: jax.Array) -> tuple[jax.Array, jax.Array]:
            return self._run_program(program, passes, reads, words, block)

        reads = [self.read_struct(read, passes) for read in program.reads]
        return Compilable(fn, (reads, self._words, self.program_layout(program, passes).argument), ())

    @staticmethod
    def segments(program: Program) -> tuple[int, ...]:
        """Word counts of what a pass leaves on the device: its results, then its puts."""
        return (*(kind.size for kind in program.results), *(use.type.size for use in program.channels if use.put))

    def _run_commit(self, sizes: tuple[int, ...], words: jax.Array, values: jax.Array, offsets: jax.Array) -> jax.Array:
        """Put u32[P, O] into the words at i32[P, S]; a negative offset drops its segment."""
        starts = np.cumsum([0, *sizes])
        small = [s for s, n in enumerate(sizes) if n <= SCATTERED]
        if small:
            which = np.concatenate([np.full(sizes[s], s) for s in small])
            within = np.concatenate([np.arange(sizes[s]) for s in small])
            at = offsets[:, which]
            at = jnp.where(at < 0, words.shape[0], at + jnp.asarray(within, jnp.int32)[None, :])
            chosen = values[:, starts[which] + within]
            words = words.at[at.reshape(-1)].set(chosen.reshape(-1), mode="drop")
        for s in (s for s, n in enumerate(sizes) if n > SCATTERED):  # a vocabulary goes as one piece

            def put(i: jax.Array, words: jax.Array, s: int = s) -> jax.Array:
                at, n = offsets[i, s], sizes[s]
                new = jax.lax.dynamic_slice(values, (i, jnp.int32(starts[s])), (1, n))[0]
                old = jax.lax.dynamic_slice(words, (jnp.maximum(at, 0),), (n,))
                return jax.lax.dynamic_update_slice(words, jnp.where(at < 0, old, new), (jnp.maximum(at, 0),))

            words = jax.lax.fori_loop(0, offsets.shape[0], put, words)
        return words

    def commit(self, sizes: tuple[int, ...], passes: int) -> Compilable:
        def fn(words: jax.Array, values: jax.Array, offsets: jax.Array) -> jax.Array:
            return self._run_commit(sizes, words, values, offsets)

        values = struct((passes, sum(sizes)), jnp.uint32)
        return Compilable(fn, (self._words, values, struct((passes, len(sizes)), jnp.int32)), (0,))

    # -- the fused chain -----------------------------------------------------------------------------------------

    def fused(self, program: Program, bucket: Bucket) -> Compilable:
        """step + program + commit where every row of the bucket is one pass of `program`: pass i is row i is readout i."""
        passes = bucket.rows
        sizes = self.segments(program)

        def fn(
            params: Any, state: Any, words: jax.Array, block: jax.Array, program_block: jax.Array, offsets: jax.Array
        ) -> Any:
            state, outputs, faults = self._run_step(bucket, params, state, words, block)
            reads = [outputs[r.name].reshape(passes, *r.shape).astype(r.dtype.numpy) for r in program.reads]
            values, results = self._run_program(program, passes, reads, words, program_block)
            return state, self._run_commit(sizes, words, values, offsets), results, faults

        offsets = struct((passes, len(sizes)), jnp.int32)
        args = (
            self._params,
            self._state,
            self._words,
            self.step_layout(bucket).argument,
            self.program_layout(program, passes).argument,
            offsets,
        )
        return Compilable(fn, args, (1, 2))

    # -- programs with layer stages ------------------------------------------------------------------------------

    @staticmethod
    def tapped_passes(program: Program, bucket: Bucket) -> int:
        """How many passes of a program with layer stages a launch of the bucket takes."""
        return bucket.rows // program.rows

    def reads_layout(self, program: Program, passes: int) -> Layout:
        """Where each pass's reads lie in the launch's outputs."""
        spans = [self.positions_of(read) for read in program.reads]
        return Layout({f"read{i}": (passes,) if n is None else (passes, n) for i, n in enumerate(spans)})

    def tapped(self, program: Program, bucket: Bucket) -> Compilable:
        """step + stages + commit where pass p has the rows from p * program.rows on."""
        passes, sizes, stages = self.tapped_passes(program, bucket), self.segments(program), program.stages
        assert stages is not None
        layout = self.reads_layout(program, passes)

        def fn(
            params: Any,
            state: Any,
            words: jax.Array,
            block: jax.Array,
            program_block: jax.Array,
            where: jax.Array,
            offsets: jax.Array,
        ) -> Any:
            batch, bad = self._batch(bucket, words, block)
            taps = StageTaps(stages, program.rows, passes, self._inputs(program, passes, words, program_block))
            state, outputs, carry = self._lowered.tapped_step(params, state, batch, taps)
            at = layout.unpack(where)
            reads = [outputs[r.name][at[f"read{i}"]].astype(r.dtype.numpy) for i, r in enumerate(program.reads)]
            left = jax.vmap(lambda results, puts: self._left(program, results, puts))
            results, puts = taps.finish(carry, reads)
            values = left(results, puts) if results or puts else jnp.zeros((passes, 0), jnp.uint32)
            shown = values[:, : sum(kind.size for kind in program.results)]
            return state, self._run_commit(sizes, words, values, offsets), shown, self._faults(outputs, bad)

        args = (
            self._params,
            self._state,
            self._words,
            self.step_layout(bucket).argument,
            self.program_layout(program, passes).argument,
            layout.argument,
            struct((passes, len(sizes)), jnp.int32),
        )
        return Compilable(fn, args, (1, 2))

    # -- small moves ---------------------------------------------------------------------------------------------

    def poke(self, count: int) -> Compilable:
        """(words, values i32[n], at i32[n]) -> words: host values into channel cells; a negative place is dropped."""

        def fn(words: jax.Array, values: jax.Array, at: jax.Array) -> jax.Array:
            at = jnp.where(at < 0, words.shape[0], at)
            return words.at[at].set(jax.lax.bitcast_convert_type(values, jnp.uint32), mode="drop")

        span = struct((count,), jnp.int32)
        return Compilable(fn, (self._words, span, span), (0,))

    def settle_length(self) -> Compilable:
        """(words, change i32[8]) -> words: the length of a set after it was shortened by a value on the device.

        `change`: where the length goes; the cells counted before, and the word to add to them or -1; the value, or the word that
        holds it or -1; the most of it that counts; 1 keeps so many of the cells after, 0 keeps so many of all cells; cells evicted.
        """

        def fn(words: jax.Array, change: jax.Array) -> jax.Array:
            into, base, base_word, value, value_word, most, after, moved = change

            def word(at: jax.Array) -> jax.Array:
                return jax.lax.bitcast_convert_type(words[jnp.maximum(at, 0)], jnp.int32)

            base = base + jnp.where(base_word >= 0, word(base_word), 0)
            value = jnp.where(value_word >= 0, word(value_word), value)
            kept = jnp.where(
                after == 1, base + jnp.clip(value, 0, most), jnp.minimum(base, jnp.maximum(value - moved, 0))
            )
            return words.at[into].set(jax.lax.bitcast_convert_type(kept, jnp.uint32))

        return Compilable(fn, (self._words, struct((8,), jnp.int32)), (0,))

    def peek(self, count: int) -> Compilable:
        """(words, at i32[]) -> u32[n]: a channel cell for the host."""

        def fn(words: jax.Array, at: jax.Array) -> jax.Array:
            return jax.lax.dynamic_slice(words, (at,), (count,))

        return Compilable(fn, (self._words, struct((), jnp.int32)), ())

    def copy(self, group: str, count: int) -> Compilable:
        """(pool arrays, source i32[n], target i32[n]) -> pool arrays; pads copy the dummy onto itself."""

        def fn(pool: Any, source: jax.Array, target: jax.Array) -> Any:
            return self._groups[group].copy_units(pool, source, target)

        span = struct((count,), jnp.int32)
        return Compilable(fn, (self._state[group], span, span), (0,))


def power_of_two(n: int, least: int = 1) -> int:
    """The smallest power of two that holds n (and is at least `least`)."""
    return max(least, 1 << max(0, math.ceil(math.log2(max(1, n)))))
