"""How much memory the state pools may take, and how it is split among a model's state groups."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax

from pie_xla.errors import PieError
from poem.spec import StateGroup, StateKind

if TYPE_CHECKING:
    from pie_xla.engine.api import EngineOptions, LoadedModel

SHARE = 0.25  # of the memory that is free once the weights are loaded
MOST = 1 << 29
RECURRENT_SHARE = 0.25
MOST_SLOTS = 256
TYPICAL_TOKENS = 1024  # of a sequence, when models share the memory


@dataclass(frozen=True)
class StatePlan:
    """Units per group (the dummy included), and what they come to."""

    units: dict[str, int]
    bytes: int
    tokens: int

    def __str__(self) -> str:
        text = f"state: {self.bytes / 2**20:,.0f} MiB"
        return text + (f", {self.tokens:,} tokens" if self.tokens else "")


def plan_states(models: Sequence[LoadedModel], options: EngineOptions) -> list[StatePlan]:
    """Pools for every model: as it asks, or its share of what is left, so that the same sequences fit into each.

    Raises:
        PieError: not even one page (and one slot) of a model fits.
    """
    total = options.state_bytes if options.state_bytes is not None else default_bytes()
    asked = sum(model.state_bytes or 0 for model in models)
    if asked > total and any(model.state_bytes is None for model in models):
        raise PieError(
            f"models ask for {asked / 2**20:,.1f} MiB of their own for state; there are {total / 2**20:,.1f} MiB for all",
            "raise [engine] kv_memory, or lower the kv_memory of models in [models]",
        )
    weights = {m.name: sequence_bytes(m.lowered.groups) for m in models if m.state_bytes is None}
    plans = []
    for model in models:
        size = model.lowered.facts.page_size
        share = model.state_bytes
        if share is None:
            share = max(0, total - asked) * weights[model.name] // max(1, sum(weights.values()))
        plans.append(plan_state(model.lowered.groups, share, size, model.name))
    return plans


def sequence_bytes(groups: Sequence[StateGroup], tokens: int = TYPICAL_TOKENS) -> int:
    """What one sequence of so many tokens holds."""
    return sum(g.bytes_per_unit * (-(-tokens // g.page_size) if g.kind is StateKind.PAGED else 1) for g in groups)


def default_bytes() -> int:
    """For state, when nobody says how much: a share of what is free."""
    return min(MOST, int(SHARE * free_bytes()))


def plan_state(groups: Sequence[StateGroup], state_bytes: int | None, page_size: int, name: str = "") -> StatePlan:
    """Pools for `state_bytes`, or for a share of what is free; `name`: the model's, for errors.

    Raises:
        PieError: not even one page (and one slot) fits.
    """
    budget = state_bytes if state_bytes is not None else default_bytes()
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
        whose = f" of {name}" if name else ""
        raise PieError(
            f"{budget / 2**20:,.1f} MiB for state{whose} is less than the {needed / 2**20:,.1f} MiB that one page and one slot take",
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


def return_free_memory() -> None:
    """Give the system back what loading or compiling has freed (some 60 MB after a burst of programs); only glibc keeps any."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError):
        return
