"""Prefixes that sets share: found by their tokens (automatic), or by the name that somebody gave them."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING

from pie_xla.engine.prefixes import Node, Page, PrefixTree
from pie_xla.engine.records import Pass, PassRow, Status, WorkingSet
from pie_xla.engine.state import SetState, StateLedger

if TYPE_CHECKING:
    from pie_xla.engine.served import Served


class SharedPrefixes:
    """Gives passes the pages that others have computed for the same tokens, and lets them wait for those that somebody computes now."""

    def __init__(self, ledger: StateLedger, enabled: bool) -> None:
        self._ledger = ledger
        self.tree = PrefixTree(ledger, enabled)
        self._computing: dict[tuple[Node, Page], Pass] = {}

    def ready(self, item: Pass) -> bool:
        """Attach what is known of the pass's first tokens; False while somebody else computes the next of them."""
        if not self.tree.enabled:
            return True
        waits = False
        for row in item.rows:
            waits = self._waits(item, row) or waits
        return not waits

    def _waits(self, item: Pass, row: PassRow) -> bool:
        size = self._ledger.page_size
        if row.done or row.set is None or row.tokens is None or row.sight is not None or row.total - row.last < size:
            return False
        state = row.set.state
        if state.cells % size or state.moved or state.unknown is not None or len(state.tokens) != state.cells:
            return False
        most = row.total - row.last
        tokens = row.tokens[:most].tolist()
        node, path = self.tree.match(row.set.tenant, state.tokens, tokens)
        end, at = path[-1] if path else node, len(path) * size
        following = tuple(tokens[at : at + size])
        if len(following) == size:
            other = self._computing.get((end, following))
            if other is not None and other is not item and other.status in (Status.QUEUED, Status.RUNNING):
                return True
            self._computing[end, following] = item
        if path:
            row.begin()
            for found in path:
                self._ledger.attach(state, found.pages, found.tokens)
            row.done = at
            self.tree.hits += at
            self.tree.touch(end)
        return False

    def file(self, tenant: str, state: SetState, length: int) -> None:
        """Let others have the set's pages up to `length` tokens."""
        self.tree.file(tenant, state, length)
        if self._computing:
            over = (Status.DONE, Status.FAILED)
            self._computing = {key: item for key, item in self._computing.items() if item.status not in over}

    def clear(self) -> None:
        self.tree.clear()
        self._computing.clear()


class NamedPrefixes:
    """Sets that were published under a name, per tenant and model; those not opened for longest go first.

    Args:
        most: how many are kept.
        drop: gives a set back once the calls so far have been served. From any thread.
    """

    def __init__(self, most: int, drop: Callable[[WorkingSet], None]) -> None:
        self._most, self._drop = most, drop
        self._sets: OrderedDict[tuple[str, str, str], WorkingSet] = OrderedDict()  # tenant, model, name
        self._lock = threading.Lock()

    def publish(self, tenant: str, name: str, made: WorkingSet) -> None:
        with self._lock:
            gone = [self._sets.pop((tenant, made.model.name, name), None)]
            self._sets[tenant, made.model.name, name] = made
            if len(self._sets) > self._most:
                gone.append(self._sets.popitem(last=False)[1])
        self._drop_all(gone)

    def open(self, tenant: str, model: str, name: str) -> WorkingSet | None:
        with self._lock:
            found = self._sets.get((tenant, model, name))
            if found is None or found.broken is not None:
                return None
            self._sets.move_to_end((tenant, model, name))
            return found

    def withdraw(self, tenant: str, model: str, name: str) -> bool:
        with self._lock:
            gone = self._sets.pop((tenant, model, name), None)
        self._drop_all([gone])
        return gone is not None

    def make_room(self, model: Served) -> bool:
        """Drop one, for those who wait for memory of its model; False when there is none."""
        with self._lock:
            key = next((key for key, made in self._sets.items() if made.model is model), None)
            gone = None if key is None else self._sets.pop(key)
        self._drop_all([gone])
        return gone is not None

    def lose(self, model: Served, cause: str) -> None:
        """The device has lost all of a model's."""
        with self._lock:
            gone = [made for made in self._sets.values() if made.model is model]
            self._sets = OrderedDict((key, made) for key, made in self._sets.items() if made.model is not model)
        for made in gone:
            made.broken = cause
        self._drop_all(list(gone))

    def names(self, tenant: str, model: str) -> list[str]:
        with self._lock:
            return [name for owner, of, name in self._sets if (owner, of) == (tenant, model)]

    def _drop_all(self, gone: list[WorkingSet | None]) -> None:
        for made in gone:
            if made is not None:
                self._drop(made)
