"""What waits and what is in flight: the lanes that hold effects, and the passes whose last launch has not landed."""

from __future__ import annotations

import itertools

from pie_xla.engine.records import Effect, Lane, Pass


class Agenda:
    """See the module. Belongs to the engine's thread.

    Attributes:
        running: passes whose last launch is in flight, by order of call.
    """

    def __init__(self) -> None:
        self.running: dict[int, Pass] = {}
        self._lanes: dict[int, Lane] = {}  # lanes with something in them
        self._loose: dict[int, Pass] = {}  # passes that touch no set and no channel, by order
        self._orders = itertools.count(1)

    def add(self, effect: Effect) -> None:
        """Number an effect and let it stand in its lanes."""
        effect.order = next(self._orders)
        if isinstance(effect, Pass) and not effect.lanes:
            self._loose[effect.order] = effect
        effect.enter()
        for lane in effect.lanes:
            self._lanes[id(lane)] = lane

    def forget(self, item: Pass) -> None:
        """A pass without lanes waits no more."""
        self._loose.pop(item.order, None)

    def heads(self) -> list[Effect]:
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

    def waiting(self) -> list[Effect]:
        """Every effect that has not happened."""
        waiting: dict[int, Effect] = {id(item): item for item in self._loose.values() if not item.dead}
        for lane in self._lanes.values():
            waiting |= {id(effect): effect for effect in lane if not effect.dead}
        return list(waiting.values())

    def passes_of(self, client: int) -> list[Pass]:
        """A client's passes, waiting and in flight."""
        queued = [e for e in self.waiting() if isinstance(e, Pass) and e.client == client]
        return [*queued, *(item for item in self.running.values() if item.client == client)]

    @property
    def empty(self) -> bool:
        return not self._lanes and not self._loose
