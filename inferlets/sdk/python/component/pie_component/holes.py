"""Fill the holes of the snapshot's heap.

The guest's allocator (wasi-libc's dlmalloc) keeps a list of free blocks for each size and serves these first. A heap that has lived has
thousands, all over: twenty new objects lie on twenty pages, and each page is copied for the guest. Once they are
taken, new objects lie side by side.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable

_GRAIN = 16  # bytes; blocks are multiples of it
_OVERHEAD = 4  # bytes of a block before the object
_LARGEST = 8192
_RUN = 16384  # bytes served side by side: no hole is left that is smaller
_MOST = 1 << 18  # blocks of one size

_kept: list[list[object]] = []


def fill() -> None:
    """Take every free block smaller than `_RUN`, for good."""
    gc.collect()  # also gives back what the interpreter keeps for reuse
    empty = sys.getsizeof(b"")
    size = _LARGEST
    while size > 2 * _GRAIN:
        _kept.append(_fill(lambda n=size - _OVERHEAD - empty: bytes(n), size))  # type: ignore[misc]
        size -= max(_GRAIN, size // 16 // _GRAIN * _GRAIN)
    _kept.append(_fill(lambda: float("1.5"), 2 * _GRAIN))
    _kept.append(_fill(object, _GRAIN))


def _fill(make: Callable[[], object], size: int) -> list[object]:
    kept: list[object] = [None] * _MOST
    last, run, count = 0, 0, 0
    while run < _RUN and count < _MOST:
        block = make()
        kept[count] = block
        count += 1
        run = run + size if id(block) - last == size else 0
        last = id(block)
    del kept[count:]
    return kept
