"""What a guest may use, and how it ended."""

from __future__ import annotations

import enum
from dataclasses import dataclass

MIB = 1 << 20
# The language component's own snapshot is in every guest's memory.
MIN_MEMORY_BYTES = 64 * MIB


@dataclass(frozen=True)
class Limits:
    """Bounds of one guest.

    Args:
        memory_bytes: its linear memory, the language's own share (about 35 MiB for Python) included.
        cpu_seconds: processor time of its own code and of its host calls; waiting is free.
        output_bytes: UTF-8 bytes it sends, logs and returns.
    """

    memory_bytes: int = 512 * MIB
    cpu_seconds: float = 60.0
    output_bytes: int = 8 * MIB


class ExitKind(enum.Enum):
    RETURNED = "returned"
    FAILED = "failed"  # the author's own error: `message` is their traceback
    MEMORY = "memory"
    CPU_TIME = "cpu time"
    OUTPUT = "output"
    STACK = "stack"
    CRASHED = "crashed"
    KILLED = "killed"
    HOST_FAULT = "host fault"  # our bug, not the author's


@dataclass(frozen=True)
class GuestExit:
    """How a guest ended.

    Args:
        kind: RETURNED, or why not.
        result: JSON text `{"result": ...}` of a guest that returned, else None.
        message: for the author, "" when it returned.
        cpu_seconds: processor time it used.
    """

    kind: ExitKind
    result: str | None
    message: str
    cpu_seconds: float


def size_text(count: int) -> str:
    return f"{count // MIB} MiB" if count % MIB == 0 else f"{count} bytes"


class OutputLimitReached(Exception):
    """The guest wrote more than its output limit."""
