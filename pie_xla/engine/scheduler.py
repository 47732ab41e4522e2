"""`schedule(view) -> Plan`: what runs next, as a pure function.

There are no phases. Every pass just has, per row, tokens not yet computed; a launch computes some of them. A row with one token left and a
row with a thousand differ only in the bucket they fall into. Executables that are not compiled yet are an input, so the same view gives
the same plan on every host of a pod.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from pie_xla.engine.buckets import Bucket, Buckets


@dataclass(frozen=True)
class RowView:
    """One row of a ready pass.

    Attributes:
        remaining: tokens not yet computed.
        last: tokens that must be in the final launch (1, or more when earlier positions are read out).
        cells: tokens already in the set.
        held: pages of the set, per paged group.
        shared: held pages at or after the write position that a fork shares, per paged group; each costs one page to copy.
    """

    remaining: int
    last: int
    cells: int
    held: Mapping[str, int]
    shared: Mapping[str, int]


@dataclass(frozen=True)
class PassView:
    """A pass whose inputs are on the device or in hand, and whose turn it is on all of its sets.

    Attributes:
        order: submission order over all clients.
        served: tokens this pass's client has been given so far; the least served goes first.
        readouts: readout positions over all rows.
        masked: some row has a mask bit per token and cell.
        stages: key of its program where that has layer stages; its last launch is then shared only by passes of that program.
    """

    id: int
    order: int
    served: int
    rows: tuple[RowView, ...]
    readouts: int
    masked: bool = False
    stages: str | None = None


@dataclass(frozen=True)
class View:
    """Everything a plan depends on.

    Attributes:
        passes: ready passes.
        ready: buckets whose step executable is compiled.
        free: free units per paged group, and of recurrent slots under the name "slots".
        page_size: tokens per page.
        tapped: per program with layer stages, the buckets that it is compiled for.
    """

    passes: tuple[PassView, ...]
    ready: frozenset[Bucket]
    free: Mapping[str, int]
    page_size: int
    tapped: Mapping[str, frozenset[Bucket]] = field(default_factory=dict)


@dataclass(frozen=True)
class Item:
    """Compute `count` tokens of a row; `final` when all rows of the pass end in this launch and its epilogue runs."""

    pass_id: int
    row: int
    count: int
    final: bool


@dataclass(frozen=True)
class Launch:
    """`stages`: key of the program whose layer stages run in it."""

    bucket: Bucket
    items: tuple[Item, ...]
    stages: str | None = None


@dataclass(frozen=True)
class Plan:
    """Launches in order; buckets that would have fitted better but are not compiled, alone and with layer stages; passes that wait for
    memory."""

    launches: tuple[Launch, ...]
    wishes: tuple[Bucket, ...]
    starved: tuple[int, ...]
    tapped_wishes: tuple[tuple[str, Bucket], ...] = ()


def schedule(view: View, buckets: Buckets) -> Plan:
    """One launch of one-token rows and one of longer rows, each as full as its bucket, the rows and the memory allow; and one per program
    with layer stages whose passes have only their last tokens left."""
    budget = _Memory(view)
    launches: list[Launch] = []
    wishes: list[Bucket] = []
    queue = sorted(view.passes, key=lambda p: (p.served, p.order))
    ending: dict[str, list[PassView]] = {}
    for p in queue:
        if p.stages is not None and all(row.remaining == row.last for row in p.rows):
            ending.setdefault(p.stages, []).append(p)
    ends = {p.id for passes in ending.values() for p in passes}
    rest = [p for p in queue if p.id not in ends]
    short = [p for p in rest if all(row.remaining == 1 for row in p.rows)]
    long = [p for p in rest if any(row.remaining > 1 for row in p.rows)]
    for launch in (
        _short_launch(short, view, buckets, budget, wishes),
        _long_launch(long, view, buckets, budget, wishes),
    ):
        if launch is not None:
            launches.append(launch)
    tapped_wishes: list[tuple[str, Bucket]] = []
    for stages, passes in ending.items():
        compiled = replace(view, ready=view.tapped.get(stages, frozenset()))
        wanted: list[Bucket] = []
        launch = _ending_launch(passes, compiled, buckets, budget, wanted)
        tapped_wishes += [(stages, bucket) for bucket in dict.fromkeys(wanted)]
        if launch is not None:
            launches.append(replace(launch, stages=stages))
    return Plan(tuple(launches), tuple(dict.fromkeys(wishes)), tuple(budget.starved), tuple(tapped_wishes))


def _ending_launch(
    queue: list[PassView], view: View, buckets: Buckets, budget: _Memory, wishes: list[Bucket]
) -> Launch | None:
    """The last tokens of passes of one program with layer stages, of which `view.ready` has the executables."""
    short = [p for p in queue if all(row.remaining == 1 for row in p.rows)]
    if short:
        return _short_launch(short, view, buckets, budget, wishes)
    head = queue[0]
    longest = max(row.remaining for row in head.rows)
    return _final_launch(head, longest, [head], view, buckets, budget, wishes)


class _Memory:
    """Free units while a plan is being made."""

    def __init__(self, view: View) -> None:
        self._free = dict(view.free)
        self._page_size = view.page_size
        self.starved: list[int] = []

    def admit(self, item: PassView, counts: Iterable[tuple[RowView, int]]) -> bool:
        need: dict[str, int] = {}
        for row, count in counts:
            for name, held in row.held.items():
                new = max(0, -(-(row.cells + count) // self._page_size) - held) + row.shared[name]
                need[name] = need.get(name, 0) + new
            if "slots" in self._free:
                need["slots"] = need.get("slots", 0) + 1
        if any(n > self._free[name] for name, n in need.items()):
            self.starved.append(item.id)
            return False
        for name, n in need.items():
            self._free[name] -= n
        return True


def _choose(view: View, fitting: list[Bucket], wishes: list[Bucket]) -> Bucket | None:
    """The best compiled bucket; the best of all is wished for when it is another."""
    if not fitting:
        return None
    if fitting[0] not in view.ready:
        wishes.append(fitting[0])
    return next((b for b in fitting if b in view.ready), None)


def _short_launch(
    queue: list[PassView], view: View, buckets: Buckets, budget: _Memory, wishes: list[Bucket]
) -> Launch | None:
    if not queue:
        return None
    limit = buckets.decode[-1].rows
    rows = readouts = 0
    chosen: list[PassView] = []
    for item in queue:
        if rows + len(item.rows) <= limit:
            chosen.append(item)
            rows += len(item.rows)
            readouts += item.readouts
    # Without an executable for all of them, run as many as the largest compiled bucket holds; those with masks wait for theirs.
    while chosen:
        masked = any(p.masked for p in chosen)
        bucket = _choose(view, buckets.fitting(rows, 1, readouts, masked), wishes)
        if bucket is not None:
            break
        dropped = chosen.pop(max(i for i, p in enumerate(chosen) if p.masked == masked))
        rows -= len(dropped.rows)
        readouts -= dropped.readouts
    else:
        return None
    admitted = [p for p in chosen if budget.admit(p, [(row, 1) for row in p.rows])]
    if not admitted:
        return None
    items = tuple(Item(p.id, i, 1, True) for p in admitted for i in range(len(p.rows)))
    masked = any(p.masked for p in admitted)
    smaller = [b for b in buckets.fitting(len(items), 1, sum(p.readouts for p in admitted), masked) if b in view.ready]
    return Launch(smaller[0] if smaller else bucket, items)


def _long_launch(
    queue: list[PassView], view: View, buckets: Buckets, budget: _Memory, wishes: list[Bucket]
) -> Launch | None:
    for head in queue:
        if head.stages is not None:  # all but its last tokens go as anybody's
            launch = _chunk_launch(head, view, buckets, budget, wishes)
            if launch is not None:
                return launch
            continue
        longest = max(row.remaining for row in head.rows)
        fitting = buckets.fitting(len(head.rows), max(longest, 2), head.readouts, head.masked)
        if any(b in view.ready for b in fitting):
            return _final_launch(head, longest, queue, view, buckets, budget, wishes)
        wishes.extend(fitting[:1])
        launch = _chunk_launch(head, view, buckets, budget, wishes)
        if launch is not None:
            return launch
    return None


def _final_launch(
    head: PassView,
    longest: int,
    queue: list[PassView],
    view: View,
    buckets: Buckets,
    budget: _Memory,
    wishes: list[Bucket],
) -> Launch | None:
    """The head whole, and with it others that fit beside it in a bucket of more rows."""
    chosen, rows, readouts, masked = [head], len(head.rows), head.readouts, head.masked
    bucket = _choose(view, buckets.fitting(rows, max(longest, 2), readouts, masked), wishes)
    for other in queue:
        if other is head or other.stages is not None:
            continue
        most = max(longest, max(row.remaining for row in other.rows))
        either = masked or other.masked
        wider = buckets.fitting(rows + len(other.rows), max(most, 2), readouts + other.readouts, either)
        # Worth it only while sharing a launch pads no more than the two launches would.
        alone = buckets.fitting(len(other.rows), max(2, max(row.remaining for row in other.rows)), other.readouts)
        if not wider or (bucket and alone and wider[0].area > 2 * (bucket.area + alone[0].area)):
            continue
        candidate = _choose(view, wider, wishes)
        if candidate is None:
            continue
        bucket, masked = candidate, either
        chosen.append(other)
        rows, readouts, longest = rows + len(other.rows), readouts + other.readouts, most
    if bucket is None:
        return None
    admitted = [p for p in chosen if budget.admit(p, [(row, row.remaining) for row in p.rows])]
    items = tuple(Item(p.id, i, row.remaining, True) for p in admitted for i, row in enumerate(p.rows))
    return Launch(bucket, items) if items else None


def _chunk_launch(head: PassView, view: View, buckets: Buckets, budget: _Memory, wishes: list[Bucket]) -> Launch | None:
    """Some tokens of the head's longest row, leaving its last ones for the launch in which all of its rows end."""
    index, row = max(enumerate(head.rows), key=lambda pair: pair[1].remaining - pair[1].last)
    count = min(buckets.chunk, row.remaining - row.last)
    if count <= 0:
        return None
    ready = [b for b in (replace(b, masked=head.masked) for b in buckets.prefill) if b.rows == 1 and b in view.ready]
    bucket = _choose(view, buckets.fitting(1, max(count, 2), 1, head.masked), wishes)
    if bucket is None:
        if not ready:
            return None
        bucket = ready[-1]
        count = min(count, bucket.tokens)
    if not budget.admit(head, [(row, count)]):
        return None
    return Launch(bucket, (Item(head.id, index, count, False),))
