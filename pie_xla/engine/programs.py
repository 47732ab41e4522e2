"""Programs the engine knows: admitted once, compiled off the step path, counted, fused when hot, forgotten when long unused."""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from pie_xla.engine.api import EngineOptions
from pie_xla.engine.buckets import Bucket, Buckets
from pie_xla.engine.executables import ExecutableTable, Key
from pie_xla.engine.memory import return_free_memory
from pie_xla.engine.steps import StepShapes
from pie_xla.errors import PieError
from pie_xla.eta.types import ChannelUse, Program, Read, TensorType

WISHES_BEFORE_COMPILE = 2  # a size asked for once may never come again
NICE = 10
COMPILE_STACK = 64 << 20  # XLA's passes recurse deeper than a default thread allows


class NoProgram:
    """The epilogue of a pass without one: it reads nothing and returns nothing."""

    key = "none"
    rows = 1
    reads: tuple[Read, ...] = ()
    params: tuple[TensorType, ...] = ()
    channels: tuple[ChannelUse, ...] = ()
    results: tuple[TensorType, ...] = ()
    scalar_result = False
    cost = 0
    memory = 0
    source = ""
    stages = None

    def apply(
        self, reads: Sequence[Any], params: Sequence[Any], cells: Sequence[Any], key: Any, ordinal: Any
    ) -> tuple[list[Any], list[Any]]:
        return [], []


@dataclass(eq=False)
class ProgramEntry:
    """A program with its executables' progress. `sizes` are the pass counts it is compiled for, `keys` the executables it holds."""

    program: Program
    sizes: frozenset[int] = frozenset()
    refused: str | None = None
    wishes: Counter[int] = field(default_factory=Counter)
    pending: set[int] = field(default_factory=set)
    barred: set[int] = field(default_factory=set)
    full: Counter[Bucket] = field(default_factory=Counter)  # launches that it filled alone, per bucket
    fused: set[Bucket] = field(default_factory=set)
    fusing: set[Bucket] = field(default_factory=set)
    keys: set[Key] = field(default_factory=set)
    tapped: frozenset[Bucket] = frozenset()  # of a program with layer stages: the launches it is compiled for
    tapping: set[Bucket] = field(default_factory=set)

    @property
    def ready(self) -> bool:
        """Whether its passes may be planned; those with layer stages choose among `tapped` then."""
        return bool(self.sizes) or self.program.stages is not None


