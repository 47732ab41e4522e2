"""A model's place in the engine: its facts and sizes, its state, and what launches it."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from pie_xla.engine.api import EngineOptions, LoadedModel
from pie_xla.engine.buckets import Bucket, Buckets
from pie_xla.engine.device_words import DeviceWords
from pie_xla.engine.executables import ExecutableStore, ExecutableTable
from pie_xla.engine.fusion import FusionService
from pie_xla.engine.launcher import Launcher
from pie_xla.engine.memory import StatePlan
from pie_xla.engine.packing import struct
from pie_xla.engine.programs import ProgramEntry, ProgramTable
from pie_xla.engine.sharing import SharedPrefixes
from pie_xla.engine.state import SetState, StateLedger
from pie_xla.engine.steps import StepShapes
from pie_xla.errors import PieError
from poem.spec import StateGroup

if TYPE_CHECKING:
    from pie_xla.engine.records import WorkingSet


_BUILDING = threading.Semaphore(2)  # loading a step takes 60 MB for a while, compiling one 200


class Served:
    """One model of an engine. Programs, pages and executables are its own; the device words are everybody's.

    Args:
        plan: the sizes of its state pools.
        store: directory of serialized executables, or None.
        words: the device words; None for the first model, which makes them.
        changed: called from any thread when an executable has become ready.

    Attributes:
        flights: plans of this model in flight.
        step_seconds: how long a plan takes, a moving mean.
        starved: passes that wait for its memory -> since when.
    """

    def __init__(
        self,
        model: LoadedModel,
        options: EngineOptions,
        plan: StatePlan,
        store: Path | None,
        words: DeviceWords | None,
        changed: Callable[[], None],
    ) -> None:
        self.model = model
        self.name = model.name
        self.plan = plan
        self.facts = model.lowered.facts
        self.vocab_size: int = self.facts.vocab_size
        self.stateful = bool(model.lowered.groups)
        self.max_context = min(self.facts.max_context, options.max_context or self.facts.max_context)
        self._changed = changed
        self.buckets = Buckets(options)
        self.max_rows = self.buckets.max_rows
        self.chunk = self.buckets.chunk
        structs = _structs(model, plan.units)
        self.shapes = StepShapes(model.lowered, plan.units, options.word_count, self.max_context, structs)
        pools = ",".join(f"{name}={n}" for name, n in plan.units.items())
        engine_key = f"{model.key}|{pools}|{options.word_count}|{self.max_context}"
        executables = ExecutableStore(store, engine_key, _devices(model), options.store_bytes)
        self.table = ExecutableTable(executables)
        self.programs = ProgramTable(self.shapes, self.buckets, self.table, options, changed)
        self.ledger = StateLedger(model.lowered.groups, plan.units, self.facts.page_size)
        self.prefixes = SharedPrefixes(self.ledger, options.prefix_cache and not options.strict)
        self.words = words or DeviceWords(options.word_count, self.shapes, self.table)
        self.launcher = Launcher(self.shapes, self.table, self.programs, structs[1], self.words)
        self.fusion = FusionService(model.recipe, executables, plan.units, options, self.max_context, self._fused)
        self.programs.compile_apart = self.fusion.tapped
        self.recurrent = self.ledger.slots is not None
        self.windowed = bool(self.ledger.windows)
        self.views = self.shapes.views
        self.flights = 0
        self.step_seconds = 0.0
        self.starved: dict[int, float] = {}

    # -- life ----------------------------------------------------------------------------------------------------

    def wish(self, soon: Sequence[tuple[int, int]]) -> None:
        """Compile the steps of these (rows, tokens) in the background."""
        for bucket in self.buckets.all:
            if (bucket.rows, bucket.tokens) in set(soon):
                self.programs.wish_step(bucket)

    def builders(self, warm: Sequence[tuple[int, int]]) -> list[threading.Thread]:
        """Threads that build the steps of these (rows, tokens); `check` says afterwards whether they have."""
        wanted = [b for b in self.buckets.all if (b.rows, b.tokens) in set(warm)]
        return [threading.Thread(target=self._build, args=(b,), name="pie-compile") for b in wanted]

    def _build(self, bucket: Bucket) -> None:
        try:
            with _BUILDING:
                self.programs.build_step(bucket)
        except Exception as error:
            self.programs.failed_steps[bucket] = str(error)

    def check(self, warm: Sequence[tuple[int, int]]) -> None:
        for bucket, reason in self.programs.failed_steps.items():
            if (bucket.rows, bucket.tokens) in set(warm):
                raise PieError(f"the step {bucket} of {self.name} does not compile: {reason}")

    def close(self) -> None:
        self.programs.close()
        self.fusion.close()

    def _fused(self, entry: ProgramEntry, bucket: Bucket, ok: bool) -> None:
        """A compile process has finished (on its watcher's thread): take its executable over."""
        key = self.programs.fused_key(entry.program, bucket)
        if ok:
            self.programs.hold(entry, key)
            if self.table.adopt(key):
                entry.fused.add(bucket)

    # -- what a pass or a call may ask of it -----------------------------------------------------------------------

    def new_state(self) -> SetState:
        return self.ledger.new()

    def cannot_truncate(self, target: WorkingSet, n: int) -> str | None:
        if self.recurrent and n not in (0, target.submitted):
            return "a recurrent state cannot be undone: fork the set before the tokens you may take back"
        for name, window in self.ledger.windows.items():
            if n in (0, target.submitted):
                continue
            # what will have been let go once all calls so far have run
            last = self.ledger.window_start(target.submitted, window) * self.facts.page_size
            floor = max(self.ledger.floor(target.state, name), last)
            if n - window < floor:
                return f"truncate({n}) needs positions before {floor}, which the sliding window of group '{name}' has let go"
        return None

    def cannot_evict(self, spans: Sequence[tuple[int, int]]) -> str | None:
        size = self.facts.page_size
        if not self.views and (self.windowed or any(begin % size or end % size for begin, end in spans)):
            return f"on this backend evict takes whole pages of {size} positions, of models without window layers"
        return None

    def check_launch(self, rows: int, tokens: int, readouts: int) -> None:
        """Refuse a pass whose last launch, of `tokens` tokens in each of its rows, no bucket holds."""
        if not self.buckets.fitting(rows, tokens, readouts):
            raise PieError(
                f"the last launch of this pass would take {tokens} tokens in each of {rows} rows; "
                f"the largest launches are {', '.join(map(str, self.buckets.prefill))} (rows x tokens)",
                "read out fewer positions, or use a pass per row",
            )

    def check_length(self, row: int, length: int) -> None:
        if length > self.max_context:
            raise PieError(
                f"row {row} would be {length} tokens long; the model's context is {self.max_context}",
                "shorten the prompt, or truncate the set",
            )
        if self.stateful and not self.ledger.fits(self.ledger.most(length), empty=True):
            held = self.plan.tokens
            raise PieError(
                f"row {row} would be {length} tokens long; all state memory holds {held}", "raise [engine] kv_memory"
            )

    # -- facts -----------------------------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Counters and accounts, as plain data."""
        return {
            "memory": self.ledger.balance(),
            "cached": self.ledger.cached(),
            "prefix tokens": self.prefixes.tree.hits,
            "compiled": Counter(self.table.compiled),
            "loaded": Counter(self.table.loaded),
            "misses": Counter(self.table.misses),
            "build seconds": self.table.seconds,
            "programs": len(self.programs.entries()),
            "evicted programs": self.programs.evicted,
            "executables": len(self.table.keys()),
            "step seconds": self.step_seconds,
        }


def _devices(model: LoadedModel) -> list[jax.Device]:
    """The devices that hold the weights, in order."""
    place = model.lowered.place
    if place is None:
        return [jax.devices()[0]]
    leaf = next(iter(model.lowered.params.values()))
    return sorted(place(leaf).device_set, key=lambda device: device.id)


def _structs(model: LoadedModel, units: dict[str, int]) -> tuple[Any, Any]:
    """(params, state) as ShapeDtypeStructs, with their shardings where there is a mesh."""
    place = model.lowered.place
    params = {
        name: struct(leaf.shape, leaf.struct.dtype, place(leaf) if place else None)
        for name, leaf in model.lowered.params.items()
    }

    def state(group: StateGroup) -> dict[str, Any]:
        leaves = group.arrays(units[group.name])
        return {
            name: struct(leaf.shape, leaf.struct.dtype, place(leaf) if place else None) for name, leaf in leaves.items()
        }

    return params, {group.name: state(group) for group in model.lowered.groups}
