"""Sequence state on the host: page pools, recurrent slots, and the working sets that own them.

A working set is a length and, per state group of the model, either a page table or a recurrent slot. Pages and slots are counted by
reference; a fork shares them, and the page that both would write next is copied when one of them does (copy on write).
The device arrays are elsewhere (`launcher`): this ledger only decides unit numbers, so it is plain arithmetic and exactly accountable.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from poem.spec import StateGroup, StateKind


class Pool:
    """Units (pages or slots) of one state group. Unit 0 is the dummy that padding rows point at."""

    def __init__(self, group: StateGroup, units: int) -> None:
        self.group = group
        self.units = units
        self._free = list(range(units - 1, 0, -1))
        self._refs = [0] * units

    @property
    def total(self) -> int:
        return self.units - 1

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def used(self) -> int:
        return sum(1 for count in self._refs if count)

    def take(self) -> int:
        unit = self._free.pop()
        self._refs[unit] = 1
        return unit

    def share(self, unit: int) -> None:
        self._refs[unit] += 1

    def shared(self, unit: int) -> bool:
        return self._refs[unit] > 1

    def give(self, unit: int) -> None:
        self._refs[unit] -= 1
        if self._refs[unit] == 0:
            self._free.append(unit)


@dataclass
class SetState:
    """One working set's place in memory.

    Attributes:
        cells: tokens written by dispatched passes.
        pages: per paged group, its page numbers in order; 0 stands where a window group has let a page go.
        floor: per windowed group, the first position still kept.
        slot: the recurrent slot that holds the state after `cells` tokens; 0 is the zero state.
    """

    cells: int = 0
    pages: dict[str, list[int]] = field(default_factory=dict)
    floor: dict[str, int] = field(default_factory=dict)
    slot: int = 0


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
        self.paged = {g.name: Pool(g, units[g.name]) for g in groups if g.kind is StateKind.PAGED}
        recurrent = [g for g in groups if g.kind is StateKind.RECURRENT]
        # Every recurrent group has the same slot numbers, so one ledger serves them all.
        self.slots = Pool(recurrent[0], units[recurrent[0].name]) if recurrent else None
        self.recurrent = tuple(g.name for g in recurrent)

    def new(self) -> SetState:
        return SetState(pages={name: [] for name in self.paged}, floor=dict.fromkeys(self.paged, 0))

    def needs(self, state: SetState, count: int) -> Reservation:
        """Units that appending `count` tokens takes: new pages, a copy of a shared tail page, one slot."""
        size, end = self.page_size, state.cells + count
        pages = {}
        for name, pool in self.paged.items():
            table = state.pages[name]
            n = max(0, -(-end // size) - len(table))
            first = state.cells // size
            n += sum(1 for unit in table[first:] if unit and pool.shared(unit)) if count else 0
            pages[name] = n
        return Reservation(pages, 1 if self.slots is not None else 0)

    def most(self, count: int) -> Reservation:
        """Units a set of `count` tokens holds at most; a request beyond the pools' totals can never run."""
        return self.needs(self.new(), count)

    def fits(self, reservation: Reservation, *, empty: bool = False) -> bool:
        for name, n in reservation.pages.items():
            pool = self.paged[name]
            if n > (pool.total if empty else pool.free):
                return False
        return self.slots is None or reservation.slots <= (self.slots.total if empty else self.slots.free)

    def append(self, state: SetState, count: int) -> list[Copy]:
        """Make room for `count` tokens and move the length. The caller has checked `needs`.

        Returns the page copies that must reach the device before the write.
        """
        copies, size = [], self.page_size
        end = state.cells + count
        for name, pool in self.paged.items():
            table = state.pages[name]
            for i in range(state.cells // size, len(table)):
                if table[i] and pool.shared(table[i]):
                    fresh = pool.take()
                    # A page that holds none of our live cells needs no copy, only to stop being shared.
                    if i * size < state.cells:
                        copies.append(Copy(name, table[i], fresh))
                    pool.give(table[i])
                    table[i] = fresh
            while len(table) * size < end:
                table.append(pool.take())
        state.cells = end
        return copies

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
        if self.slots is not None and state.slot:
            self.slots.share(state.slot)
        pages = {name: list(table) for name, table in state.pages.items()}
        return SetState(state.cells, pages, dict(state.floor), state.slot)

    def truncate(self, state: SetState, cells: int) -> None:
        """Forget all cells from `cells` on and return whole pages beyond them. Recurrent state goes only with the last cell."""
        keep = -(-cells // self.page_size)
        if cells == 0:
            self.give_slot(state.slot)
            state.slot = 0
        for name, pool in self.paged.items():
            table = state.pages[name]
            for unit in table[keep:]:
                if unit:
                    pool.give(unit)
            del table[keep:]
            state.floor[name] = min(state.floor[name], len(table) * self.page_size)
        state.cells = cells

    def slide(self, state: SetState, cells: int) -> None:
        """Return the pages of window groups that no position from `cells` on can see."""
        for name, pool in self.paged.items():
            window = pool.group.window
            if window is None:
                continue
            first = self.window_start(cells, window)
            for i in range(state.floor[name] // self.page_size, min(first, len(state.pages[name]))):
                if state.pages[name][i]:
                    pool.give(state.pages[name][i])
                    state.pages[name][i] = 0
            state.floor[name] = max(state.floor[name], first * self.page_size)

    def window_start(self, cells: int, window: int) -> int:
        """The first page that a token at position `cells` or later can see."""
        return max(0, cells - window) // self.page_size

    def drop(self, state: SetState) -> None:
        """Give everything back."""
        for name, pool in self.paged.items():
            for unit in state.pages[name]:
                if unit:
                    pool.give(unit)
            state.pages[name] = []
        self.give_slot(state.slot)
        state.slot = 0
        state.cells = 0

    def balance(self) -> dict[str, tuple[int, int, int]]:
        """Per group (free, used, total); free + used == total always."""
        pools = dict(self.paged)
        if self.slots is not None:
            pools["slots"] = self.slots
        return {name: (p.free, p.used, p.total) for name, p in pools.items()}
