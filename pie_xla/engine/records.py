"""What the engine keeps of each pass, working set, channel and pipeline, and the queues that order them.

One mechanism orders everything: a `Lane` is a queue of effects, an effect stands in the lane of everything it touches, and runs when it
is first in all of them. A working set has one lane. A channel has two, because its producer and its consumer do not wait for each
other's calls, only for cells.
"""

from __future__ import annotations

import enum
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from pie_xla.engine.api import PassError, PassRequest
from pie_xla.engine.state import SetState
from pie_xla.eta.types import TensorType

if TYPE_CHECKING:
    from pie_xla.engine.programs import ProgramEntry

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


@dataclass(eq=False)
class WorkingSet:
    """A set's place in memory, its queue, and the passes in flight that its content comes from.

    `submitted` counts the tokens of all calls so far, run or not; it is the next token's position.
    """

    id: int
    client: int
    state: SetState
    submitted: int = 0
    lane: Lane = field(default_factory=deque)
    sources: set[int] = field(default_factory=set)
    broken: str | None = None
    dropped: bool = False


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
        before: the set's length after all calls before this one.
        done: tokens already launched.
        start: the set's length before the pass, once launched.
        replaced: the recurrent slot of the set before the pass, once launched; returned on commit.
    """

    set: WorkingSet | None
    tokens: np.ndarray | None
    total: int
    last: int
    before: int = 0
    done: int = 0
    start: int | None = None
    replaced: int | None = None


@dataclass(eq=False)
class Pass(Effect):
    """A submitted pass. `depends` holds the passes in flight whose failure would be this one's."""

    ticket: int
    client: int
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


@dataclass(eq=False)
class Fork(Effect):
    parent: WorkingSet
    child: WorkingSet
    lanes: tuple[Lane, ...] = ()

    @property
    def client_id(self) -> int:
        return self.parent.client


@dataclass(eq=False)
class Truncate(Effect):
    set: WorkingSet
    cells: int
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
