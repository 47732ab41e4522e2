"""What the engine keeps of each pass, working set, channel and pipeline, and the queues that order them.

One mechanism orders everything: a `Lane` is a queue of effects, an effect stands in the lane of everything it touches, and runs when it
is first in all of them. A working set has one lane. A channel has two, because its producer and its consumer do not wait for each
other's calls, only for cells.
"""

from __future__ import annotations

import enum
import threading
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from pie_xla.engine.api import PassError, PassRequest, Sight
from pie_xla.engine.state import DeviceLength, SetState, StateLedger
from pie_xla.eta.types import TensorType

if TYPE_CHECKING:
    from pie_xla.engine.programs import ProgramEntry
    from pie_xla.engine.served import Served
    from pie_xla.engine.words import WordFile

Lane = deque["Effect"]


class Effect:
    """Something that happens in the order it was called; `dead` effects are skipped when they come first."""

    lanes: tuple[Lane, ...] = ()
    dead: bool = False
    order: int = 0  # of the call

    @property
    def client_id(self) -> int:
        """Whose call it was."""
        raise TypeError(f"{type(self).__name__} names no client")

    def first(self) -> bool:
        """Whether it is at the head of all its lanes (heads that are dead are removed)."""
        for lane in self.lanes:
            while lane and lane[0].dead:
                lane.popleft()
            if not lane or lane[0] is not self:
                return False
        return True

    def enter(self) -> None:
        for lane in self.lanes:
            lane.append(self)

    def leave(self) -> None:
        """Leave all lanes; the effect is first in each of them."""
        for lane in self.lanes:
            lane.popleft()

    def let_go(self, words: WordFile) -> None:
        """It has happened, or never will: it reads no result any more."""


MOST_PENDING = 64


@dataclass(eq=False)
class PendingLength:
    """How many tokens a set loses, when a value on the device says so: at most `most`; `less` once the host knows."""

    most: int = 0
    less: int = 0
    settled: bool = False

    def settle(self, less: int) -> None:
        self.less, self.settled = less, True


@dataclass(eq=False)
class WorkingSet:
    """A set's place in memory, its queue, and the passes in flight that its content comes from.

    Attributes:
        model: whose state it holds.
        counted: tokens of all calls so far, run or not, without what `pending` lengths will turn out to have cut.
        buffered: of these, the tokens at the end that a commit may drop.
        guard: callers' threads and the engine's change the counts.
    """

    id: int
    client: int
    model: Served
    state: SetState
    counted: int = 0
    buffered: int = 0
    pending: list[PendingLength] = field(default_factory=list)
    tenant: str = ""
    lane: Lane = field(default_factory=deque)
    sources: set[int] = field(default_factory=set)
    broken: str | None = None
    dropped: bool = False
    guard: threading.Lock = field(default_factory=threading.Lock)

    @property
    def submitted(self) -> int:
        """The next token's position, after all calls so far; the most it can be while a length is pending."""
        return self.counted - sum(length.less for length in list(self.pending))

    @property
    def certain(self) -> int:
        """The least that `submitted` can turn out to be."""
        return self.counted - sum(length.less if length.settled else length.most for length in list(self.pending))

    def grow(self, count: int, *, tentative: bool) -> None:
        with self.guard:
            self.counted += count
            self.buffered += count if tentative else 0

    def shorten(self, length: int) -> None:
        """Exactly `length` tokens, of which fewer are tentative if any were cut."""
        with self.guard:
            cut = self.submitted - length
            self.buffered = max(0, self.buffered - cut)
            self.counted -= cut
            self.pending = [pending for pending in self.pending if pending.settled]

    def expect(self, pending: PendingLength) -> None:
        """Some of the tokens at the end will go, and none is tentative any more."""
        with self.guard:
            while (
                len(self.pending) > MOST_PENDING and self.pending[0].settled
            ):  # long known: nothing in flight counts from it
                self.counted -= self.pending.pop(0).less
            self.pending = [*self.pending, pending]

    def drop(self) -> None:
        """Give its place in memory back, once."""
        if not self.dropped:
            self.dropped = True
            self.model.ledger.drop(self.state)

    def undo(self, before: int, tentative: int) -> None:
        """A pass that had appended when `before` tokens were counted has failed."""
        with self.guard:
            if before < self.counted:
                self.counted = before
                self.buffered = max(0, self.buffered - tentative)


