"""What the CLI says on stderr while work goes on: bars on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING

from pie_xla.progress import Silent, Task

if TYPE_CHECKING:
    from rich.progress import Progress as Bars
    from rich.progress import TaskID

LINE_EVERY = 5.0  # seconds between lines about one task when stderr is no terminal
BYTES_FROM = 1 << 16  # a total this large counts bytes; nothing else here has so many parts


class PlainTask:
    """Says its start, then how far it is every few seconds, then how long it took."""

    def __init__(self, out: IO[str], name: str, total: float | None) -> None:
        self._out, self._name, self._total = out, name, total
        self._done = 0.0
        self._began = self._said = time.monotonic()
        self._lock = threading.Lock()
        self._say(f"{name} ...")

    def advance(self, amount: float = 1.0) -> None:
        with self._lock:
            self._done += amount
            now = time.monotonic()
            if now - self._said < LINE_EVERY:
                return
            self._said = now
        if self._total:
            amount_text = f" of {show_amount(self._total)}" if self._total >= BYTES_FROM else f" of {self._total:g}"
            self._say(f"{self._name}: {show_amount(self._done)}{amount_text} ({100 * self._done / self._total:.0f} %)")
        else:
            self._say(f"{self._name}: {show_amount(self._done)}")

    def finish(self) -> None:
        took = time.monotonic() - self._began
        if took >= 1.0:
            self._say(f"{self._name}: {took:.1f} s")

    def _say(self, text: str) -> None:
        print(text, file=self._out, flush=True)


class PlainProgress:
    """Progress as lines, for a log or a pipe."""

    def __init__(self, out: IO[str] | None = None) -> None:
        self._out = out or sys.stderr

    @contextmanager
    def task(self, name: str, total: float | None = None) -> Iterator[Task]:
        task = PlainTask(self._out, name, total)
        yield task
        task.finish()

    def note(self, text: str) -> None:
        print(text, file=self._out, flush=True)


class BarTask:
    """One rich bar."""

    def __init__(self, bars: Bars, task_id: TaskID) -> None:
        self._bars, self._id = bars, task_id

    def advance(self, amount: float = 1.0) -> None:
        self._bars.advance(self._id, amount)


class BarProgress:
    """Progress as rich bars; they vanish when the work is done.

    Attributes:
        muted: set once text streams to the same terminal, which a bar would overwrite.
    """

    def __init__(self) -> None:
        self.muted = False
        from rich.console import Console

        self._console = Console(stderr=True, highlight=False)
        self._bars: Bars | None = None
        self._active = 0
        self._lock = threading.Lock()

    @contextmanager
    def task(self, name: str, total: float | None = None) -> Iterator[Task]:
        if self.muted:
            yield Silent()
            return
        with self._lock:
            if self._bars is None:
                self._bars = self._new_bars()
                self._bars.start()
            bars = self._bars
            self._active += 1
        task_id = bars.add_task(name, total=total)
        try:
            yield BarTask(bars, task_id)
        finally:
            bars.remove_task(task_id)
            with self._lock:
                self._active -= 1
                if self._active == 0:
                    bars.stop()
                    self._bars = None

    def note(self, text: str) -> None:
        bars = self._bars
        (self._console if bars is None else bars.console).print(text, markup=False)

    def _new_bars(self) -> Bars:
        from rich.progress import BarColumn, SpinnerColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bars

        columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(bar_width=30))
        return Bars(*columns, TaskProgressColumn(), TimeElapsedColumn(), console=self._console, transient=True)


def stderr_progress() -> PlainProgress | BarProgress:
    """Bars where stderr is a terminal, lines where it is not."""
    return BarProgress() if sys.stderr.isatty() else PlainProgress()


def show_amount(amount: float) -> str:
    """A count, or bytes in a unit that reads well: 41.2 MB."""
    if amount < BYTES_FROM:
        return f"{amount:g}"
    return f"{amount / 1e6:.1f} MB" if amount < 1e9 else f"{amount / 1e9:.2f} GB"
