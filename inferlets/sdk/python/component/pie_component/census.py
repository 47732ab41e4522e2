"""Say where every object of the snapshot lies, for the builder of the component.

A reference count is written at each use of an object, and a page of the snapshot that a guest writes to becomes the guest's own. The
builder marks the snapshot's objects as immortal, as CPython does with `None`: then their counts are only read
(`pie_xla/process/wasm/immortal.py`). Nothing of the snapshot is ever freed by that, and nothing of it needs to be.
"""

from __future__ import annotations

import gc
import sys
import types
from array import array
from collections.abc import Iterable

# The list's own memory is freed before the snapshot is taken, with what the allocator writes into its ends.
MAGIC = b"pie-xla: objects\0"[:16]
PADDING = 64


def take() -> None:
    """Leave the list behind: padding, the magic, the number of objects, and (address, type's address) of each, u32."""
    found = _reachable()
    pairs = array("I")
    for thing in found:
        pairs.append(id(thing))
        pairs.append(id(type(thing)))
    head = bytes(PADDING) + MAGIC + array("I", [len(found)]).tobytes()
    bytearray(head + pairs.tobytes() + bytes(PADDING))


def _reachable() -> list[object]:
    """Every object that anything reaches, each once."""
    seen: set[int] = set()
    found: list[object] = []
    waiting: list[object] = [*gc.get_objects(), sys.modules, types.__dict__]
    while waiting:
        thing = waiting.pop()
        if id(thing) in seen or thing is waiting or thing is found or thing is seen:
            continue
        seen.add(id(thing))
        found.append(thing)
        waiting.extend(_held(thing))
    return found


def _held(thing: object) -> Iterable[object]:
    yield from gc.get_referents(thing)
    match thing:  # what the collector does not look at, since it cannot be part of a cycle
        case types.CodeType():
            yield from (thing.co_consts, thing.co_names, thing.co_varnames, thing.co_freevars, thing.co_cellvars)
            yield from (
                thing.co_filename,
                thing.co_name,
                thing.co_qualname,
                thing.co_linetable,
                thing.co_exceptiontable,
            )
            yield from (*thing.co_consts, *thing.co_names)
        case dict():
            yield from list(thing)
