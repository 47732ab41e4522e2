"""What an epilogue does wrong, told where it is recorded."""

from __future__ import annotations

from inferlet._errors import UsageError, author_line


class EtaError(UsageError, TypeError):
    """An epilogue that breaks a rule of its language; raised, with the author's file and line, while it is recorded."""

    def __init__(self, message: str) -> None:
        line = author_line()
        super().__init__(f"{line}: {message}" if line else message)
