"""The one exception family users see: what was wrong, where, and what to do."""

from __future__ import annotations


class PieError(Exception):
    """A failure with a message made for its reader.

    Args:
        message: what was wrong and where, in one or two sentences.
        hint: what to do about it, or None.
    """

    exit_code: int = 1

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return self.message if self.hint is None else f"{self.message}\n  hint: {self.hint}"


class UsageError(PieError):
    """The caller asked for something that cannot be: wrong argument, unknown name."""

    exit_code = 2
