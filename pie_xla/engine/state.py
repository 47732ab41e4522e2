"""Sequence state on the host: which pages and slots a working set holds, and what every cell of them is.

A working set has a length, counted in tokens (the next token's position), and cells, counted in places of its page table. They differ
once cells have been evicted: a page whose cells are all dead leaves the table, the cells behind it move up, and every page keeps the
position of its first cell. Pages and slots are counted by reference; a fork shares them, and the page that both would write next is
copied when one of them does (copy on write). The device arrays are elsewhere (`launcher`): this ledger only decides numbers, so it is
plain arithmetic and exactly accountable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from pie_xla.engine.pools import Pool
from poem.spec import StateGroup, StateKind


@dataclass(eq=False)
class DeviceLength:
    """A number of cells that only the device knows until `exact` has reached the host.

    Attributes:
        word: its place in the device words.
        least, most: what is certain about it.
        holders: the sets that count from it.
        waiting: what happens once it is exact.
    """

    word: int
    least: int
    most: int
    exact: int | None = None
    holders: list[SetState] = field(default_factory=list)
    waiting: list[Callable[[], None]] = field(default_factory=list)


@dataclass
class SetState:
    """One working set's place in memory.

    Attributes:
        cells: places of the table written by dispatched passes; the most there can be while `unknown` is set.
        moved: length - cells, the evicted places before the end.
        unknown: the device's count at some time; `cells - unknown.most` tokens were appended since.
        pages: per paged group, its page numbers in order; 0 where a window group has let a page go.
        bases: per page, the position of its first cell; the same for all groups.
        live: per page, a bit mask of the cells that are not evicted.
        kept: per window group, the pages at the front that have been let go.
        slot: the recurrent slot that holds the state after `cells` tokens; 0 is the zero state.
        anchor: (cells, slot) before the first buffered token, while tokens are buffered.
        tokens: the tokens from position 0 on, as far as the host knows them and nothing but them decides the cells.
        filed: pages of `tokens` known to the prefix cache, from the front.
    """

    cells: int = 0
    moved: int = 0
    unknown: DeviceLength | None = None
    pages: dict[str, list[int]] = field(default_factory=dict)
    bases: list[int] = field(default_factory=list)
    live: list[int] = field(default_factory=list)
    kept: dict[str, int] = field(default_factory=dict)
    slot: int = 0
    anchor: tuple[int, int] | None = None
    tokens: list[int] = field(default_factory=list)
    filed: int = 0

    @property
    def length(self) -> int:
        """The next token's position; the most it can be while `unknown` is set."""
        return self.cells + self.moved

    @property
    def least(self) -> int:
        """The fewest cells there can be."""
        return self.cells if self.unknown is None else self.unknown.least + self.cells - self.unknown.most


@dataclass(frozen=True)
class Reservation:
    """What a pass's row needs from memory before it can run, decided without changing anything."""

    pages: dict[str, int]
    slots: int


@dataclass(frozen=True)
class Copy:
    """A page to duplicate on the device before the launch that writes into it."""

    group: str
    source: int
    target: int


