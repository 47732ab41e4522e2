"""The host's ledger of the device register file: which u32 words hold which output or channel cell."""

from __future__ import annotations

import threading
from bisect import bisect_left


class WordFile:
    """Allocates spans of a `u32[C]` device array, first fit; freed neighbours grow together again.

    Word 0 is never given out: padding reads it. A freed span may be reused at once, since the device runs launches in
    order. Safe from any thread: channels are made in their callers'.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.used = 0
        self._free: list[tuple[int, int]] = [(1, count - 1)]  # (offset, words), by offset, never adjacent
        self._lock = threading.Lock()

    def allocate(self, n: int) -> int | None:
        """Offset of `n` words, or None when no free span is long enough."""
        with self._lock:
            for i, (offset, words) in enumerate(self._free):
                if words >= n:
                    if words == n:
                        del self._free[i]
                    else:
                        self._free[i] = (offset + n, words - n)
                    self.used += n
                    return offset
        return None

    def release(self, offset: int, n: int) -> None:
        with self._lock:
            self.used -= n
            i = bisect_left(self._free, (offset, 0))
            if i < len(self._free) and self._free[i][0] == offset + n:
                n += self._free.pop(i)[1]
            if i and sum(self._free[i - 1]) == offset:
                i -= 1
                offset, n = self._free[i][0], self._free[i][1] + n
                self._free[i] = (offset, n)
            else:
                self._free.insert(i, (offset, n))
