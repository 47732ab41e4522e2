"""What a sequence's state may forget: policies for `generate(..., kv=evict.Sinks(4, 512))`.

A policy says what later tokens see (a geometry, which takes effect at once) and which positions nobody will see any more, so that their
pages go back. Keys keep the positions they were computed with: nothing is renumbered.
"""

from __future__ import annotations

from dataclasses import dataclass

from inferlet._errors import UsageError
from inferlet.eta import StateGeometry

Span = tuple[int, int]


@dataclass(frozen=True)
class Policy:
    """Keeps everything; the base of other policies, and their control."""

    def sight(self, geometry: StateGeometry) -> StateGeometry:
        """`geometry`, changed to what a token may see."""
        return geometry

    def dead(self, length: int) -> list[Span]:
        """Half-open spans of positions that no token from position `length` on sees."""
        return []


@dataclass(frozen=True)
class Window(Policy):
    """The last `size` tokens, the token's own included (Beltagy et al. 2020, Longformer, arXiv:2004.05150)."""

    size: int

    def __post_init__(self) -> None:
        if type(self.size) is not int or self.size < 1:
            raise UsageError(f"evict.Window({self.size!r:.60}): an int of at least 1")

    def sight(self, geometry: StateGeometry) -> StateGeometry:
        return geometry.window(self.size)

    def dead(self, length: int) -> list[Span]:
        return [(0, length - self.size + 1)] if length >= self.size else []


@dataclass(frozen=True)
class Sinks(Policy):
    """The first `sinks` tokens and the last `size` (Xiao et al. 2023, StreamingLLM, arXiv:2309.17453, without its renumbering)."""

    sinks: int
    size: int

    def __post_init__(self) -> None:
        if any(type(value) is not int or value < 1 for value in (self.sinks, self.size)):
            raise UsageError(f"evict.Sinks({self.sinks!r:.60}, {self.size!r:.60}): ints of at least 1")

    def sight(self, geometry: StateGeometry) -> StateGeometry:
        return geometry.window(self.size, sinks=self.sinks)

    def dead(self, length: int) -> list[Span]:
        end = length - self.size + 1
        return [(self.sinks, end)] if end > self.sinks else []