class StateLedger:
    """All pools and the operations on working sets."""

    def __init__(self, groups: Sequence[StateGroup], units: dict[str, int], page_size: int) -> None:
        self.page_size = page_size
        self.all_live = (1 << page_size) - 1
        self.paged = {g.name: Pool(g, units[g.name]) for g in groups if g.kind is StateKind.PAGED}
        self.windows = {name: p.group.window for name, p in self.paged.items() if p.group.window is not None}
        recurrent = [g for g in groups if g.kind is StateKind.RECURRENT]
        # Every recurrent group has the same slot numbers, so one ledger serves them all.
        self.slots = Pool(recurrent[0], units[recurrent[0].name]) if recurrent else None
        self.recurrent = tuple(g.name for g in recurrent)

    def new(self) -> SetState:
        return SetState(pages={name: [] for name in self.paged}, kept=dict.fromkeys(self.windows, 0))

    # -- room ----------------------------------------------------------------------------------------------------

    def needs(self, state: SetState, count: int) -> Reservation:
        """Units that appending `count` tokens takes: new pages, copies of shared tail pages, one slot."""
        size, end = self.page_size, state.cells + count
        first = state.least // size
        pages = {}
        for name, pool in self.paged.items():
            table = state.pages[name]
            n = max(0, -(-end // size) - len(table))
            n += sum(1 for unit in table[first:] if unit and pool.shared(unit)) if count else 0
            pages[name] = n
        return Reservation(pages, 1 if self.slots is not None else 0)

    def most(self, count: int) -> Reservation:
        """Units a set of `count` tokens holds at most; a request beyond the pools' totals can never run."""
        return self.needs(self.new(), count)

    def fits(self, reservation: Reservation, *, empty: bool = False) -> bool:
        for name, n in reservation.pages.items():
            pool = self.paged[name]
            if n > (pool.total if empty else pool.available):
                return False
        return self.slots is None or reservation.slots <= (self.slots.total if empty else self.slots.available)

    # -- growing -------------------------------------------------------------------------------------------------

    def append(self, state: SetState, count: int) -> list[Copy]:
        """Make room for `count` tokens and move the length. The caller has checked `needs`.

        Returns the page copies that must reach the device before the write.
        """
        copies, size = [], self.page_size
        end, first = state.cells + count, state.least // size
        for name, pool in self.paged.items():
            table = state.pages[name]
            for i in range(first, len(table)):
                if table[i] and pool.shared(table[i]):
                    fresh = pool.take()
                    # A page that holds none of our live cells needs no copy, only to stop being shared.
                    if i * size < state.cells:
                        copies.append(Copy(name, table[i], fresh))
                    pool.give(table[i])
                    table[i] = fresh
            while len(table) * size < end:
                table.append(pool.take())
        while self.paged and len(state.bases) * size < end:
            state.bases.append(len(state.bases) * size + state.moved)
            state.live.append(self.all_live)
        state.cells = end
        return copies

    def attach(self, state: SetState, pages: dict[str, int], tokens: Sequence[int]) -> None:
        """Append a full page of somebody else's, which holds exactly these tokens, to a set that ends with a full page."""
        for name, unit in pages.items():
            self.paged[name].share(unit)
            state.pages[name].append(unit)
        state.bases.append(state.length)
        state.live.append(self.all_live)
        state.cells += self.page_size
        state.tokens.extend(tokens)
        state.filed += 1

    def next_slot(self, state: SetState) -> tuple[int, int]:
        """(slot read, slot written) for the next launch; the old slot keeps its reference until the pass commits."""
        if self.slots is None:
            return 0, 0
        before, state.slot = state.slot, self.slots.take()
        return before, state.slot

    def give_slot(self, slot: int) -> None:
        if self.slots is not None and slot:
            self.slots.give(slot)

    def fork(self, state: SetState) -> SetState:
        """A set with the same content; nothing is copied."""
        for name, pool in self.paged.items():
            for unit in state.pages[name]:
                if unit:
                    pool.share(unit)
        if self.slots is not None:
            for slot in (state.slot, state.anchor[1] if state.anchor else 0):
                if slot:
                    self.slots.share(slot)
        child = SetState(
            cells=state.cells,
            moved=state.moved,
            unknown=state.unknown,
            pages={name: list(table) for name, table in state.pages.items()},
            bases=list(state.bases),
            live=list(state.live),
            kept=dict(state.kept),
            slot=state.slot,
            anchor=state.anchor,
            tokens=list(state.tokens),
            filed=state.filed,
        )
        if child.unknown is not None:
            child.unknown.holders.append(child)
        return child

    # -- shrinking -----------------------------------------------------------------------------------------------

    def truncate(self, state: SetState, length: int) -> None:
        """Forget all cells at positions from `length` on and return whole pages beyond them. Recurrent state goes only with the last
        cell. Where the count is unknown, `length` is at most what is certain, and the count is exact afterwards."""
        if length >= state.length:
            return
        state.unknown = None
        if self.paged:
            cells = self._cells_before(state, length)
        else:
            cells = length
        if length == 0:
            self.give_slot(state.slot)
            state.slot = 0
        self._cut(state, cells)
        state.moved = length - cells
        self._forget_tokens(state, length)

    def drop_last(self, state: SetState, count: int) -> None:
        """Forget the last `count` tokens, of those appended since the length was last certain."""
        if count:
            self._cut(state, state.cells - count)
            self._forget_tokens(state, state.length)

    def _forget_tokens(self, state: SetState, length: int) -> None:
        del state.tokens[length:]
        state.filed = min(state.filed, length // self.page_size)

    def _cells_before(self, state: SetState, position: int) -> int:
        """Places of the table that lie before a position."""
        size = self.page_size
        for i in range(min(len(state.bases), -(-state.cells // size)) - 1, -1, -1):
            if state.bases[i] < position:
                return min(state.cells, i * size + min(size, position - state.bases[i]))
        return 0

    def _cut(self, state: SetState, cells: int) -> None:
        """Return the pages beyond the first `cells` places; what is left of the last one is fresh again."""
        size = self.page_size
        keep = -(-cells // size)
        for name, pool in self.paged.items():
            table = state.pages[name]
            for unit in table[keep:]:
                if unit:
                    pool.give(unit)
            del table[keep:]
        del state.bases[keep:], state.live[keep:]
        if cells % size and state.live:
            state.live[-1] |= self.all_live & ~((1 << cells % size) - 1)
        for name in state.kept:
            state.kept[name] = min(state.kept[name], keep)
        state.cells = cells

    def evict(self, state: SetState, spans: Iterable[tuple[int, int]]) -> None:
        """Kill the cells at positions in the half-open spans, and return every page that has no live cell left. The count is exact."""
        size = self.page_size
        for begin, end in spans:
            for i, base in enumerate(state.bases):
                low, high = max(begin - base, 0), min(end - base, size, state.cells - i * size)
                if low < high:
                    state.live[i] &= ~(((1 << high - low) - 1) << low)
            self._forget_tokens(state, begin)
        full = state.cells // size
        gone = [i for i in range(full) if not state.live[i]]
        for i in reversed(gone):
            for name, pool in self.paged.items():
                unit = state.pages[name].pop(i)
                if unit:
                    pool.give(unit)
            for name, kept in state.kept.items():
                state.kept[name] = kept - (i < kept)
            del state.bases[i], state.live[i]
        state.cells -= len(gone) * size
        state.moved += len(gone) * size

    def shorten(self, state: SetState, length: DeviceLength) -> None:
        """From now on the set has as many cells as only the device knows."""
        state.unknown = length
        length.holders.append(state)
        self._forget_tokens(state, length.least + state.moved)

    def resolve(self, length: DeviceLength) -> None:
        """The host has learned a device's length: sets that count from it know their cells exactly again."""
        assert length.exact is not None
        for state in length.holders:
            if state.unknown is length:
                state.unknown = None
                if length.exact < length.most:
                    self._cut(state, state.cells - (length.most - length.exact))
        length.holders.clear()

    def rewind(self, state: SetState, length: int, unknown: DeviceLength | None) -> None:
        """Go back to what `length` and `unknown` were at an earlier time."""
        if unknown is not None and unknown.exact is not None:
            length -= unknown.most - unknown.exact
            unknown = None
        self.truncate(state, length)
        state.unknown = unknown

    def slide(self, state: SetState, length: int) -> None:
        """Return the pages of window groups that no position from `length` on can see."""
        for name, window in self.windows.items():
            table, i = state.pages[name], state.kept[name]
            while i < len(table) and state.bases[i] + self.page_size <= length - window:
                if table[i]:
                    self.paged[name].give(table[i])
                    table[i] = 0
                i += 1
            state.kept[name] = i

    def floor(self, state: SetState, name: str) -> int:
        """The first position that a window group still keeps."""
        kept = state.kept[name]
        return state.bases[kept - 1] + self.page_size if kept else 0

    def window_start(self, length: int, window: int) -> int:
        """The first page that a token at position `length` or later can see, counted from position 0."""
        return max(0, length - window) // self.page_size

    # -- recurrent state that may be taken back --------------------------------------------------------------------

    def anchor(self, state: SetState, cells: int, slot: int) -> bool:
        """Remember the state before the first buffered token; False when one is remembered already."""
        if self.slots is None or state.anchor is not None:
            return False
        if slot:
            self.slots.share(slot)
        state.anchor = (cells, slot)
        return True

    def release_anchor(self, state: SetState, *, restore: bool) -> None:
        """End buffering: keep the state after it, or go back to the one before."""
        if state.anchor is None:
            return
        _, slot = state.anchor
        state.anchor = None
        if restore:
            slot, state.slot = state.slot, slot
        self.give_slot(slot)

    # -- the end ---------------------------------------------------------------------------------------------------

    def drop(self, state: SetState) -> None:
        """Give everything back."""
        self.release_anchor(state, restore=False)
        self._cut(state, 0)
        self.give_slot(state.slot)
        state.slot, state.moved, state.unknown = 0, 0, None
        state.tokens, state.filed = [], 0

    def balance(self) -> dict[str, tuple[int, int, int]]:
        """Per group (free, used, total), where what is cached counts as free: it is given to whoever asks."""
        pools = dict(self.paged)
        if self.slots is not None:
            pools["slots"] = self.slots
        return {name: (p.available, p.used, p.total) for name, p in pools.items()}

    def cached(self) -> dict[str, int]:
        """Per paged group, units that only the prefix cache holds."""
        return {name: pool.cached for name, pool in self.paged.items()}
