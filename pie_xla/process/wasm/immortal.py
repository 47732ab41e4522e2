"""Mark the objects of a language component's snapshot as immortal.

All guests share the snapshot's pages until they write to them. CPython counts references inside the objects, so a guest would copy a page
for each object that it merely looks at: 5.4 MB for a small program instead of 2. An object whose count is above a bound is
immortal (PEP 683): its count is read and never written. The counts are data in the component's file; this module changes them there.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

import numpy as np

from pie_xla.errors import PieError

MAGIC = b"pie-xla: objects\0"[:16]  # `pie_component/census.py` writes the list
IMMORTAL = 5 << 28  # _Py_IMMORTAL_INITIAL_REFCNT where a pointer has 32 bits
# A free block of CPython's allocator holds the next one's address, or 0, where an object has its count; addresses are larger.
MOST_COUNT = 1 << 19
_LEAST_IMMORTAL = 1 << 30
_CORE_MODULE, _DATA = 1, 11


@dataclass(frozen=True)
class Segment:
    """Part of the initial memory: `size` bytes at `address`, in the file at `at`."""

    address: int
    at: int
    size: int


def immortalize(component: bytes) -> tuple[bytes, int]:
    """The component with its snapshot's objects immortal, and how many they are, CPython's own included.

    Raises:
        PieError: the component is not laid out as this module knows it.
    """
    data = bytearray(component)
    segments = memory_segments(data)
    starts = [segment.address for segment in segments]
    found = data.find(MAGIC)
    while found >= 0:  # the text of the magic itself is in the component too
        count = int.from_bytes(data[found + 16 : found + 20], "little")
        last = found + 20 + 8 * count
        if 1000 < count < 1 << 22 and last <= len(data):
            break
        found = data.find(MAGIC, found + 1)
    else:
        raise PieError(
            "the language component has no list of its objects", "this version of componentize-py is unknown"
        )
    pairs = np.frombuffer(bytes(data[found + 20 : last]), "<u4").reshape(count, 2)
    data[found:last] = bytes(last - found)  # nobody reads it again
    marked = 0
    for address, kind in pairs.tolist():
        index = bisect_right(starts, address) - 1
        segment = segments[index]
        offset = address - segment.address
        if index < 0 or offset + 8 > segment.size:
            continue
        at = segment.at + offset
        refs = int.from_bytes(data[at : at + 4], "little")
        if int.from_bytes(data[at + 4 : at + 8], "little") != kind:
            continue
        if 0 < refs < MOST_COUNT:
            data[at : at + 4] = IMMORTAL.to_bytes(4, "little")
        marked += 0 < refs < MOST_COUNT or refs >= _LEAST_IMMORTAL
    if marked < count // 2:
        raise PieError(f"of {count} objects of the language component only {marked} were found in its memory")
    return bytes(data), marked


def memory_segments(component: bytes | bytearray) -> list[Segment]:
    """The initial memory of the component's first core module with data, by address.

    Raises:
        PieError: it is not a component, or its data do not lie at constant addresses.
    """
    if component[:4] != b"\0asm" or component[6:8] != b"\1\0":
        raise PieError("the language component is not a WebAssembly component")
    for kind, begin, end in sections(component, 8, len(component)):
        if kind != _CORE_MODULE:
            continue
        for inner, first, _ in sections(component, begin + 8, end):
            if inner == _DATA:
                return _segments(component, first)
    raise PieError("the language component has no initial memory")


def sections(data: bytes | bytearray, at: int, end: int) -> list[tuple[int, int, int]]:
    """(id, begin, end) of the sections in a range."""
    found = []
    while at < end:
        kind = data[at]
        size, begin = number(data, at + 1)
        found.append((kind, begin, begin + size))
        at = begin + size
    return found


def number(data: bytes | bytearray, at: int, signed: bool = False) -> tuple[int, int]:
    """A LEB128 number, and where the next thing is."""
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            break
    if signed and byte & 0x40:
        value -= 1 << shift
    return value, at


def _segments(data: bytes | bytearray, at: int) -> list[Segment]:
    count, at = number(data, at)
    found = []
    for _ in range(count):
        flag, at = number(data, at)
        opcode = data[at]
        address, at = number(data, at + 1, signed=True)
        if flag != 0 or opcode != 0x41 or data[at] != 0x0B:  # active, i32.const, end
            raise PieError("the language component's memory is laid out in an unknown way")
        size, at = number(data, at + 1)
        found.append(Segment(address & 0xFFFFFFFF, at, size))
        at += size
    return sorted(found, key=lambda segment: segment.address)