@dataclass(eq=False)
class Pipeline:
    """A domain for closing and cancelling, and the source of random keys: (seed, ordinal of the pass)."""

    id: int
    client: int
    seed: tuple[int, int]
    ordinals: int = 0
    closed: bool = False
    passes: dict[int, Pass] = field(default_factory=dict)  # that have not ended


@dataclass(eq=False)
class Channel:
    """A device-resident bounded queue: a ring of equal cells in the device words.

    `head` and `count` move when effects are dispatched, not when the device gets there: takes and puts are static per pass, so the host
    always knows which cell comes next. `spare` cells keep a taken value intact while passes that may still fail are in flight.
    """

    id: int
    client: int
    type: TensorType
    capacity: int
    offset: int
    spare: int
    head: int = 0
    count: int = 0
    takers: Lane = field(default_factory=deque)
    putters: Lane = field(default_factory=deque)
    last_taker: int = 0  # the latest pass that took a cell
    producers: deque[int] = field(default_factory=deque)  # per full cell, the pass that puts it, or -1 for the host
    poison: str | None = None
    dropped: bool = False

    @property
    def cells(self) -> int:
        return self.capacity + self.spare

    @property
    def words(self) -> int:
        return self.cells * self.type.size

    def cell(self, index: int) -> int:
        """Word offset of the index-th cell counted from the head."""
        return self.offset + ((self.head + index) % self.cells) * self.type.size

    def take(self) -> tuple[int, int]:
        """(offset, producing pass) of the front cell, which is consumed."""
        at = self.cell(0)
        self.head += 1
        self.count -= 1
        return at, self.producers.popleft()

    def untake(self, producer: int) -> None:
        self.head -= 1
        self.count += 1
        self.producers.appendleft(producer)

    def put(self, producer: int) -> int:
        at = self.cell(self.count)
        self.count += 1
        self.producers.append(producer)
        return at


class Status(enum.Enum):
    QUEUED = "queued"
    RUNNING = "running"  # its last launch is in flight
    DONE = "done"
    FAILED = "failed"


@dataclass(eq=False)
class PassRow:
    """One row of a pass on its way.

    Attributes:
        tokens: host tokens, or None when they come from the device.
        total: number of tokens.
        last: tokens that must be in the final launch.
        sight: what its tokens see, if not all before them.
        before: what its set counted before it.
        done: tokens already launched.
        start: the set's length before the pass, once launched; `unknown`: what the device knew better then.
        replaced: the recurrent slot of the set before the pass, once launched; returned on commit.
        anchored: whether the state before it is the one that a commit may go back to.
    """

    set: WorkingSet | None
    tokens: np.ndarray | None
    total: int
    last: int
    sight: Sight | None = None
    before: int = 0
    done: int = 0
    start: int | None = None
    unknown: DeviceLength | None = None
    replaced: int | None = None
    anchored: bool = False

    def begin(self) -> None:
        """Remember what the set is before the pass changes it."""
        if self.set is not None and self.start is None:
            self.start, self.unknown = self.set.state.length, self.set.state.unknown

    @property
    def masked(self) -> bool:
        """Whether it needs a mask bit per token and cell."""
        return self.sight is not None and (self.sight.mask is not None or self.sight.tree is not None)

    @property
    def needs_places(self) -> bool:
        """Whether the host must know the set's exact cells to say what its tokens see."""
        return self.masked or (self.sight is not None and self.sight.spans is not None)


