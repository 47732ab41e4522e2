"""Where a start's time goes: named spans on one clock that begins with the process."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from pie_xla import machine


@dataclass(frozen=True)
class Span:
    """A named piece of work, in seconds since the process was started."""

    name: str
    start: float
    end: float


class Timings:
    """Collects spans from any thread."""

    def __init__(self) -> None:
        # Wall-clock age once, then the monotonic clock.
        self._zero = time.monotonic() - machine.process_age()
        self._spans: list[Span] = [Span("interpreter and command", 0.0, time.monotonic() - self._zero)]
        self._lock = threading.Lock()

    def now(self) -> float:
        """Seconds since the process was started."""
        return time.monotonic() - self._zero

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        start = self.now()
        try:
            yield
        finally:
            with self._lock:
                self._spans.append(Span(name, start, self.now()))

    def mark(self, name: str) -> None:
        """A moment, such as the first token."""
        now = self.now()
        with self._lock:
            self._spans.append(Span(name, now, now))

    def spans(self) -> list[Span]:
        """All spans by their start."""
        with self._lock:
            return sorted(self._spans, key=lambda span: (span.start, span.end))

    def table(self) -> str:
        """One line per span: from, to and length in seconds; work side by side overlaps."""
        lines = [f"{'seconds':>7} {'to':>7} {'took':>7}"]
        for span in self.spans():
            took = f"{span.end - span.start:7.2f}" if span.end > span.start else " " * 7
            lines.append(f"{span.start:7.2f} {span.end:7.2f} {took}  {span.name}")
        return "\n".join(lines)
