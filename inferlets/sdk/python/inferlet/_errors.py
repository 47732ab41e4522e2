"""What can go wrong in an inferlet, and whose line it was."""

from __future__ import annotations

import sys

PACKAGE = __name__.partition(".")[0]


class InferletError(Exception):
    """Everything this package raises on purpose."""


class UsageError(InferletError):
    """The program asked for something that cannot be; raised at the author's line."""


class RefusedError(InferletError):
    """The host refused a call: a limit, an unknown handle, something this server does not have."""


class PassError(InferletError):
    """A submitted pass failed or was dropped; its effects did not happen.

    Attributes:
        cause: what went wrong, in the engine's words.
        line: "file:line" where the failing pass was submitted (not the pass that merely depended on it), or "".
    """

    def __init__(self, cause: str, line: str = "") -> None:
        super().__init__(f"{cause} (pass submitted at {line})" if line else cause)
        self.cause = cause
        self.line = line


class ProcessError(InferletError):
    """A program that this one started has failed, or was killed; the message is its error's."""


def missing(name: str, instead: str = "") -> UsageError:
    """The error of a thing the design names and this version does not have."""
    tail = f"; {instead}" if instead else ""
    return UsageError(f"{name} is not in this version of inferlet{tail}")


def author_line() -> str:
    """ "file:line" of the nearest caller outside this package; file without its directories."""
    frame = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module != PACKAGE and not module.startswith(PACKAGE + "."):
            return f"{frame.f_code.co_filename.replace(chr(92), '/').rpartition('/')[2]}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return ""
