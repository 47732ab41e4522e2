"""Units (pages or slots) of one state group, counted by reference."""

from __future__ import annotations

from collections.abc import Callable

from poem.spec import StateGroup


class Pool:
    """Unit 0 is the dummy that padding rows point at. A unit is free, cached (only the prefix cache holds it, and gives it back when
    asked), or used; free + cached + used == total.

    Args:
        reclaim: gives back some cached unit when none is free; set by who caches.
    """

    def __init__(self, group: StateGroup, units: int) -> None:
        self.group = group
        self.units = units
        self.reclaim: Callable[[], None] = _nothing_cached
        self._free = list(range(units - 1, 0, -1))
        self._refs = [0] * units
        self._kept = bytearray(units)  # 1: one of its references is the cache's
        self.cached = 0

    @property
    def total(self) -> int:
        return self.units - 1

    @property
    def free(self) -> int:
        """Units nobody holds."""
        return len(self._free)

    @property
    def available(self) -> int:
        """Units that can be taken: free or cached."""
        return len(self._free) + self.cached

    @property
    def used(self) -> int:
        return self.total - self.free - self.cached

    def take(self) -> int:
        while not self._free:
            self.reclaim()
        unit = self._free.pop()
        self._refs[unit] = 1
        return unit

    def share(self, unit: int) -> None:
        if self._kept[unit] and self._refs[unit] == 1:
            self.cached -= 1
        self._refs[unit] += 1

    def shared(self, unit: int) -> bool:
        return self._refs[unit] > 1

    def give(self, unit: int) -> None:
        self._refs[unit] -= 1
        if self._refs[unit] == 0:
            self._free.append(unit)
        elif self._refs[unit] == 1 and self._kept[unit]:
            self.cached += 1

    def keep(self, unit: int) -> None:
        """The cache takes a reference of its own; it has none yet, since whoever writes into a shared page writes into a copy."""
        assert not self._kept[unit]
        self.share(unit)
        self._kept[unit] = 1

    def unkeep(self, unit: int) -> None:
        """The cache gives its reference back."""
        if self._refs[unit] == 1:
            self.cached -= 1
        self._kept[unit] = 0
        self.give(unit)


def _nothing_cached() -> None:
    raise IndexError("no unit is free or cached: the plan has promised more than there is")
