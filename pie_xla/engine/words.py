"""The host's ledger of the device register file: which u32 words hold which output or channel cell."""

from __future__ import annotations

import threading
from collections import defaultdict


class WordFile:
    """Allocates spans of a `u32[C]` device array by exact size classes. Safe from any thread: channels are made in their callers'.

    Word 0 is never given out: padding reads it. A freed span may be reused at once, since the device runs launches in order.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._next = 1
        self._free: dict[int, list[int]] = defaultdict(list)
        self.used = 0
        self._lock = threading.Lock()

    def allocate(self, n: int) -> int | None:
        """Offset of `n` words, or None when the file is full."""
        with self._lock:
            stack = self._free.get(n)
            if stack:
                offset = stack.pop()
            elif self._next + n <= self.count:
                offset = self._next
                self._next += n
            else:
                return None
            self.used += n
            return offset

    def release(self, offset: int, n: int) -> None:
        with self._lock:
            self._free[n].append(offset)
            self.used -= n
            if (
                self.used == 0
            ):  # everything is back: forget the size classes, so a new mix of sizes finds the whole file
                self._next = 1
                self._free.clear()
