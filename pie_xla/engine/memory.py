"""How much memory the state pools may take, and how it is split among a model's state groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax

from pie_xla.errors import PieError
from poem.spec import StateGroup, StateKind

SHARE = 0.25  # of the memory that is free once the weights are loaded
MOST = 1 << 29
RECURRENT_SHARE = 0.25
MOST_SLOTS = 256


@dataclass(frozen=True)
class StatePlan:
    """Units per group (the dummy included), and what they come to."""

    units: dict[str, int]
    bytes: int
    tokens: int

    def __str__(self) -> str:
        text = f"state: {self.bytes / 2**20:,.0f} MiB"
        return text + (f", {self.tokens:,} tokens" if self.tokens else "")


def plan_state(groups: Sequence[StateGroup], state_bytes: int | None, page_size: int) -> StatePlan:
    """Pools for `state_bytes`, or for a share of what is free.

    Raises:
        PieError: not even one page (and one slot) fits.
    """
    budget = state_bytes if state_bytes is not None else min(MOST, int(SHARE * free_bytes()))
    paged = [g for g in groups if g.kind is StateKind.PAGED]
    recurrent = [g for g in groups if g.kind is StateKind.RECURRENT]
    units: dict[str, int] = {}
    left = budget
    if recurrent:
        per_slot = sum(g.bytes_per_unit for g in recurrent)
        share = int(budget * (RECURRENT_SHARE if paged else 1.0))
        slots = min(MOST_SLOTS, share // per_slot)
        units |= {g.name: slots for g in recurrent}
        left -= slots * per_slot
    pages = left // sum(g.bytes_per_unit for g in paged) if paged else 0
    units |= {g.name: pages for g in paged}
    if any(n < 2 for n in units.values()):
        needed = sum(2 * g.bytes_per_unit for g in groups)
        raise PieError(
            f"{budget / 2**20:,.1f} MiB for state is less than the {needed / 2**20:,.1f} MiB that one page and one slot take",
            "raise [engine] kv_memory, or free memory",
        )
    used = sum(units[g.name] * g.bytes_per_unit for g in groups)
    return StatePlan(units, used, (pages - 1) * page_size if paged else 0)


def free_bytes() -> int:
    """Bytes free on the first device; on CPU, of the machine."""
    stats = jax.devices()[0].memory_stats()
    if stats and "bytes_limit" in stats:
        return int(stats["bytes_limit"] - stats.get("bytes_in_use", 0))
    with open("/proc/meminfo") as info:
        for line in info:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    raise PieError("cannot tell how much memory is free", "set [engine] kv_memory")
