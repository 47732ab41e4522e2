"""Automatic prefix sharing: a radix tree of full pages, keyed by the tokens that lead to them.

A node is one page of every paged group. The tree holds a reference of its own to each of its pages; those that nobody else holds are
cached, and the least recently used go first when a pool has nothing else to give. A page's content depends on all tokens before it, which
is what a path from a root says; there is one root per tenant, so nobody can probe what others have asked.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from pie_xla.engine.state import SetState, StateLedger

Page = tuple[int, ...]  # its tokens


@dataclass(eq=False)
class Node:
    """A full page after the tokens of its ancestors."""

    tokens: Page
    parent: Node | None = field(repr=False)
    pages: dict[str, int] = field(repr=False)
    children: dict[Page, Node] = field(default_factory=dict, repr=False)


class PrefixTree:
    """See the module. Models with recurrent state have no pages that describe a prefix alone: `enabled` is False for them."""

    def __init__(self, ledger: StateLedger, enabled: bool = True) -> None:
        self._ledger = ledger
        self.enabled = enabled and bool(ledger.paged) and ledger.slots is None
        self._roots: dict[str, Node] = {}
        self._used: OrderedDict[Node, None] = OrderedDict()  # least recently used first; a parent after its children
        self.hits = 0  # tokens that were not computed again
        if self.enabled:
            for pool in ledger.paged.values():
                pool.reclaim = self._evict_one

    def __len__(self) -> int:
        return len(self._used)

    def match(self, tenant: str, known: Sequence[int], tokens: Sequence[int]) -> tuple[Node, list[Node]]:
        """The node that `known` (whole pages) ends at, and the nodes that the first whole pages of `tokens` go on with."""
        node = self._root(tenant)
        for page in _pages(known, self._ledger.page_size):
            found = node.children.get(page)
            if found is None:
                return node, []
            node = found
        start, path = node, []
        for page in _pages(tokens, self._ledger.page_size):
            found = node.children.get(page)
            if found is None:
                break
            path.append(found)
            node = found
        return start, path

    def touch(self, node: Node | None) -> None:
        """Mark a node and its ancestors as just used."""
        while node is not None and node.parent is not None:
            self._used.move_to_end(node)
            node = node.parent

    def file(self, tenant: str, state: SetState, length: int) -> None:
        """Let others share the set's full pages up to `length` tokens, all of them computed."""
        if not self.enabled:
            return
        size = self._ledger.page_size
        full = min(length, len(state.tokens), state.least) // size
        if state.filed >= full:
            return
        node = self._root(tenant)
        for i, page in enumerate(_pages(state.tokens[: full * size], size)):
            found = node.children.get(page)
            if found is None:
                pages = {name: table[i] for name, table in state.pages.items()}
                if not all(pages.values()):  # a window group has let it go
                    break
                for name, unit in pages.items():
                    self._ledger.paged[name].keep(unit)
                found = node.children[page] = Node(page, node, pages)
                self._used[found] = None
            node = found
        state.filed = full
        self.touch(node)

    def clear(self) -> None:
        """Forget everything: the device has lost what the pages held."""
        while self._used:
            self._evict_one()

    def _root(self, tenant: str) -> Node:
        root = self._roots.get(tenant)
        if root is None:
            root = self._roots[tenant] = Node((), None, {})
        return root

    def _evict_one(self) -> None:
        node = next(iter(self._used), None)
        if node is None:
            raise IndexError("no unit is free or cached: the plan has promised more than there is")
        self._drop(node)

    def _drop(self, node: Node) -> None:
        for child in list(node.children.values()):
            self._drop(child)
        assert node.parent is not None
        del node.parent.children[node.tokens]
        del self._used[node]
        for name, unit in node.pages.items():
            self._ledger.paged[name].unkeep(unit)


def _pages(tokens: Sequence[int], size: int) -> Iterator[Page]:
    for at in range(0, len(tokens) - size + 1, size):
        yield tuple(tokens[at : at + size])
