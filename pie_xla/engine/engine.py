"""The engine: one thread that turns effects into launches, one that reads results back, and the doors to them."""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from pie_xla.engine.api import EngineOptions, Event, LoadedModel, PassError
from pie_xla.engine.buckets import Bucket, Buckets
from pie_xla.engine.client import Client
from pie_xla.engine.core import Core, Peek
from pie_xla.engine.executables import ExecutableStore, ExecutableTable
from pie_xla.engine.fusion import FusionService
from pie_xla.engine.launcher import Flight, Launcher
from pie_xla.engine.memory import plan_state
from pie_xla.engine.packing import struct
from pie_xla.engine.programs import ProgramEntry, ProgramTable
from pie_xla.engine.records import Channel, Pass, Pipeline, WorkingSet, drop_of
from pie_xla.engine.sharing import NamedPrefixes
from pie_xla.engine.state import SetState, StateLedger
from pie_xla.engine.steps import StepShapes
from pie_xla.engine.words import WordFile
from pie_xla.errors import PieError
from pie_xla.eta.types import Program
from pie_xla.progress import Progress, Silent
from poem.spec import StateGroup

Landing = tuple[list[Flight], list[Peek]]


class Engine:
    """Serves one model to many clients.

    Args:
        model: lowered, with weights on the device.
        options: sizes.
        store: directory of serialized executables (private to the user), or None to keep none.
        progress: hears about warm-up.
    """

    def __init__(
        self,
        model: LoadedModel,
        options: EngineOptions,
        store: Path | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.model = model
        self.options = options
        self.facts = model.lowered.facts
        self.vocab_size: int = self.facts.vocab_size
        self.stateful = bool(model.lowered.groups)
        self._progress = progress or Silent()
        self.max_context = min(self.facts.max_context, options.max_context or self.facts.max_context)
        self.plan = plan_state(model.lowered.groups, options.state_bytes, self.facts.page_size)
        self._buckets = Buckets(options)
        self.max_rows = self._buckets.max_rows
        self.chunk = self._buckets.chunk
        structs = _structs(model, self.plan.units)
        self._shapes = StepShapes(model.lowered, self.plan.units, options.word_count, self.max_context, structs)
        pools = ",".join(f"{name}={n}" for name, n in self.plan.units.items())
        engine_key = f"{model.key}|{pools}|{options.word_count}|{self.max_context}"
        self._store = ExecutableStore(store, engine_key, _devices(model))
        self._table = ExecutableTable(self._store)
        self._programs = ProgramTable(self._shapes, self._buckets, self._table, options, self._wake)
        self._ledger = StateLedger(model.lowered.groups, self.plan.units, self.facts.page_size)
        self._words = WordFile(options.word_count)
        self._launcher = Launcher(self._shapes, self._table, self._programs, structs[1], options.word_count)
        self._fusion = FusionService(model.recipe, self._store, self.plan.units, options, self.max_context, self._fused)
        self.recurrent = self._ledger.slots is not None
        self.windowed = bool(self._ledger.windows)
        self.views = self._shapes.views
        self.named = NamedPrefixes(
            options.published, lambda made: self._post_quietly(lambda door: door.core.add(drop_of(made)))
        )
        self._core = Core(
            self._launcher,
            self._ledger,
            self._words,
            self._programs,
            self._buckets,
            options,
            deliver=self._deliver,
            fuse=self._fusion.request,
            lose=self._lose,
            others_hold=lambda client: any(c.holds_state for c in list(self._clients.values()) if c.id != client),
            named=self.named,
        )
        self._clients: dict[int, Client] = {}
        self._ids = itertools.count(1)
        self._inbox: deque[Callable[[_Door], None]] = deque()
        self._awake = threading.Condition()
        self._stop = False
        self._dirty = False  # something happened since the engine's thread last looked
        self._landings: queue.SimpleQueue[Landing | None] = queue.SimpleQueue()
        self._failure: BaseException | None = None
        self._door = _Door(self._words, self._core)
        self._thread = threading.Thread(target=self._run, name="pie-engine", daemon=True)
        self._reader = threading.Thread(target=self._read, name="pie-readback", daemon=True)

    # -- life ----------------------------------------------------------------------------------------------------

    def start(self, warm: Sequence[tuple[int, int]] = (), soon: Sequence[tuple[int, int]] = ()) -> None:
        """Build the executables of the (rows, tokens) buckets in `warm`, then serve. Those in `soon` are built meanwhile and may be
        ready later; others when they are wished for."""
        for bucket in self._buckets.all:
            if (bucket.rows, bucket.tokens) in set(soon):
                self._programs.wish_step(bucket)
        wanted = [b for b in self._buckets.all if (b.rows, b.tokens) in set(warm)]
        moves = self._launcher.warm(self._ledger)
        with self._progress.task("executables", len(wanted) + len(moves)) as task:
            threads = [threading.Thread(target=self._build, args=(b,), name="pie-compile") for b in wanted]
            previous = threading.stack_size(64 << 20)
            for thread in threads:
                thread.start()
            threading.stack_size(previous)
            for key, work in moves:
                self._table.build(key, work)
                task.advance()
            self._launcher.rebuild()
            for thread in threads:
                thread.join()
                task.advance()
        self._launcher.params = dict(self.model.params)
        for bucket in wanted:
            if bucket in self._programs.failed_steps:
                raise PieError(f"the step {bucket} does not compile: {self._programs.failed_steps[bucket]}")
        self._thread.start()
        self._reader.start()

    def _build(self, bucket: Bucket) -> None:
        try:
            self._programs.build_step(bucket)
        except Exception as error:
            self._programs.failed_steps[bucket] = str(error)

    def warm_all(self) -> tuple[tuple[int, int], ...]:
        """Every bucket, for a server that must never compile a step while it serves."""
        return tuple((b.rows, b.tokens) for b in self._buckets.all)

    def close(self) -> None:
        """Stop serving. Clients that are still open hear that the engine has closed."""
        for client in list(self._clients.values()):
            client.abandon("the engine was closed")
            client.close()
        self._stop = True
        self._wake()
        if self._thread.is_alive():
            self._thread.join(timeout=30)
        self._landings.put(None)
        self._programs.close()
        self._fusion.close()

    def client(self, name: str, on_event: Event, tenant: str = "") -> Client:
        """A new account. `on_event(ticket, values | PassError)` is called on an engine thread and must not block. Prefixes are shared
        within a tenant."""
        made = Client(self, next(self._ids), name, on_event, tenant)
        self._clients[made.id] = made
        return made

    # -- doors for clients -----------------------------------------------------------------------------------------

    def post(self, call: Callable[[_Door], None]) -> None:
        """Run `call` on the engine's thread, in order."""
        if self._failure is not None:
            raise PieError(f"the engine has stopped: {self._failure}")
        self._inbox.append(call)
        self._wake()

    def _post_quietly(self, call: Callable[[_Door], None]) -> None:
        if self._failure is None:
            self.post(call)

    def nobody_is_coming(self) -> None:
        """Programs have all blocked again; an idle device need not wait for more of them. From any thread."""
        if self._core.expecting and self._failure is None:
            self.post(lambda door: door.core.expect_nobody())

    def new_state(self) -> SetState:
        return self._ledger.new()

    def cannot_truncate(self, target: WorkingSet, n: int) -> str | None:
        if self.recurrent and n not in (0, target.submitted):
            return "a recurrent state cannot be undone: fork the set before the tokens you may take back"
        for name, window in self._ledger.windows.items():
            if n in (0, target.submitted):
                continue
            # what will have been let go once all calls so far have run
            last = self._ledger.window_start(target.submitted, window) * self.facts.page_size
            floor = max(self._ledger.floor(target.state, name), last)
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
        if not self._buckets.fitting(rows, tokens, readouts):
            raise PieError(
                f"the last launch of this pass would take {tokens} tokens in each of {rows} rows; "
                f"the largest launches are {', '.join(map(str, self._buckets.prefill))} (rows x tokens)",
                "read out fewer positions, or use a pass per row",
            )

    def check_length(self, row: int, length: int) -> None:
        if length > self.max_context:
            raise PieError(
                f"row {row} would be {length} tokens long; the model's context is {self.max_context}",
                "shorten the prompt, or truncate the set",
            )
        if self.stateful and not self._ledger.fits(self._ledger.most(length), empty=True):
            held = self.plan.tokens
            raise PieError(
                f"row {row} would be {length} tokens long; all state memory holds {held}", "raise [engine] kv_memory"
            )

    def program(self, program: Program) -> ProgramEntry:
        return self._programs.entry(program)

    def allocate_words(self, n: int) -> int | None:
        return self._words.allocate(n)

    def close_client(
        self, client: Client, sets: list[WorkingSet], channels: list[Channel], tickets: list[Pass]
    ) -> None:
        self._clients.pop(client.id, None)
        if self._failure is None:
            self.post(lambda door: door.close_client(client.id, sets, channels, tickets))

    # -- facts -----------------------------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Counters and accounts, as plain data; a snapshot that may be taken from any thread."""
        return {
            **dict(self._core.counters),
            "memory": self._ledger.balance(),
            "cached": self._ledger.cached(),
            "prefix tokens": self._core.prefix_tokens,
            "words used": self._words.used,
            "clients": len(self._clients),
            "compiled": dict(self._table.compiled),
            "loaded": dict(self._table.loaded),
            "misses": dict(self._table.misses),
            "build seconds": self._table.seconds,
            "programs": len(self._programs.entries()),
            "step seconds": self._core.step_seconds,
            "host seconds": self._core.host_seconds,
        }

    def settle(self, timeout: float = 30.0) -> None:
        """Wait until nothing is queued or in flight (for tests and shutdown)."""
        end = time.monotonic() + timeout
        while time.monotonic() < end:
            answers: queue.SimpleQueue[bool] = queue.SimpleQueue()
            self.post(lambda door, answers=answers: answers.put(door.core.idle))  # type: ignore[misc]
            if answers.get(timeout=timeout) and not self._inbox:
                return
            time.sleep(0.002)
        raise PieError(f"the engine is still busy after {timeout} s")

    # -- threads ---------------------------------------------------------------------------------------------------

    def _wake(self) -> None:
        with self._awake:
            self._dirty = True
            self._awake.notify()

    def _deliver(self, client: int, ticket: int, outcome: tuple[np.ndarray, ...] | PassError) -> None:
        target = self._clients.get(client)
        if target is not None:
            target.deliver(ticket, outcome)

    def _lose(self, cause: str) -> None:
        for client in list(self._clients.values()):
            client.lose(cause)
        self.named.lose(cause)

    def _fused(self, entry: ProgramEntry, bucket: Bucket, ok: bool) -> None:
        """A compile process has finished (on its watcher's thread): take its executable over."""
        if ok and self._table.adopt(self._programs.fused_key(entry.program, bucket)):
            entry.fused.add(bucket)

    def _run(self) -> None:
        core = self._core
        try:
            while not self._stop:
                started = time.perf_counter()
                while self._inbox:
                    self._inbox.popleft()(self._door)
                core.settle()
                flights, pause = core.plan(time.monotonic())
                if flights or core.peeks:
                    core.flights += bool(flights)
                    peeks, core.peeks = core.peeks, []
                    self._landings.put((flights, peeks))
                    core.host_seconds += time.perf_counter() - started
                    continue
                core.host_seconds += time.perf_counter() - started
                with self._awake:
                    if not self._dirty:
                        self._awake.wait(pause)
                    self._dirty = False
        except BaseException as error:  # a bug of ours: everyone is told, nobody hangs
            self._failure = error
            for client in list(self._clients.values()):
                client.abandon(f"the engine has stopped: {type(error).__name__}: {error}")
            raise

    def _read(self) -> None:
        """Wait for results in launch order and hand them to the engine's thread."""
        previous = time.monotonic()
        while (landing := self._landings.get()) is not None:
            flights, peeks = landing
            begun = time.monotonic()
            outcome: list[tuple[Flight, Any, list[Any]]] = []
            error: Exception | None = None
            words: list[np.ndarray] = []
            try:
                for flight in flights:
                    outcome.append(
                        (flight, np.asarray(flight.faults), [np.asarray(group.values) for group in flight.groups])
                    )
                for peek in peeks:
                    words.append(np.asarray(peek.words))
            except Exception as failure:
                error = failure
            now = time.monotonic()
            seconds = now - max(previous, begun)
            previous = now
            landed = partial(
                _Door.land, landing=landing, outcome=outcome, words=words, error=error, seconds=seconds, now=now
            )
            self._inbox.append(landed)
            self._wake()


class _Door:
    """What posted calls may do, on the engine's thread."""

    def __init__(self, words: WordFile, core: Core) -> None:
        self._words = words
        self.core = core
        self.add = core.add
        self.release = core.release

    def cancel_pipeline(self, pipeline: Pipeline) -> None:
        mine = [p for p in self.core.running_of(pipeline.client) if p.pipeline is pipeline]
        self.core.cancel([*pipeline.passes.values(), *mine], "its pipeline was cancelled")

    def drop_channel(self, channel: Channel) -> None:
        if not channel.dropped:
            channel.dropped = True
            channel.poison = channel.poison or "the channel was dropped"
            self._words.release(channel.offset, channel.words)

    def close_client(self, client: int, sets: list[WorkingSet], channels: list[Channel], tickets: list[Pass]) -> None:
        core = self.core
        core.cancel([*core.queued_of(client), *core.running_of(client)], "its process has ended")
        core.bury(client)
        for target in sets:
            core.drop_set(target)
        for channel in channels:
            self.drop_channel(channel)
        for item in tickets:
            core.release(item)
        core.forget_client(client)

    def land(
        self,
        landing: Landing,
        outcome: list[tuple[Flight, np.ndarray, list[np.ndarray]]],
        words: list[np.ndarray],
        error: Exception | None,
        seconds: float,
        now: float,
    ) -> None:
        core = self.core
        flights, peeks = landing
        core.flights -= bool(flights)
        if flights:
            core.step_seconds = seconds if not core.step_seconds else 0.8 * core.step_seconds + 0.2 * seconds
        for flight, faults, values in outcome:
            core.land(flight, faults, values, now)
        for peek, value in zip(peeks, words, strict=False):
            core.land_peek(peek, value)
        for peek in peeks[len(words) :]:
            core.peek_failed(peek, error)
        if error is not None:
            landed = [flight for flight, _, _ in outcome]
            failed = [member.item for flight in flights if flight not in landed for member in flight.inputs]
            core.launch_failed(failed, error, lost=True)


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
