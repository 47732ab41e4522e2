"""What one process may hold and say through its host functions."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class HostLimits:
    """Bounds on one process; beyond one, the call that crosses it is refused by name.

    Attributes:
        request_bytes: one submit or channel value.
        tickets: results asked for and not yet delivered.
        unread_bytes: results that arrived and that the program has not waited for.
        output_bytes: all text sent to the launcher, and the returned value's JSON.
        log_bytes: all log text; what comes after is dropped with one line that says so.
        inbox: messages to the process that it has not received.
        text_bytes: one text to encode, chat request or message; encoding keeps all other programs waiting.
        descendants: programs that run at a time below one launch.
        depth: how many spawns below a launch a program may be.
        child_handles: children that one program holds, ended ones too.
    """

    request_bytes: int = 8 << 20
    tickets: int = 8192
    unread_bytes: int = 64 << 20
    output_bytes: int = 8 << 20
    log_bytes: int = 1 << 20
    inbox: int = 1024
    text_bytes: int = 1 << 20
    descendants: int = 64
    depth: int = 8
    child_handles: int = 256