@dataclass(eq=False)
class Pass(Effect):
    """A submitted pass. `depends` holds the passes in flight whose failure would be this one's."""

    ticket: int
    client: int
    model: Served
    pipeline: Pipeline
    request: PassRequest
    rows: list[PassRow]
    entry: ProgramEntry
    channels: tuple[Channel, ...]
    ordinal: int
    read_only: bool
    producers: tuple[Pass | None, ...] = ()  # per row, the pass whose result its tokens are
    embedded: tuple[Channel, ...] = ()  # channels whose front cell is a row's tokens
    status: Status = Status.QUEUED
    lanes: tuple[Lane, ...] = ()
    dead: bool = False
    order: int = 0
    depends: set[int] = field(default_factory=set)
    offsets: tuple[int, ...] = ()  # word offset of each result, once launched
    heirs: list[WorkingSet] = field(default_factory=list)  # sets whose content comes from it while it is in flight
    taken: list[tuple[Channel, int]] = field(default_factory=list)  # channels taken from, with the cell's producer
    wrote: bool = False  # whether cells of channels are set aside for its puts
    pins: int = 0  # passes not yet launched that read its results
    released: bool = False
    lost: str | None = None  # why its results are no longer on the device
    error: PassError | None = None
    learners: list[Learner] = field(default_factory=list)  # lengths that its results decide
    counts: tuple[int | None, ...] = ()  # its scalar integer results, once landed
    params: list[Any] = field(default_factory=list)  # arrays; futures of those that are still to come
    missing: int = 0  # how many are
    lacking: float | None = None  # since when nothing but they keep it waiting

    @property
    def client_id(self) -> int:
        return self.client

    @property
    def readouts(self) -> int:
        readout = self.request.readout
        return len(self.rows) if readout is None else sum(len(indices) for indices in readout)

    @property
    def line(self) -> str | None:
        return self.request.line

    def unpin(self, words: WordFile) -> None:
        """One who was to read its results does not need them any more."""
        self.pins -= 1
        self.free_results(words)

    def free_results(self, words: WordFile) -> None:
        """Return its result words once nobody can read them: no Output is left, no later pass is waiting, it has landed."""
        if self.released and self.pins <= 0 and self.status in (Status.DONE, Status.FAILED) and self.offsets:
            for offset, kind in zip(self.offsets, self.entry.program.results, strict=True):
                if offset >= 0:
                    words.release(offset, kind.size)
            self.offsets = ()


@dataclass(eq=False)
class Fork(Effect):
    parent: WorkingSet
    child: WorkingSet
    lanes: tuple[Lane, ...] = ()

    @property
    def client_id(self) -> int:
        return self.parent.client


@dataclass(eq=False)
class Learner:
    """A device's length that the host will know when a result of a pass lands.

    Attributes:
        ledger: of the set's model, which need not be the pass's.
        index: which result.
        base, base_cells: the cells before are `base` and so many more.
        after, most, moved: see `StepShapes.settle_length`.
    """

    length: DeviceLength
    ledger: StateLedger
    pending: PendingLength
    index: int
    base: DeviceLength | None
    base_cells: int
    after: bool
    most: int
    moved: int

    def learn(self, value: int) -> None:
        """What the device has computed, on the host (see `StepShapes.settle_length`)."""
        base = self.base_cells + (0 if self.base is None else self.base.exact or 0)
        self.length.exact = (
            base + min(max(value, 0), self.most) if self.after else min(base, max(value - self.moved, 0))
        )


@dataclass(eq=False)
class Shorten(Effect):
    """Cut a set.

    Attributes:
        n: to its first n tokens; with `after`, n of its last `most` tokens stay. With a `source`, result `index` of that pass is n.
        commit: whether what is left of the buffered tokens is final now.
        pending: hears how many tokens go.
    """

    set: WorkingSet
    n: int
    after: bool = False
    most: int = 0
    commit: bool = False
    source: Pass | None = None
    index: int = 0
    pending: PendingLength = field(default_factory=PendingLength)
    lanes: tuple[Lane, ...] = ()

    def let_go(self, words: WordFile) -> None:
        if self.source is not None:
            source, self.source = self.source, None
            source.unpin(words)

    @property
    def client_id(self) -> int:
        return self.set.client


@dataclass(eq=False)
class Evict(Effect):
    """Kill the cells at the positions in half-open spans."""

    set: WorkingSet
    spans: tuple[tuple[int, int], ...]
    lanes: tuple[Lane, ...] = ()

    @property
    def client_id(self) -> int:
        return self.set.client


@dataclass(eq=False)
class DropSet(Effect):
    set: WorkingSet
    lanes: tuple[Lane, ...] = ()

    @property
    def client_id(self) -> int:
        return self.set.client


def drop_of(target: WorkingSet) -> DropSet:
    """The effect that gives a set back."""
    return DropSet(target, lanes=(target.lane,))


@dataclass(eq=False)
class HostPut(Effect):
    """A host value for a channel; `replace` overwrites the front cell when there is one."""

    channel: Channel
    words: np.ndarray
    replace: bool
    lanes: tuple[Lane, ...] = ()

    @property
    def client_id(self) -> int:
        return self.channel.client


@dataclass(eq=False)
class HostTake(Effect):
    """The host waits for a channel's front cell; `consume` takes it, otherwise it stays."""

    channel: Channel
    ticket: int
    consume: bool
    lanes: tuple[Lane, ...] = ()

    @property
    def client_id(self) -> int:
        return self.channel.client
