"""The engine: one thread that turns effects into launches, one that reads results back, and the doors to them."""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from pie_xla.engine.api import EngineOptions, Event, LoadedModel, PassError
from pie_xla.engine.client import Client
from pie_xla.engine.core import Core
from pie_xla.engine.effects import Peek
from pie_xla.engine.launcher import Flight
from pie_xla.engine.memory import plan_states
from pie_xla.engine.records import Channel, Pass, Pipeline, WorkingSet, drop_of
from pie_xla.engine.served import Served
from pie_xla.engine.sharing import NamedPrefixes
from pie_xla.engine.words import WordFile
from pie_xla.errors import PieError
from pie_xla.progress import Progress, Silent


@dataclass(frozen=True)
class Landing:
    """What to read back together: a plan's flights of one model, or cells for the host."""

    model: Served | None
    flights: list[Flight]
    peeks: list[Peek]


class Engine:
    """Serves models to many clients.

    Args:
        models: lowered, with weights on the device; the first is the default one. Names are unique.
        options: sizes.
        store: directory of serialized executables (private to the user), or None to keep none.
        progress: hears about warm-up.
    """

    def __init__(
        self,
        models: LoadedModel | Sequence[LoadedModel],
        options: EngineOptions,
        store: Path | None = None,
        progress: Progress | None = None,
    ) -> None:
        loaded = [models] if isinstance(models, LoadedModel) else list(models)
        names = [model.name for model in loaded]
        if not loaded or len(set(names)) != len(names):
            raise PieError(f"an engine needs models of different names, not {names}", "name each of them")
        self.options = options
        self._progress = progress or Silent()
        served: list[Served] = []
        for model, plan in zip(loaded, plan_states(loaded, options), strict=True):
            device = served[0].words if served else None
            served.append(Served(model, options, plan, store, device, self._wake))
        self.models: dict[str, Served] = {model.name: model for model in served}
        self.default = served[0]
        self._words = WordFile(options.word_count)
        self._device = self.default.words
        self.named = NamedPrefixes(
            options.published, lambda made: self.post_quietly(lambda door: door.core.add(drop_of(made)))
        )
        self._core = Core(
            tuple(served),
            self._words,
            self._device,
            options,
            deliver=self._deliver,
            lose_state=self._lose_state,
            lose_words=self._lose_words,
            others_hold=lambda model, client: any(
                c.holds_state(model) for c in list(self._clients.values()) if c.id != client
            ),
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
        models = list(self.models.values())
        builders = [model.builders(warm) for model in models]
        moves = [(model, move) for model in models for move in model.launcher.warm(model.ledger)]
        moves += [(self.default, move) for move in self._device.warm()]
        with self._progress.task("executables", sum(map(len, builders)) + len(moves)) as task:
            self._device.rebuild()
            for model, threads in zip(models, builders, strict=True):  # one by one: each compile takes much memory
                model.wish(soon)
                previous = threading.stack_size(64 << 20)
                for thread in threads:
                    thread.start()
                threading.stack_size(previous)
                for owner, (key, work) in moves:
                    if owner is model:
                        owner.table.build(key, work)
                        task.advance()
                model.launcher.rebuild()
                for thread in threads:
                    thread.join()
                    task.advance()
        for model in models:
            model.launcher.params = dict(model.model.params)
            model.check(warm)
        self._thread.start()
        self._reader.start()

    def warm_all(self) -> tuple[tuple[int, int], ...]:
        """Every bucket, for a server that must never compile a step while it serves."""
        return tuple((b.rows, b.tokens) for b in self.default.buckets.all)

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
        if self._reader.is_alive():  # a thread that is in XLA when the interpreter ends aborts the process
            self._reader.join(timeout=30)
        for model in self.models.values():
            model.close()

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

    def post_quietly(self, call: Callable[[_Door], None]) -> None:
        """The same, where nobody is left to hear that the engine has stopped."""
        if self._failure is None:
            self.post(call)

    def nobody_is_coming(self) -> None:
        """Programs have all blocked again; an idle device need not wait for more of them. From any thread."""
        if self._core.expecting and self._failure is None:
            self.post(lambda door: door.core.expect_nobody())

    def served(self, name: str | None) -> Served:
        """A model by its name; the default one without."""
        if name is None:
            return self.default
        found = self.models.get(name)
        if found is None:
            raise PieError(f"there is no model {name!r:.60} here; there is {', '.join(self.models)}")
        return found

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
        """Counters and accounts, as plain data; a snapshot that may be taken from any thread.

        Accounts of memory are under the group's name for the default model, and under "MODEL.GROUP" for others; "models" has each
        model's own.
        """
        models = {name: model.stats() for name, model in self.models.items()}
        default = models[self.default.name]

        def accounts(what: str) -> dict[str, Any]:
            others = {f"{m}.{g}": v for m, own in models.items() if own is not default for g, v in own[what].items()}
            return {**default[what], **others}

        def total(what: str) -> Any:
            return sum(own[what] for own in models.values())

        def counts(what: str) -> dict[str, int]:
            return dict(sum((own[what] for own in models.values()), Counter()))

        return {
            **dict(self._core.counters),
            "memory": accounts("memory"),
            "cached": accounts("cached"),
            "prefix tokens": total("prefix tokens"),
            "words used": self._words.used,
            "clients": len(self._clients),
            "compiled": counts("compiled"),
            "loaded": counts("loaded"),
            "misses": counts("misses"),
            "build seconds": total("build seconds"),
            "programs": total("programs"),
            "evicted programs": total("evicted programs"),
            "executables": total("executables"),
            "step seconds": default["step seconds"],
            "host seconds": self._core.host_seconds,
            "models": models,
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

    def _lose_state(self, model: Served, cause: str) -> None:
        for client in list(self._clients.values()):
            client.lose_state(model, cause)
        self.named.lose(model, cause)

    def _lose_words(self, cause: str) -> None:
        for client in list(self._clients.values()):
            client.lose_words(cause)

    def _run(self) -> None:
        core = self._core
        try:
            while not self._stop:
                started = time.perf_counter()
                while self._inbox:
                    self._inbox.popleft()(self._door)
                core.effects.settle()
                launched, pause = core.plan(time.monotonic())
                if launched or core.effects.peeks:
                    peeks, core.effects.peeks = core.effects.peeks, []
                    if peeks:
                        self._landings.put(Landing(None, [], peeks))
                    for model, flights in launched:
                        self._landings.put(Landing(model, flights, []))
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
            begun = time.monotonic()
            outcome: list[tuple[Flight, Any, list[Any]]] = []
            error: Exception | None = None
            words: list[np.ndarray] = []
            try:
                for flight in landing.flights:
                    outcome.append(
                        (flight, np.asarray(flight.faults), [np.asarray(group.values) for group in flight.groups])
                    )
                for peek in landing.peeks:
                    words.append(peek.words.result())
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
        self.param_came = core.param_came

    def cancel_pipeline(self, pipeline: Pipeline) -> None:
        mine = [p for p in self.core.agenda.running.values() if p.pipeline is pipeline]
        self.core.failures.cancel([*pipeline.passes.values(), *mine], "its pipeline was cancelled")

    def drop_channel(self, channel: Channel) -> None:
        if not channel.dropped:
            channel.dropped = True
            channel.poison = channel.poison or "the channel was dropped"
            self._words.release(channel.offset, channel.words)

    def close_client(self, client: int, sets: list[WorkingSet], channels: list[Channel], tickets: list[Pass]) -> None:
        core = self.core
        core.failures.cancel(core.agenda.passes_of(client), "its process has ended")
        core.failures.bury(client)
        for target in sets:
            target.drop()
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
        core, model = self.core, landing.model
        if model is not None:
            model.flights -= 1
            model.step_seconds = seconds if not model.step_seconds else 0.8 * model.step_seconds + 0.2 * seconds
        for flight, faults, values in outcome:
            core.land(flight, faults, values, now)
        for peek, value in zip(landing.peeks, words, strict=False):
            core.effects.land_peek(peek, value)
        for peek in landing.peeks[len(words) :]:
            core.effects.peek_failed(peek, error)
        if error is not None:
            landed = [flight for flight, _, _ in outcome]
            failed = [member.item for flight in landing.flights if flight not in landed for member in flight.inputs]
            core.failures.landing_failed(failed, error)
