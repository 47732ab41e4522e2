"""The engine's state machine, run by one thread: plans, launches, landings.

It never blocks on the device: landed results come back as host arrays from the reader thread.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future

import numpy as np

from pie_xla.engine.agenda import Agenda
from pie_xla.engine.api import EngineOptions, FromChannel, FromTicket, Geometry
from pie_xla.engine.device_words import DeviceWords
from pie_xla.engine.effects import Effects
from pie_xla.engine.failures import Deliver, Failures
from pie_xla.engine.launcher import Flight, ProgramInput, RowInput
from pie_xla.engine.packing import check_param, value_of
from pie_xla.engine.records import (
    Channel,
    Effect,
    Pass,
    PassRow,
    Shorten,
    Status,
    WorkingSet,
)
from pie_xla.engine.scheduler import Item, Launch, PassView, RowView, View, schedule
from pie_xla.engine.served import Served
from pie_xla.engine.sharing import NamedPrefixes
from pie_xla.engine.sights import sight_fields
from pie_xla.engine.words import WordFile
from pie_xla.errors import PieError

LATE_SHARE = 0.05  # of a step: how long a launch is held for passes that lack nothing but parameters


class Core:
    """See the module.

    Args:
        models: all models, the default one first.
        words, device: which device words are whose, and the words themselves.
        deliver: hands a result to its client.
        lose_state, lose_words: see `Failures`.
        others_hold: whether clients other than the given one hold state memory of a model.
        named: the published prefixes, which go when memory is needed.
    """

    def __init__(
        self,
        models: tuple[Served, ...],
        words: WordFile,
        device: DeviceWords,
        options: EngineOptions,
        deliver: Deliver,
        lose_state: Callable[[Served, str], None],
        lose_words: Callable[[str], None],
        others_hold: Callable[[Served, int], bool],
        named: NamedPrefixes,
    ) -> None:
        self._models = models
        self._words = words
        self._options = options
        self._deliver = deliver
        self._others_hold = others_hold
        self._named = named
        self.counters: Counter[str] = Counter()
        self.agenda = Agenda()
        self._running = self.agenda.running
        self.failures = Failures(models, self.agenda, words, device, self.counters, deliver, lose_state, lose_words)
        self.effects = Effects(self.agenda, words, device, self.failures, deliver)
        self._served: Counter[int] = Counter()
        self._expected: dict[int, float] = {}  # clients just answered -> until when to wait for them
        self.host_seconds = 0.0
        self._turn = 0  # the model that is asked first

    # -- effects -------------------------------------------------------------------------------------------------

    def add(self, effect: Effect) -> None:
        """Take an effect in the order of its call."""
        if isinstance(effect, Shorten) and effect.source is not None:
            effect.source.pins += 1
        if isinstance(effect, Pass):
            if effect.client not in self._served:  # a newcomer does not overtake those who have waited
                self._served[effect.client] = min(self._served.values(), default=0)
            self._expected.pop(effect.client, None)
            effect.pipeline.passes[effect.ticket] = effect
            for producer in effect.producers:
                if producer is not None:
                    producer.pins += 1
        self.agenda.add(effect)

    # -- planning ------------------------------------------------------------------------------------------------

    def param_came(self, item: Pass, index: int, value: Future[np.ndarray]) -> None:
        """A parameter of a pass is here, or will never be: then the pass fails with the cause."""
        if item.status is not Status.QUEUED:
            return  # failed meanwhile
        cause = "a parameter of this pass was cancelled"
        try:
            if not value.cancelled():
                array = value.result()
                check_param(index, item.entry.program.params[index], array)
                item.params[index] = array
                item.missing -= 1
                if not item.missing:
                    self._expected.pop(item.client, None)
                return
        except PieError as error:
            cause = str(error)
        except Exception as error:  # of whoever was to give it
            cause = f"a parameter of this pass never came: {type(error).__name__}: {error}"
        self.failures.fail(item, cause)

    def _inputs_ready(self, item: Pass) -> bool:
        if not item.entry.ready:
            return False
        if any(row.needs_places and row.set is not None and row.set.state.unknown is not None for row in item.rows):
            return False  # a mask speaks of cells that the host must know
        for producer in item.producers:
            if producer is not None and producer.status is Status.QUEUED:
                return False
        for channel, takes, puts in _traffic(item):
            if takes and not channel.count:
                return False
            if puts and channel.count - (1 if takes == 2 else 0) >= channel.capacity:
                return False
        return True

    def _view(self, model: Served, heads: list[Pass], now: float) -> tuple[View, dict[int, Pass], float]:
        """What is ready, and until when passes that lack only parameters are worth waiting for."""
        ready: dict[int, Pass] = {}
        late = 0.0
        views = []
        for item in heads:
            if item.model is model and self._inputs_ready(item):
                if item.missing:
                    if item.lacking is None:
                        item.lacking = now
                    late = max(late, item.lacking + self._pause(model, LATE_SHARE))
                    continue
                if not model.prefixes.ready(item):
                    continue
                ready[item.order] = item
                rows = tuple(self._row_view(row) for row in item.rows)
                masked = any(row.masked for row in item.rows)
                served = self._served[item.client]
                stages = None if item.entry.program.stages is None else item.entry.program.key
                views.append(PassView(item.order, item.order, served, rows, item.readouts, masked, stages))
        ledger = model.ledger
        free = {name: pool.available for name, pool in ledger.paged.items()}
        if ledger.slots is not None:
            free["slots"] = ledger.slots.available
        tapped = {p.entry.program.key: p.entry.tapped for p in ready.values() if p.entry.program.stages is not None}
        return View(tuple(views), model.programs.ready_steps, free, ledger.page_size, tapped), ready, late

    def _pause(self, model: Served, share: float) -> float:
        return min(self._options.gather_seconds, share * model.step_seconds)

    @staticmethod
    def _row_view(row: PassRow) -> RowView:
        if row.set is None:
            return RowView(row.total - row.done, row.last, 0, {}, {})
        state, ledger = row.set.state, row.set.model.ledger
        first = state.least // ledger.page_size
        held = {name: len(table) for name, table in state.pages.items()}
        shared = {
            name: sum(1 for unit in table[first:] if unit and ledger.paged[name].shared(unit))
            for name, table in state.pages.items()
        }
        return RowView(row.total - row.done, row.last, state.cells, held, shared)

    def wait_seconds(self, model: Served, now: float, ready: dict[int, Pass], late: float = 0.0) -> float:
        """How long to hold a launch so that lanes that were just answered can join it; 0 launches now.

        With a launch in flight, the next one is queued behind it only if it would not leave most of the flight's lanes out of step:
        those whose programs need the host come back when it lands. `late`: see `_view`.
        """
        if model.flights:
            back = {item.client for item in ready.values()}
            away = sum(1 for item in self._running.values() if item.model is model and item.client not in back)
            return 0.0 if len(ready) >= away else 1.0
        waiting = [until for until in (*self._expected.values(), late) if until > now]
        return max(waiting) - now if waiting else 0.0

    def plan(self, now: float) -> tuple[list[tuple[Served, list[Flight]]], float]:
        """Launch what is ready, model by model. Returns the flights to read back, and how long to wait for company when that is better.

        Each model has plans of its own, so that a small one's results are not read only when a large one's are; they take turns in
        being first.
        """
        launched: list[tuple[Served, list[Flight]]] = []
        pauses: list[float] = []
        count = len(self._models)
        for model in [self._models[(self._turn + i) % count] for i in range(count)]:
            if model.flights < self._options.depth:
                # Looked up anew for each: a launch that fails may fail passes of other models too.
                heads = [effect for effect in self.agenda.heads() if isinstance(effect, Pass)]
                flights, pause = self._plan(model, heads, now)
                pauses.append(pause)
                if flights:
                    model.flights += 1
                    launched.append((model, flights))
        if launched:
            self._turn = (self._turn + 1) % count
        return launched, min(pauses, default=1.0)

    def _plan(self, model: Served, heads: list[Pass], now: float) -> tuple[list[Flight], float]:
        view, ready, late = self._view(model, heads, now)
        if not view.passes:
            return [], 1.0
        pause = self.wait_seconds(model, now, ready, late)
        if pause > 0:
            return [], pause
        plan = schedule(view, model.buckets)
        for bucket in plan.wishes:
            if bucket in model.programs.failed_steps:
                continue
            model.programs.wish_step(bucket)
        for key, bucket in plan.tapped_wishes:
            entry = next(item.entry for item in ready.values() if item.entry.program.key == key)
            model.programs.wish_tapped(entry, bucket)
        model.starved = {order: since for order, since in model.starved.items() if order in plan.starved}
        if not plan.launches:
            self._relieve(model, plan.starved, ready, now)
            return [], 0.05
        flights: list[Flight] = []
        for launch in plan.launches:
            if all(
                ready[item.pass_id].status is Status.QUEUED for item in launch.items
            ):  # else the launch before failed
                flight = self._launch(model, launch, ready)
                if flight is not None:
                    flights.append(flight)
        return flights, 0.0 if flights else 0.05

    def _relieve(self, model: Served, starved: tuple[int, ...], ready: dict[int, Pass], now: float) -> None:
        """Nothing can run for want of memory. Others may return theirs: wait for them a while. Then, or when nobody else holds any,
        the youngest ask is refused."""
        if not starved or model.flights:
            return
        youngest = ready[max(starved)]
        since = model.starved.setdefault(youngest.order, now)
        # What another model has in flight may decide how much of a set of this one stays.
        hopeful = self._others_hold(model, youngest.client) or any(other.flights for other in self._models)
        if hopeful and now - since < self._options.memory_seconds:
            return
        if self._named.make_room(model):
            return
        free = ", ".join(f"{model.name}, {name}: {f} of {t} free" for name, (f, _, t) in model.ledger.balance().items())
        self.failures.fail(youngest, f"no memory for this pass's state and nobody is about to return any ({free})")

    # -- launching -----------------------------------------------------------------------------------------------

    def _launch(self, model: Served, launch: Launch, ready: dict[int, Pass]) -> Flight | None:
        members: dict[int, list[Item]] = {}
        for item in launch.items:
            members.setdefault(item.pass_id, []).append(item)
        try:
            return self._try_launch(model, launch, members, ready)
        except Exception as error:  # the device refused: its passes fail, everyone else goes on
            self.failures.launch_failed(model, [ready[order] for order in members], error)
            return None

    def _try_launch(
        self, model: Served, launch: Launch, members: dict[int, list[Item]], ready: dict[int, Pass]
    ) -> Flight | None:
        rows: list[RowInput] = []
        inputs: list[ProgramInput] = []
        readouts = 0
        for order, items in members.items():
            one = ready[order]
            final = items[0].final
            if final and not self._allocate(one):
                continue  # its turn comes when others have dropped outputs
            # Takes come before puts, and both before the epilogue's own cells are looked up.
            carried = self._take(one) if final else {}
            firsts, positions = [], []
            for item in items:
                firsts.append(len(rows))
                row_input = self._advance(one, item, carried)
                rows.append(row_input)
                positions.append(tuple(range(readouts, readouts + len(row_input.readout))))
                readouts += len(row_input.readout)
            self._served[one.client] += sum(item.count for item in items)
            if final:
                cells, leaves = self._settle_words(one, carried)
                inputs.append(ProgramInput(one, tuple(firsts), tuple(positions), cells, leaves))
                self._finish_launch(one)
        if not rows:
            return None
        flight = model.launcher.launch(launch.bucket, rows, inputs, tapped=launch.stages is not None)
        self.counters["launches"] += 1
        self.counters["fused launches"] += flight.fused and launch.stages is None
        self.counters["tapped launches"] += launch.stages is not None
        self.counters["rows"] += len(rows)
        self.counters["row slots"] += launch.bucket.rows
        self.counters["tokens"] += sum(item.count for item in launch.items)
        self.counters["token slots"] += launch.bucket.area
        if not flight.fused and len(flight.groups) == 1 and launch.bucket.tokens == 1:
            entry = flight.groups[0].entry
            alone = len(inputs) == len(rows) == sum(len(i.positions[0]) for i in inputs)
            if alone and entry.program.results and model.programs.hot(entry, launch.bucket):
                model.fusion.request(entry, launch.bucket)
        return flight

    def _take(self, item: Pass) -> dict[int, int]:
        """Consume or peek at the front cell of each channel the pass reads: channel id -> word offset."""
        carried: dict[int, int] = {}
        for channel, takes, _ in _traffic(item):
            if not takes:
                continue
            if channel.producers[0] in self._running:
                item.depends.add(channel.producers[0])
            carried[channel.id] = channel.cell(0)
            if takes == 2:
                if channel.last_taker in self._running:  # if that one fails, the cells move under this one
                    item.depends.add(channel.last_taker)
                _, producer = channel.take()
                channel.last_taker = item.order
                item.taken.append((channel, producer))
        return carried

    def _advance(self, item: Pass, step: Item, carried: dict[int, int]) -> RowInput:
        """Move one row's set by `count` tokens."""
        row = item.rows[step.row]
        asked = item.request.rows[step.row].tokens
        source = -1
        match asked:
            case FromTicket(_, index):
                producer = item.producers[step.row]
                assert producer is not None
                source = producer.offsets[index]
                item.producers = tuple(None if i == step.row else p for i, p in enumerate(item.producers))
                if producer.order in self._running:
                    item.depends.add(producer.order)
                producer.unpin(self._words)
            case FromChannel(channel):
                source = carried[channel]
        tokens = None if row.tokens is None else row.tokens[row.done : row.done + step.count]
        row.done += step.count
        readout = self._readout(item, step.row, row, step)
        if row.set is None:
            return RowInput(tokens, source, step.count, row.done - step.count, {}, (0, 0), readout)
        target, state, ledger = row.set, row.set.state, row.set.model.ledger
        item.depends |= target.sources
        row.begin()
        start, unknown, length = state.cells, state.unknown, state.length
        stages = item.entry.program.stages
        hidden = (
            step.final and stages is not None and step.row in stages.masked
        )  # its keys are not what the tokens alone give
        if tokens is not None and row.sight is None and not hidden and len(state.tokens) == length:
            state.tokens.extend(tokens.tolist())
        copies = ledger.append(state, step.count)
        if copies:
            target.model.launcher.copy_pages(copies)
        before, after = ledger.next_slot(state)
        if item.request.geometry is Geometry.BUFFER:
            row.anchored = ledger.anchor(state, start, before) or row.anchored
        if row.replaced is None:
            row.replaced = before
        else:
            ledger.give_slot(before)  # between two chunks: nobody goes back there
        return RowInput(
            tokens,
            source,
            step.count,
            start if unknown is None else start - unknown.most,
            {name: tuple(table) for name, table in state.pages.items()},
            (before, after),
            readout,
            start_word=-1 if unknown is None else unknown.word,
            moved=state.moved,
            bases=tuple(state.bases),  # a pass that only reads is undone before it is packed
            **sight_fields(row, state, ledger.page_size, step.count),
        )

    @staticmethod
    def _readout(item: Pass, index: int, row: PassRow, step: Item) -> tuple[int, ...]:
        """Positions within this launch's tokens whose outputs are wanted."""
        if not step.final:
            return (step.count - 1,)
        if item.request.readout is None:
            return (step.count - 1,)
        before = row.done - step.count
        return tuple(i - before for i in item.request.readout[index])

    def _settle_words(self, item: Pass, carried: dict[int, int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(cells the program reads, words its results and puts go to)."""
        program = item.entry.program
        cells = tuple(
            carried.get(c.id, -1) if u.take or u.read else -1
            for c, u in zip(item.channels, program.channels, strict=True)
        )
        puts = [c.put(item.order) for c, u in zip(item.channels, program.channels, strict=True) if u.put]
        item.wrote = bool(puts)
        return cells, (*item.offsets, *puts)

    def _allocate(self, item: Pass) -> bool:
        """Words for the pass's results; False: it waits for some, or has failed by name where nothing will return any."""
        offsets: list[int] = []
        for kind in item.entry.program.results:
            offset = self._words.allocate(kind.size)
            if offset is None:
                for given, used in zip(offsets, item.entry.program.results, strict=False):
                    self._words.release(given, used.size)
                if not any(model.flights for model in self._models):
                    held = f"{self._words.used} of {self._words.count} device words hold outputs and channels"
                    self.failures.fail(
                        item, f"no room for this pass's outputs: {held}; drop outputs you no longer need"
                    )
                return False
            offsets.append(offset)
        item.offsets = tuple(offsets)
        return True

    def _finish_launch(self, item: Pass) -> None:
        """The pass's last tokens are on their way: whoever comes after it may follow."""
        item.leave()
        self.agenda.forget(item)
        item.status = Status.RUNNING
        self._running[item.order] = item
        for row in item.rows:
            if row.set is None or row.start is None:
                continue
            if item.read_only:
                self.failures.undo_row(row)
                row.start = None
            else:
                row.set.sources.add(item.order)
                item.heirs.append(row.set)

    # -- landing -------------------------------------------------------------------------------------------------

    def land(self, flight: Flight, faults: np.ndarray, values: list[np.ndarray], now: float) -> None:
        """A launch's results have reached the host."""
        b = flight.bucket.rows
        outcome: dict[int, np.ndarray] = {}
        for group, array in zip(flight.groups, values, strict=True):
            for i, member in enumerate(group.inputs):
                outcome[member.item.order] = array[i]
        for member in flight.inputs:
            item = member.item
            if item.status is not Status.RUNNING:
                continue
            bad = [i for i, at in enumerate(member.first_rows) if faults[at]]
            nan = [i for i, at in enumerate(member.positions) if any(faults[b + p] for p in at)]
            if bad:
                vocabulary = f"the vocabulary of the model {item.model.name}"
                self.failures.fail(item, f"row {bad[0]} was given a token id outside {vocabulary} by the device")
            elif nan:
                self.failures.fail(item, f"the model's output of row {nan[0]} is not finite (NaN or infinity)")
            else:
                self._commit(item, outcome.get(item.order), now)

    def _commit(self, item: Pass, words: np.ndarray | None, now: float) -> None:
        item.status = Status.DONE
        self._running.pop(item.order, None)
        item.pipeline.passes.pop(item.ticket, None)
        for row in item.rows:
            if row.set is None or row.start is None:
                continue
            row.set.model.ledger.give_slot(row.replaced or 0)
            row.replaced = None
        for heir in item.heirs:
            heir.sources.discard(item.order)
        results, at = [], 0
        for kind in item.entry.program.results:
            assert words is not None
            results.append(value_of(words[at : at + kind.size], kind))
            at += kind.size
        item.counts = tuple([int(r) if r.ndim == 0 and r.dtype.kind in "iu" else None for r in results])
        for learner in item.learners:
            self.effects.learn(learner, item.counts[learner.index])
        item.learners.clear()
        for row in item.rows:
            if row.set is None or row.start is None or row.set.dropped:
                continue
            certain = self._certain(row.set, row.start + row.total)
            if not item.read_only and row.sight is None:
                item.model.prefixes.file(row.set.tenant, row.set.state, certain)
            item.model.ledger.slide(row.set.state, min(certain, row.set.state.least + row.set.state.moved))
        item.free_results(self._words)
        pause = self._pause(item.model, 0.15)
        if pause > 0 and not item.pipeline.closed:
            self._expected[item.client] = now + pause
        self._deliver(item.client, item.ticket, tuple(results))

    def _certain(self, target: WorkingSet, length: int) -> int:
        """Up to where, of `length` tokens, nothing in flight writes any more."""
        flying = [
            row.start
            for order in target.sources
            if order in self._running
            for row in self._running[order].rows
            if row.set is target and row.start is not None
        ]
        return min([length, *flying])

    # -- clients ---------------------------------------------------------------------------------------------------

    def expect_nobody(self) -> None:
        """Every program waits for something else: no launch gains from waiting for company."""
        self._expected.clear()

    @property
    def expecting(self) -> bool:
        return bool(self._expected)

    def forget_client(self, client: int) -> None:
        self._served.pop(client, None)
        self._expected.pop(client, None)

    def release(self, item: Pass) -> None:
        item.released = True
        item.free_results(self._words)

    @property
    def idle(self) -> bool:
        return self.agenda.empty and not any(model.flights for model in self._models)


def _traffic(item: Pass) -> list[tuple[Channel, int, bool]]:
    """(channel, 0 none | 1 read | 2 take, put) for each channel a pass touches, its token rows included."""
    seen: dict[int, tuple[Channel, int, bool]] = {}
    for channel, use in zip(item.channels, item.entry.program.channels, strict=True):
        seen[channel.id] = (channel, 2 if use.take else 1 if use.read else 0, use.put)
    for channel in item.embedded:
        _, _, puts = seen.get(channel.id, (channel, 0, False))
        seen[channel.id] = (channel, 2, puts)
    return list(seen.values())