class ProgramTable:
    """key -> entry, with compile threads. `changed` is called from those whenever something became ready.

    The table holds the `max_programs` entries that were asked for last. Those before live as long as a pass of theirs does; then their
    executables go, unless another program holds them too, and come back from disk.
    """

    def __init__(
        self,
        shapes: StepShapes,
        buckets: Buckets,
        table: ExecutableTable,
        options: EngineOptions,
        changed: Callable[[], None],
    ) -> None:
        self._shapes = shapes
        self._buckets = buckets
        self._table = table
        self._options = options
        self._changed = changed
        self._recent: OrderedDict[str, ProgramEntry] = OrderedDict()
        self._alive: weakref.WeakValueDictionary[str, ProgramEntry] = weakref.WeakValueDictionary()
        self._holders: Counter[Key] = Counter()
        self.evicted = 0
        self.compile_apart: Callable[[Program, Bucket], None] | None = None
        self._launched: OrderedDict[Key, tuple[weakref.ref[ProgramEntry], Bucket]] = OrderedDict()
        self._closed = False
        self._lock = threading.RLock()  # an entry may die, and be forgotten, in a thread that holds it
        self._publishing = threading.Lock()  # a size and a step that become ready at once must know of each other
        self._queued = 0  # in the pool, the ones that run included
        self._pending_steps: set[Bucket] = set()
        self.ready_steps: frozenset[Bucket] = frozenset()
        self.failed_steps: dict[Bucket, str] = {}
        before = threading.stack_size(COMPILE_STACK)
        self._pool = ThreadPoolExecutor(2, thread_name_prefix="pie-compile", initializer=_step_back)
        # Steps with layer stages take long: whoever has a new epilogue does not wait behind them.
        self._long = ThreadPoolExecutor(2, thread_name_prefix="pie-compile-stages", initializer=_step_back)
        for _ in range(2):  # threads take their stack size when they start
            self._pool.submit(lambda: None)
            self._long.submit(lambda: None)
        threading.stack_size(before)

    def close(self) -> None:
        self._closed = True
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._long.shutdown(wait=False, cancel_futures=True)

    def _background(self, work: Callable[..., None], *args: Any) -> None:
        with self._lock:
            self._queued += 1
        self._pool.submit(self._work, work, *args)

    def _work(self, work: Callable[..., None], *args: Any) -> None:
        try:
            work(*args)
        finally:
            with self._lock:
                self._queued -= 1
                last = not self._queued
            if last:
                return_free_memory()

    def entry(self, program: Program) -> ProgramEntry:
        """Admit a program; its first executable is compiled in the background.

        Raises:
            PieError: its static cost or memory is beyond what one step may take, because XLA cannot preempt a running step.
        """
        with self._lock:
            found = self._alive.get(program.key)
            if found is not None:
                self._keep(found)
                return found
            cost = program.cost
            if program.stages is not None:
                cost += program.stages.cost * (self._shapes.attention_layers - 1)
            if cost > self._options.max_program_cost:
                raise PieError(
                    f"the epilogue at {program.source} needs {cost:,} element operations a pass; "
                    f"{self._options.max_program_cost:,} are allowed",
                    "shorten its loops: a running step cannot be interrupted, so everyone would wait for it",
                )
            if program.memory > self._options.max_program_bytes:
                raise PieError(
                    f"the epilogue at {program.source} needs {program.memory / 2**20:,.0f} MiB; "
                    f"{self._options.max_program_bytes / 2**20:,.0f} MiB are allowed",
                    "use smaller intermediate arrays",
                )
            entry = self._alive[program.key] = ProgramEntry(program)
            weakref.finalize(entry, self._forget, entry.keys).atexit = False
            self._keep(entry)
        if program.stages is None:
            self._request(entry, 1)
        else:
            self.wish_tapped(entry, self._buckets.fitting(program.rows, 1, program.rows)[0])
        return entry

    def _keep(self, entry: ProgramEntry) -> None:
        """It is the one asked for last; called with the lock."""
        self._recent[entry.program.key] = entry
        self._recent.move_to_end(entry.program.key)
        while len(self._recent) > self._options.max_programs:
            self._recent.popitem(last=False)
            self.evicted += 1

    def hold(self, entry: ProgramEntry, key: Key) -> None:
        """Keep an executable, about to be built, as long as the entry lives."""
        with self._lock:
            if key not in entry.keys:
                entry.keys.add(key)
                self._holders[key] += 1

    def _forget(self, keys: set[Key]) -> None:
        """An entry has died: its executables go, unless others hold them."""
        with self._lock:
            for key in keys:
                self._holders[key] -= 1
                if not self._holders[key]:
                    del self._holders[key]
                    self._table.discard(key)

    def wish(self, entry: ProgramEntry, passes: int) -> None:
        """A launch would have liked an executable for `passes` passes."""
        if passes in entry.sizes or passes in entry.pending or passes in entry.barred:
            return
        entry.wishes[passes] += 1
        if entry.wishes[passes] >= WISHES_BEFORE_COMPILE:
            self._request(entry, passes)

    def _request(self, entry: ProgramEntry, passes: int) -> None:
        if passes in entry.pending:
            return
        entry.pending.add(passes)
        self._background(self._build, weakref.ref(entry), passes)

    def _build(self, asked: weakref.ref[ProgramEntry], passes: int) -> None:
        entry = asked()
        if entry is None:  # evicted, and nobody waits for it any more
            return
        try:
            self.build(entry, passes)
        except Exception as error:  # the author's code did not compile: their pass fails with the reason, nobody else's
            entry.barred.add(passes)
            if not entry.sizes:
                entry.refused = f"the epilogue at {entry.program.source} does not compile: {_first_line(error)}"
        finally:
            entry.pending.discard(passes)
            self._changed()

    def build(self, entry: ProgramEntry, passes: int) -> None:
        """All executables that launching `passes` passes of the program takes besides the step."""
        program = entry.program
        if program.results or program.channels or program.reads:
            key = Key("program", program.key, str(passes))
            self.hold(entry, key)
            found = self._table.build(key, lambda: self._shapes.program(program, passes))
            used = found.memory_analysis().temp_size_in_bytes
            if used > self._options.max_program_bytes:
                raise PieError(f"it needs {used / 2**20:,.0f} MiB of temporaries")
        sizes = self._shapes.segments(program)
        if sizes:
            self.hold(entry, self.commit_key(sizes, passes))
            self._table.build(self.commit_key(sizes, passes), lambda: self._shapes.commit(sizes, passes))
        with self._publishing:
            for bucket in self.ready_steps:
                self._build_rows(entry, bucket, passes)
            entry.sizes = entry.sizes | {passes}

    def wish_tapped(self, entry: ProgramEntry, bucket: Bucket) -> None:
        """Compile a program with layer stages, together with the step of a bucket, in the background."""
        with self._lock:
            if bucket in entry.tapped or bucket in entry.tapping:
                return
            entry.tapping.add(bucket)
        self._long.submit(self._build_tapped, weakref.ref(entry), bucket)

    def _build_tapped(self, asked: weakref.ref[ProgramEntry], bucket: Bucket) -> None:
        entry = asked()
        if entry is None:  # evicted, and nobody waits for it any more
            return
        try:
            key = self.tapped_key(entry.program, bucket)
            self.hold(entry, key)
            if self.compile_apart is not None:
                self.compile_apart(entry.program, bucket)
            if self._closed:
                return
            self._table.build(key, lambda: self._shapes.tapped(entry.program, bucket))
            with self._lock:
                entry.tapped = entry.tapped | {bucket}
        except Exception as error:  # it stays in `tapping`: asking again would fail again
            if not entry.tapped:
                entry.refused = f"the layer stages at {entry.program.source} do not compile: {_first_line(error)}"
        finally:
            self._changed()

    def tapped_launched(self, entry: ProgramEntry, bucket: Bucket) -> None:
        """A step with layer stages was launched: those of long ago go. For the thread that plans, so that none goes between a plan and its
        launch."""
        key = self.tapped_key(entry.program, bucket)
        self._launched[key] = weakref.ref(entry), bucket
        self._launched.move_to_end(key)
        while len(self._launched) > self._options.max_tapped:
            old, (owner, size) = self._launched.popitem(last=False)
            if (other := owner()) is not None:
                with self._lock:
                    other.tapped = other.tapped - {size}
                    other.tapping.discard(size)
            self._table.discard(old)

    def build_sizes(self, entry: ProgramEntry) -> None:
        """The executables for every pass count that the ready steps may launch, in this thread; none for layer stages, which wait for
        theirs."""
        if entry.program.stages is not None:
            return
        most = max((bucket.rows for bucket in self.ready_steps), default=1) // entry.program.rows
        for passes in sorted({1, *(bucket.rows for bucket in self.ready_steps if bucket.rows <= most)}):
            if passes not in entry.barred:
                self.build(entry, passes)

    def _build_rows(self, entry: ProgramEntry, bucket: Bucket, passes: int) -> None:
        if passes > bucket.readouts:
            return
        for read in entry.program.reads:
            if bucket.readouts == 1 and self._shapes.positions_of(read) is None:
                continue  # the one output as it is
            key = self.rows_key(read, bucket.readouts, passes)
            self.hold(entry, key)
            self._table.build(key, partial(self._shapes.rows, read, bucket.readouts, passes))

    def wish_step(self, bucket: Bucket) -> None:
        """Compile a step bucket in the background."""
        with self._lock:
            if bucket in self.ready_steps or bucket in self._pending_steps or bucket in self.failed_steps:
                return
            self._pending_steps.add(bucket)
        self._background(self._build_step, bucket)

    def _build_step(self, bucket: Bucket) -> None:
        try:
            self.build_step(bucket)
        except Exception as error:
            self.failed_steps[bucket] = _first_line(error)
        finally:
            self._pending_steps.discard(bucket)
            self._changed()

    def build_step(self, bucket: Bucket) -> None:
        """The step executable of a bucket, and the row selections of every known program for it."""
        self._table.build(self.step_key(bucket), lambda: self._shapes.step(bucket))
        with self._publishing:
            for entry in self.entries():
                for passes in sorted(entry.sizes):
                    self._build_rows(entry, bucket, passes)
            self.ready_steps = self.ready_steps | {bucket}

    def hot(self, entry: ProgramEntry, bucket: Bucket) -> bool:
        """Count a launch that one program filled; True when its fused step should now be compiled."""
        if not self._options.fuse_after or bucket in entry.fused or bucket in entry.fusing:
            return False
        entry.full[bucket] += 1
        return entry.full[bucket] >= self._options.fuse_after

    @staticmethod
    def step_key(bucket: Bucket) -> Key:
        return Key("step", "", str(bucket))

    @staticmethod
    def fused_key(program: Program, bucket: Bucket) -> Key:
        return Key("fused", program.key, str(bucket))

    @staticmethod
    def tapped_key(program: Program, bucket: Bucket) -> Key:
        return Key("tapped", program.key, str(bucket))

    @staticmethod
    def commit_key(sizes: tuple[int, ...], passes: int) -> Key:
        return Key("commit", "", f"{passes}:" + ",".join(map(str, sizes)))

    def rows_key(self, read: Read, readouts: int, passes: int) -> Key:
        return Key("rows", "", f"{read.name}:{readouts}:{passes}:{self._shapes.positions_of(read)}:{read.dtype}")

    def entries(self) -> list[ProgramEntry]:
        """Those that live: asked for lately, or with passes."""
        with self._lock:
            return list(self._alive.values())


def _step_back() -> None:
    """Let this thread's compiles wait for whoever computes tokens. Elsewhere than on Linux a thread has no priority of its own."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)


def _first_line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:500]
