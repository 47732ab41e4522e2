"""The engine's state machine, run by one thread: effects in order, plans, launches, landings, failures.

It never blocks on the device: landed results come back as host arrays from the reader thread.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from pie_xla.engine.api import EngineOptions, FromChannel, FromTicket, Geometry, PassError
from pie_xla.engine.buckets import Buckets
from pie_xla.engine.launcher import Flight, Launcher, ProgramInput, RowInput
from pie_xla.engine.packing import value_of
from pie_xla.engine.programs import ProgramTable
from pie_xla.engine.records import (
    Channel,
    DropSet,
    Effect,
    Evict,
    Fork,
    HostPut,
    HostTake,
    Lane,
    Learner,
    Pass,
    PassRow,
    Shorten,
    Status,
    WorkingSet,
)
from pie_xla.engine.scheduler import Item, Launch, PassView, RowView, View, schedule
from pie_xla.engine.sharing import NamedPrefixes, SharedPrefixes
from pie_xla.engine.sights import sight_fields
from pie_xla.engine.state import DeviceLength, StateLedger
from pie_xla.engine.words import WordFile

Deliver = Callable[[int, int, Any], None]  # client, ticket, values or PassError


@dataclass
class Peek:
    """A channel cell on its way to the host."""

    client: int
    ticket: int
    channel: Channel
    words: Any


class Core:
    """See the module.

    Args:
        deliver: hands a result to its client.
        fuse: asks for a fused step of a program and bucket.
        lose: marks every set, channel and output that had content as lost, with the cause.
        others_hold: whether clients other than the given one hold state memory.
        named: the published prefixes, which go when memory is needed.
    """

    def __init__(
        self,
        launcher: Launcher,
        ledger: StateLedger,
        words: WordFile,
        programs: ProgramTable,
        buckets: Buckets,
        options: EngineOptions,
        deliver: Deliver,
        fuse: Callable[[Any, Any], None],
        lose: Callable[[str], None],
        others_hold: Callable[[int], bool],
        named: NamedPrefixes,
    ) -> None:
        self._launcher = launcher
        self._ledger = ledger
        self._words = words
        self._programs = programs
        self._buckets = buckets
        self._options = options
        self._deliver = deliver
        self._fuse = fuse
        self._lose = lose
        self._others_hold = others_hold
        self._named = named
        self._prefixes = SharedPrefixes(ledger, options.prefix_cache and not options.strict)
        self._lanes: dict[int, Lane] = {}  # lanes with something in them
        self._loose: dict[int, Pass] = {}  # passes that touch no set and no channel, by order
        self._orders = itertools.count(1)
        self._running: dict[int, Pass] = {}  # passes whose last launch is in flight, by order: launch order
        self._served: Counter[int] = Counter()
        self._expected: dict[int, float] = {}  # clients just answered -> until when to wait for them
        self.flights = 0  # plans in flight
        self.counters: Counter[str] = Counter()
        self.step_seconds = 0.0
        self.host_seconds = 0.0
        self.peeks: list[Peek] = []
        self._starved: dict[int, float] = {}  # passes that wait for memory -> since when

    # -- effects -------------------------------------------------------------------------------------------------

    def add(self, effect: Effect) -> None:
        """Take an effect in the order of its call."""
        effect.order = order = next(self._orders)
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
            if not effect.lanes:
                self._loose[order] = effect
        effect.enter()
        for lane in effect.lanes:
            self._lanes[id(lane)] = lane

    def _heads(self) -> list[Effect]:
        """Effects that are first in all of their lanes, in order of call where it matters (within a lane)."""
        heads: dict[int, Effect] = {}
        for key, lane in list(self._lanes.items()):
            while lane and lane[0].dead:
                lane.popleft()
            if not lane:
                del self._lanes[key]
            else:
                heads[id(lane[0])] = lane[0]
        loose: list[Effect] = [item for item in self._loose.values() if not item.dead]
        return [effect for effect in heads.values() if effect.first()] + loose

    def _queue(self) -> list[Effect]:
        """Every effect that has not happened."""
        waiting: dict[int, Effect] = {id(item): item for item in self._loose.values() if not item.dead}
        for lane in self._lanes.values():
            waiting |= {id(effect): effect for effect in lane if not effect.dead}
        return list(waiting.values())

    def settle(self) -> None:
        """Run every effect that needs no launch and is first in its lanes, until nothing changes."""
        moved = True
        while moved:
            moved = False
            for effect in self._heads():
                moved = (not effect.dead and self._happen(effect)) or moved

    def _happen(self, effect: Effect) -> bool:
        """Let an effect that is first happen; True when it has left its lanes, so that those behind it may move."""
        if isinstance(effect, Pass):  # a pass leaves when it is launched, or when it cannot run any more
            cause = self._doomed(effect)
            if cause is not None:
                self.fail(effect, cause)
            return cause is not None
        if not self._act(effect):
            return False
        effect.leave()
        return True

    def _act(self, effect: Effect) -> bool:
        match effect:
            case Fork(parent, child):
                if parent.broken is not None:
                    child.broken = parent.broken
                elif not child.dropped:
                    child.state = self._ledger.fork(parent.state)
                    child.sources = set(parent.sources)
                    for order in parent.sources:
                        self._running[order].heirs.append(child)
                return True
            case Shorten(target):
                done = target.broken is not None or target.dropped or self._shorten(effect)
                if done:
                    self._let_go(effect)
                return done
            case Evict(target, spans):
                if target.broken is not None or target.dropped:
                    return True
                if target.state.unknown is not None:  # until the host knows which cells there are
                    return False
                self._ledger.evict(target.state, spans)
                return True
            case DropSet(target):
                self.drop_set(target)
                return True
            case HostPut():
                return self._host_put(effect)
            case HostTake():
                return self._host_take(effect)
            case _:
                raise TypeError(f"unknown effect {effect!r}")

    def _shorten(self, effect: Shorten) -> bool:
        """Cut a set; False while the pass that says how much has not been launched."""
        state, source = effect.set.state, effect.source
        n: int | None = effect.n
        if source is not None:
            if source.status is Status.QUEUED:
                return False
            if source.status is Status.FAILED:
                self._shorten_by_failed(effect, source)
                return True
            n = source.counts[effect.index] if source.status is Status.DONE else None
        if n is None:
            assert source is not None
            return self._shorten_on_device(effect, source)
        if effect.after:
            less = effect.most - min(max(n, 0), effect.most)
            self._ledger.drop_last(state, less)
            effect.pending.settle(less)
        elif source is not None and state.unknown is not None:
            return False  # the host will soon know which is shorter
        else:
            if effect.commit and n < state.length:
                self._ledger.release_anchor(state, restore=True)
            less = max(0, state.length - max(n, 0))
            self._ledger.truncate(state, max(n, 0))
            effect.pending.settle(less)
        if effect.commit:
            self._ledger.release_anchor(state, restore=False)
        return True

    def _shorten_by_failed(self, effect: Shorten, source: Pass) -> None:
        """The pass that was to say how many has failed. Its own sets are as before it; others have no length."""
        effect.pending.settle(0)
        if all(row.set is not effect.set for row in source.rows):
            effect.set.broken = source.error.cause if source.error else "the pass that decides its length failed"

    def _shorten_on_device(self, effect: Shorten, source: Pass) -> bool:
        """The length becomes a value on the device, until the pass that says it lands. False: no word is free for it now."""
        target = effect.set
        state, base = target.state, target.state.unknown
        word = self._words.allocate(1)
        if word is None:
            return False
        cells = state.cells - effect.most if effect.after else state.cells
        least = state.least - effect.most if effect.after else 0
        since = cells if base is None else cells - base.most
        at = source.offsets[effect.index]
        change = (word, since, -1 if base is None else base.word, 0, at, effect.most, int(effect.after), state.moved)
        self._launcher.settle_length(change)
        length = DeviceLength(word, least, state.cells)
        self._ledger.shorten(state, length)
        source.learners.append(
            Learner(length, effect.pending, effect.index, base, since, effect.after, effect.most, state.moved)
        )
        target.sources.add(source.order)
        source.heirs.append(target)
        return True

    def _let_go(self, effect: Effect) -> None:
        """An effect that has happened, or never will, reads no result any more."""
        if isinstance(effect, Shorten) and effect.source is not None:
            source, effect.source = effect.source, None
            source.pins -= 1
            self._maybe_free(source)

    def _host_put(self, effect: HostPut) -> bool:
        channel = effect.channel
        if channel.poison is not None or channel.dropped:
            return True
        if effect.replace and channel.count:
            if channel.last_taker in self._running:  # it may still give its cell back
                return False
            at, channel.producers[0] = channel.cell(0), -1
        elif channel.count >= channel.capacity:
            return False
        else:
            at = channel.put(-1)
        try:
            self._launcher.poke(effect.words, at)
        except Exception as error:
            channel.poison = _refusal(error)
            self._check_lost(channel.poison)
        return True

    def _host_take(self, effect: HostTake) -> bool:
        channel = effect.channel
        if channel.poison is not None:
            self._deliver(channel.client, effect.ticket, PassError(channel.poison))
            return True
        if not channel.count or channel.last_taker in self._running:  # a pass in flight may still give its cell back
            return False
        try:
            words = self._launcher.peek(channel.cell(0), channel.type.size)
        except Exception as error:
            self._deliver(channel.client, effect.ticket, PassError(_refusal(error)))
            self._check_lost(_refusal(error))
            return True
        if effect.consume:
            channel.take()
        self.peeks.append(Peek(channel.client, effect.ticket, channel, words))
        return True

    def drop_set(self, target: WorkingSet) -> None:
        if not target.dropped:
            target.dropped = True
            self._ledger.drop(target.state)

    # -- planning ------------------------------------------------------------------------------------------------

    def _doomed(self, item: Pass) -> str | None:
        """The cause for which a pass cannot run any more, or None."""
        if item.entry.refused is not None:
            return item.entry.refused
        for row in item.rows:
            if row.set is not None and row.set.broken is not None:
                return row.set.broken
        for channel in (*item.channels, *item.embedded):
            if channel.poison is not None:
                return channel.poison
        for producer in item.producers:
            if producer is not None and producer.lost is not None:
                return producer.lost
            if producer is not None and producer.status is Status.FAILED:
                return producer.error.cause if producer.error else "the pass whose output it embeds failed"
        return None

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

    def _view(self) -> tuple[View, dict[int, Pass]]:
        ready: dict[int, Pass] = {}
        views = []
        for effect in self._heads():
            if isinstance(effect, Pass) and self._inputs_ready(effect):
                if not self._prefixes.ready(effect):
                    continue
                ready[effect.order] = effect
                rows = tuple(self._row_view(row) for row in effect.rows)
                masked = any(row.masked for row in effect.rows)
                served = self._served[effect.client]
                views.append(PassView(effect.order, effect.order, served, rows, effect.readouts, masked))
        free = {name: pool.available for name, pool in self._ledger.paged.items()}
        if self._ledger.slots is not None:
            free["slots"] = self._ledger.slots.available
        return View(tuple(views), self._programs.ready_steps, free, self._ledger.page_size), ready

    def _row_view(self, row: PassRow) -> RowView:
        if row.set is None:
            return RowView(row.total - row.done, row.last, 0, {}, {})
        state, size = row.set.state, self._ledger.page_size
        first = state.least // size
        held = {name: len(table) for name, table in state.pages.items()}
        shared = {
            name: sum(1 for unit in table[first:] if unit and self._ledger.paged[name].shared(unit))
            for name, table in state.pages.items()
        }
        return RowView(row.total - row.done, row.last, state.cells, held, shared)

    def wait_seconds(self, now: float, ready: dict[int, Pass]) -> float:
        """How long to hold a launch so that lanes that were just answered can join it; 0 launches now.

        With a launch in flight, the next one is queued behind it only if it would not leave most of the flight's lanes out of step:
        those whose programs need the host come back when it lands.
        """
        if self.flights:
            back = {item.client for item in ready.values()}
            away = sum(1 for item in self._running.values() if item.client not in back)
            return 0.0 if len(ready) >= away else 1.0
        waiting = [until for client, until in self._expected.items() if until > now]
        return max(waiting) - now if waiting else 0.0

    def plan(self, now: float) -> tuple[list[Flight], float]:
        """Launch what is ready. Returns the flights to read back, and how long to wait for company when that is better."""
        if self.flights >= self._options.depth:
            return [], 1.0
        view, ready = self._view()
        if not view.passes:
            return [], 1.0
        pause = self.wait_seconds(now, ready)
        if pause > 0:
            return [], pause
        plan = schedule(view, self._buckets)
        for bucket in plan.wishes:
            if bucket in self._programs.failed_steps:
                continue
            self._programs.wish_step(bucket)
        self._starved = {order: since for order, since in self._starved.items() if order in plan.starved}
        if not plan.launches:
            self._relieve(plan.starved, ready, now)
            return [], 0.05
        flights: list[Flight] = []
        for launch in plan.launches:
            if all(
                ready[item.pass_id].status is Status.QUEUED for item in launch.items
            ):  # else the launch before failed
                flight = self._launch(launch, ready)
                if flight is not None:
                    flights.append(flight)
        return flights, 0.0 if flights else 0.05

    def _relieve(self, starved: tuple[int, ...], ready: dict[int, Pass], now: float) -> None:
        """Nothing can run for want of memory. Others may return theirs: wait for them a while. Then, or when nobody else holds any,
        the youngest ask is refused."""
        if not starved or self.flights:
            return
        youngest = ready[max(starved)]
        since = self._starved.setdefault(youngest.order, now)
        if self._others_hold(youngest.client) and now - since < self._options.memory_seconds:
            return
        if self._named.make_room():
            return
        free = ", ".join(f"{name}: {f} of {t} free" for name, (f, _, t) in self._ledger.balance().items())
        self.fail(youngest, f"no memory for this pass's state and nobody is about to return any ({free})")

    # -- launching -----------------------------------------------------------------------------------------------

    def _launch(self, launch: Launch, ready: dict[int, Pass]) -> Flight | None:
        members: dict[int, list[Item]] = {}
        for item in launch.items:
            members.setdefault(item.pass_id, []).append(item)
        try:
            return self._try_launch(launch, members, ready)
        except Exception as error:  # the device refused: its passes fail, everyone else goes on
            self.launch_failed([ready[order] for order in members], error)
            return None

    def _try_launch(self, launch: Launch, members: dict[int, list[Item]], ready: dict[int, Pass]) -> Flight | None:
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
        flight = self._launcher.launch(launch.bucket, rows, inputs)
        self.counters["launches"] += 1
        self.counters["fused launches"] += flight.fused
        self.counters["rows"] += len(rows)
        self.counters["row slots"] += launch.bucket.rows
        self.counters["tokens"] += sum(item.count for item in launch.items)
        self.counters["token slots"] += launch.bucket.area
        if not flight.fused and len(flight.groups) == 1 and launch.bucket.tokens == 1:
            entry = flight.groups[0].entry
            alone = len(inputs) == len(rows) == sum(len(i.positions[0]) for i in inputs)
            if alone and entry.program.results and self._programs.hot(entry, launch.bucket):
                self._fuse(entry, launch.bucket)
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
                producer.pins -= 1
                if producer.order in self._running:
                    item.depends.add(producer.order)
                self._maybe_free(producer)
            case FromChannel(channel):
                source = carried[channel]
        tokens = None if row.tokens is None else row.tokens[row.done : row.done + step.count]
        row.done += step.count
        readout = self._readout(item, step.row, row, step)
        if row.set is None:
            return RowInput(tokens, source, step.count, row.done - step.count, {}, (0, 0), readout)
        target, state = row.set, row.set.state
        item.depends |= target.sources
        row.begin()
        start, unknown, length = state.cells, state.unknown, state.length
        if tokens is not None and row.sight is None and len(state.tokens) == length:
            state.tokens.extend(tokens.tolist())
        copies = self._ledger.append(state, step.count)
        if copies:
            self._launcher.copy_pages(copies)
        before, after = self._ledger.next_slot(state)
        if item.request.geometry is Geometry.BUFFER:
            row.anchored = self._ledger.anchor(state, start, before) or row.anchored
        if row.replaced is None:
            row.replaced = before
        else:
            self._ledger.give_slot(before)  # between two chunks: nobody goes back there
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
            **sight_fields(row, state, self._ledger.page_size, step.count),
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
                if not self.flights:
                    held = f"{self._words.used} of {self._words.count} device words hold outputs and channels"
                    self.fail(item, f"no room for this pass's outputs: {held}; drop outputs you no longer need")
                return False
            offsets.append(offset)
        item.offsets = tuple(offsets)
        return True

    def _finish_launch(self, item: Pass) -> None:
        """The pass's last tokens are on their way: whoever comes after it may follow."""
        item.leave()
        self._loose.pop(item.order, None)
        item.status = Status.RUNNING
        self._running[item.order] = item
        for row in item.rows:
            if row.set is None or row.start is None:
                continue
            if item.read_only:
                self._undo_row(row)
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
                vocabulary = "the model's vocabulary"
                self.fail(item, f"row {bad[0]} was given a token id outside {vocabulary} by the device")
            elif nan:
                self.fail(item, f"the model's output of row {nan[0]} is not finite (NaN or infinity)")
            else:
                self._commit(item, outcome.get(item.order), now)

    def _commit(self, item: Pass, words: np.ndarray | None, now: float) -> None:
        item.status = Status.DONE
        self._running.pop(item.order, None)
        item.pipeline.passes.pop(item.ticket, None)
        for row in item.rows:
            if row.set is None or row.start is None:
                continue
            self._ledger.give_slot(row.replaced or 0)
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
            self._learn(learner, item.counts[learner.index])
        item.learners.clear()
        for row in item.rows:
            if row.set is None or row.start is None or row.set.dropped:
                continue
            certain = self._certain(row.set, row.start + row.total)
            if not item.read_only and row.sight is None:
                self._prefixes.file(row.set.tenant, row.set.state, certain)
            self._ledger.slide(row.set.state, min(certain, row.set.state.least + row.set.state.moved))
        self._maybe_free(item)
        pause = min(self._options.gather_seconds, 0.15 * self.step_seconds)
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

    def _learn(self, learner: Learner, value: int | None) -> None:
        assert value is not None
        base = learner.base
        if base is not None and base.exact is None:  # its own pass lands later
            base.waiting.append(lambda: self._learn(learner, value))
            return
        learner.learn(value)
        learner.pending.settle(learner.length.most - (learner.length.exact or 0))
        self._ledger.resolve(learner.length)
        self._words.release(learner.length.word, 1)
        waiting, learner.length.waiting = learner.length.waiting, []
        for call in waiting:
            call()

    def land_peek(self, peek: Peek, words: np.ndarray) -> None:
        if peek.channel.poison is not None:
            self._deliver(peek.client, peek.ticket, PassError(peek.channel.poison))
        else:
            self._deliver(peek.client, peek.ticket, (value_of(words, peek.channel.type),))

    def peek_failed(self, peek: Peek, error: Exception | None) -> None:
        cause = _refusal(error) if error is not None else "the device gave no value"
        self._deliver(peek.client, peek.ticket, PassError(cause))

    # -- failing -------------------------------------------------------------------------------------------------

    def fail(self, item: Pass, cause: str) -> None:
        """Fail a pass and everything that depends on it; sets go back to before, in reverse order of launch."""
        failed = {item.order: item}
        broken: list[WorkingSet] = []
        found = -1
        while len(failed) != found:  # until nothing new follows
            found = len(failed)
            for order, other in self._running.items():
                if other.depends & failed.keys():
                    failed[order] = other
            since: dict[int, int] = {}  # set -> the first of its failed passes
            for order in sorted(failed, reverse=True):
                since |= {id(row.set): order for row in failed[order].rows if row.set is not None}
            for effect in self._queue():
                match effect:
                    case Pass():
                        behind = any(since.get(id(row.set), effect.order) < effect.order for row in effect.rows)
                        if behind or effect.depends & failed.keys():
                            failed[effect.order] = effect
                    case Shorten(target) if effect.after and since.get(id(target), effect.order) < effect.order:
                        effect.dead = True  # of what it would have kept some, nothing is left
                        effect.pending.settle(0)
                        self._let_go(effect)
                    case Fork(parent, child) if since.get(id(parent), effect.order) < effect.order:
                        broken.append(child)
        for order in sorted(failed, reverse=True):
            self._undo(failed[order])
        for one in failed.values():
            own = {id(row.set) for row in one.rows}
            for heir in one.heirs:
                heir.sources.discard(one.order)
                if id(heir) not in own:
                    broken.append(heir)  # a fork that holds the failed tokens cannot be put back
        for target in broken:
            target.broken = cause
        for order in sorted(failed):
            one = failed[order]
            one.error = PassError(cause, one.line)
            self._deliver(one.client, one.ticket, one.error)

    def _undo(self, item: Pass) -> None:
        item.status = Status.FAILED
        item.dead = True
        self._running.pop(item.order, None)
        self._loose.pop(item.order, None)
        item.pipeline.passes.pop(item.ticket, None)
        for row in item.rows:
            if row.set is None:
                continue
            if not item.read_only:
                row.set.undo(row.before, row.total if item.request.geometry is Geometry.BUFFER else 0)
            if row.start is not None:
                self._undo_row(row)
        for channel, producer in reversed(item.taken):
            channel.untake(producer)
        if item.wrote:
            for channel, use in zip(item.channels, item.entry.program.channels, strict=True):
                if use.put:
                    channel.poison = channel.poison or "a pass that was to put into this channel failed"
        for source in item.producers:
            if source is not None:
                source.pins -= 1
                self._maybe_free(source)
        for learner in item.learners:
            learner.pending.settle(0)
            self._words.release(learner.length.word, 1)
        item.learners.clear()
        self._maybe_free(item)

    def _undo_row(self, row: PassRow) -> None:
        """The row's set as it was before the pass. Its cells beyond are dead, its newer slots go back."""
        target = row.set
        if target is None or row.start is None:
            return
        if target.dropped:
            self._ledger.give_slot(row.replaced or 0)
        else:
            state = target.state
            emptied = state.length < row.start  # truncated to nothing since
            if row.anchored:
                self._ledger.release_anchor(state, restore=False)
            if row.replaced is not None:
                self._ledger.give_slot(state.slot)
                state.slot = row.replaced
            if emptied and self._ledger.slots:
                self._ledger.truncate(state, 0)
            elif not emptied:
                self._ledger.rewind(state, row.start, row.unknown)
        row.replaced = None

    def cancel(self, items: list[Pass], cause: str) -> None:
        """Drop passes that no step has taken, and discard those in flight."""
        for item in sorted(items, key=lambda p: p.order):
            if item.status in (Status.QUEUED, Status.RUNNING):
                self.fail(item, cause)

    @property
    def prefix_tokens(self) -> int:
        """Tokens that were not computed again, since their pages were there."""
        return self._prefixes.tree.hits

    def running_of(self, client: int) -> list[Pass]:
        return [item for item in self._running.values() if item.client == client]

    def queued_of(self, client: int) -> list[Pass]:
        return [e for e in self._queue() if isinstance(e, Pass) and e.client == client]

    def bury(self, client: int) -> None:
        """Effects of a client that has ended do not happen any more."""
        for effect in self._queue():
            if effect.client_id == client:
                effect.dead = True
                self._let_go(effect)
                match effect:
                    case DropSet(target):
                        self.drop_set(target)
                    case Fork(_, child) if child.client != client:  # it was to be published
                        child.broken = "the process that published it ended before"

    def expect_nobody(self) -> None:
        """Every program waits for something else: no launch gains from waiting for company."""
        self._expected.clear()

    @property
    def expecting(self) -> bool:
        return bool(self._expected)

    def forget_client(self, client: int) -> None:
        self._served.pop(client, None)
        self._expected.pop(client, None)

    def launch_failed(self, items: list[Pass], error: Exception, lost: bool = False) -> None:
        """An executable failed: its passes fail with the reason. If it took the donated state along, that is rebuilt and whoever had
        content in it fails too."""
        cause = _refusal(error)
        for item in items:
            if item.status in (Status.QUEUED, Status.RUNNING):
                self.fail(item, cause)
        self._check_lost(cause, lost)

    def _check_lost(self, cause: str, lost: bool = False) -> None:
        if lost or self._launcher.lost:
            self.state_lost(cause)

    def state_lost(self, cause: str) -> None:
        """Fresh pools; passes in flight and every set and channel with content fail with the cause."""
        self.counters["rebuilds"] += 1
        for item in list(self._running.values()):
            if item.status is Status.RUNNING:
                self.fail(item, cause)
        self._launcher.rebuild()
        self._prefixes.clear()
        self._lose(cause)

    def release(self, item: Pass) -> None:
        item.released = True
        self._maybe_free(item)

    def _maybe_free(self, item: Pass) -> None:
        """Return a pass's result words once nobody can read them: no Output is left, no later pass is waiting, it has landed."""
        if item.released and item.pins <= 0 and item.status in (Status.DONE, Status.FAILED) and item.offsets:
            for offset, kind in zip(item.offsets, item.entry.program.results, strict=True):
                if offset >= 0:
                    self._words.release(offset, kind.size)
            item.offsets = ()

    @property
    def idle(self) -> bool:
        return not self._lanes and not self._loose and not self.flights


def _refusal(error: Exception) -> str:
    """What a device error becomes for those who hear of it."""
    return f"the device could not run this step: {str(error).splitlines()[0] if str(error) else type(error).__name__}"


def _traffic(item: Pass) -> list[tuple[Channel, int, bool]]:
    """(channel, 0 none | 1 read | 2 take, put) for each channel a pass touches, its token rows included."""
    seen: dict[int, tuple[Channel, int, bool]] = {}
    for channel, use in zip(item.channels, item.entry.program.channels, strict=True):
        seen[channel.id] = (channel, 2 if use.take else 1 if use.read else 0, use.put)
    for channel in item.embedded:
        _, _, puts = seen.get(channel.id, (channel, 0, False))
        seen[channel.id] = (channel, 2, puts)
    return list(seen.values())
