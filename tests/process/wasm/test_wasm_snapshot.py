"""What the guests share: the snapshot's objects are never written to, and new ones lie side by side."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from wasm_fake_host import Guests

from pie_xla.errors import PieError
from pie_xla.process.wasm import ExitKind
from pie_xla.process.wasm.immortal import IMMORTAL, MAGIC, immortalize, memory_segments

PAGE = os.sysconf("SC_PAGE_SIZE")

LOOK = """
import asyncio, http.client, json, sys
async def main(input):
    used = [json.JSONDecoder, asyncio.gather, http.client.HTTPConnection, "sep", sys.modules]
    counts = [sys.getrefcount(thing) for thing in used]
    kept = [list(used) for _ in range(50)]
    new = [id(object()) for _ in range(1)] + [id(thing) for thing in [[] for _ in range(200)]]
    return {"counts": counts, "later": [sys.getrefcount(thing) for thing in used], "new": new}
"""


def test_objects_of_the_snapshot_are_immortal_and_new_ones_are_neighbours(guests: Guests) -> None:
    ended = guests.run(LOOK)
    assert ended.kind is ExitKind.RETURNED, ended.message
    result = json.loads(ended.result or "")["result"]
    assert result["counts"] == result["later"]
    assert all(count >= 1 << 30 for count in result["counts"])
    pages = {address // 4096 for address in result["new"]}
    assert len(pages) < 20, "200 lists and their page table lie on a few pages"


WAIT = """
from inferlet._host import ticket
async def main(input):
    await ticket(1)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_waiting_guest_owns_little_memory(guests: Guests) -> None:
    runs = [guests.start(WAIT) for _ in range(4)]
    for run in runs:
        assert run.host.waiting.wait(30)
    owned = sorted(pages_of_their_own())[-4:]
    for run in runs:
        run.host.finish(1, None)
        assert run.exit().kind is ExitKind.RETURNED
    assert len(owned) == 4
    assert max(owned) < 1.5e6  # it was 3.2 MB without the census, the filling and the warm-up


def pages_of_their_own() -> list[int]:
    """For each mapping of the component's memory image: bytes that were copied because somebody wrote to them."""
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        mapping = re.match(r"([0-9a-f]+)-([0-9a-f]+) rw-p .*\.cwasm$", line)
        if mapping:
            first, last = (int(number, 16) // PAGE for number in mapping.groups())
            with open("/proc/self/pagemap", "rb") as pagemap:
                pagemap.seek(first * 8)
                entries = np.frombuffer(pagemap.read((last - first) * 8), np.uint64)
            present, of_file = (entries >> 63) & 1, (entries >> 61) & 1
            found.append(int((present & (1 - of_file)).sum()) * PAGE)
    return found


def leb(value: int) -> bytes:
    parts = []
    while True:
        value, low = value >> 7, value & 0x7F
        if not value and not low & 0x40:
            return bytes([*parts, low])
        parts.append(low | 0x80)


def component(objects: dict[int, tuple[int, int]], listed: list[tuple[int, int]]) -> bytes:
    """A component whose module has its memory in two segments, at 65536 and at 131072.

    Args:
        objects: address -> (count, type). listed: the census's pairs.
    """
    first, second = bytearray(4096), bytearray(4096)
    for address, words in objects.items():
        memory, base = (first, 65536) if address < 131072 else (second, 131072)
        memory[address - base : address - base + 8] = np.array(words, "<u4").tobytes()
    census = MAGIC + np.array([len(listed)], "<u4").tobytes() + np.array(listed, "<u4").tobytes()
    parts = [leb(3)]
    for address, data in ((131072, bytes(second)), (65536, bytes(first)), (262144, census)):
        parts += [b"\0\x41", leb(address), b"\x0b", leb(len(data)), data]
    data_section = b"".join(parts)
    module = b"\0asm\1\0\0\0" + b"\x0b" + leb(len(data_section)) + data_section
    return b"\0asm\x0d\0\1\0" + b"\1" + leb(len(module)) + module


def word(data: bytes, address: int) -> int:
    segment = next(s for s in memory_segments(data) if s.address <= address < s.address + s.size)
    at = segment.at + address - segment.address
    return int.from_bytes(data[at : at + 4], "little")


def test_only_what_still_is_the_object_is_changed() -> None:
    kind = 65536
    many = {131072 + 16 * i: (1 + i % 7, kind) for i in range(200)}
    odd = {
        65536: (3, 65536),  # a type is an object, too
        65552: (70 << 16, kind),  # a freed block: the next one's address is where the count was
        65568: (0, kind),  # the last freed block
        65584: (5, 12345),  # another object lies there now
    }
    pairs = [(address, kind) for address in (*many, *odd, 900000)] * 6  # more than a thousand
    changed, marked = immortalize(component(many | odd, pairs))
    assert marked == 201 * 6
    assert {word(changed, address) for address in (*many, 65536)} == {IMMORTAL}
    assert [word(changed, address) for address in (65552, 65568, 65584)] == [70 << 16, 0, 5]
    assert MAGIC not in changed


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"\0asm\1\0\0\0", "not a WebAssembly component"),
        (b"\0asm\x0d\0\1\0", "no initial memory"),
        (component({}, []), "no list of its objects"),
        (component({}, [(65536, 1)] * 2000), "only 0 were found"),
    ],
)
def test_an_unknown_layout_is_refused(data: bytes, words: str) -> None:
    with pytest.raises(PieError, match=words):
        immortalize(data)
