"""How long work says what it is doing, without knowing who listens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol


class Task(Protocol):
    def advance(self, amount: float = 1.0) -> None: ...


class Progress(Protocol):
    """A listener for long work; the CLI draws it on stderr."""

    def task(self, name: str, total: float | None = None) -> AbstractContextManager[Task]:
        """Begin a task; `total` is in the task's own unit (bytes, tensors, executables)."""

    def note(self, text: str) -> None:
        """Say one line."""


class Silent:
    """Listens to nothing; the default of the library."""

    @contextmanager
    def task(self, name: str, total: float | None = None) -> Iterator[Task]:
        yield self

    def advance(self, amount: float = 1.0) -> None:
        return None

    def note(self, text: str) -> None:
        return None


SILENT: Progress = Silent()
