"""A submit's JSON, checked and turned into the engine's `PassRequest`. Everything here may be hostile."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import numpy as np

from pie_xla.engine.api import FromChannel, FromTicket, Geometry, PassRequest, Row, Sight
from pie_xla.errors import PieError
from pie_xla.eta.types import DType, Program, TensorType

GEOMETRIES = {geometry.value: geometry for geometry in Geometry}
FIELDS = frozenset(("rows", "geometry", "readout", "program", "params", "channels", "line", "drop", "model", "times"))
U32 = 1 << 32
MAX_TIMES = 64  # passes of one submit


class RequestError(PieError):
    """A host call that makes no sense; the message goes to the program's author."""


class ProgramCache:
    """Parsed programs by their text, shared by all processes of a server; the least recently used go first."""

    def __init__(self, parse: Callable[[str], Program], entries: int = 512) -> None:
        self._parse, self._entries = parse, entries
        self._programs: OrderedDict[str, Program] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, text: str) -> Program:
        with self._lock:
            program = self._programs.get(text)
            if program is not None:
                self._programs.move_to_end(text)
                return program
        program = self._parse(text)
        with self._lock:
            self._programs[text] = program
            while len(self._programs) > self._entries:
                self._programs.popitem(last=False)
        return program


def loads(text: str, limit: int, what: str) -> Any:
    """Parse JSON of bounded size."""
    if len(text) > limit:
        raise RequestError(f"{what} has {len(text)} characters; the limit is {limit}")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{what} is not JSON: {error}") from None


def integer(value: Any, what: str, bound: int = U32) -> int:
    if type(value) is not int or not 0 <= value < bound:
        raise RequestError(f"{what} is {value!r:.60}, not an int in 0..{bound - 1}")
    return value


def integers(value: Any, what: str, bound: int = U32) -> tuple[int, ...]:
    if type(value) is not list:
        raise RequestError(f"{what} is {type(value).__name__}, not a list of ints")
    # set and min/max run in C: a long prompt costs microseconds
    if value and (set(map(type, value)) != {int} or min(value) < 0 or max(value) >= bound):
        at = next(i for i, item in enumerate(value) if type(item) is not int or not 0 <= item < bound)
        raise RequestError(f"{what}: entry {at} is {value[at]!r:.60}, not an int in 0..{bound - 1}")
    return tuple(value)


Masks = Callable[[Any, TensorType], "Future[np.ndarray]"]


def no_masks(handle: Any, kind: TensorType) -> Future[np.ndarray]:
    raise RequestError("this host has no grammars")


Chained = Callable[[PassRequest, int], PassRequest]  # a pass and its ticket -> the pass after it


def parse_times(request: Any) -> int:
    """How many passes a submit asks for."""
    times = integer(request.get("times", 1), "times", MAX_TIMES + 1) if type(request) is dict else 1
    if times < 1:
        raise RequestError("times is at least 1")
    return times


def parse_pass(
    request: Any, program_of: Callable[[Any], Program], vocab_size: int, masks: Masks = no_masks
) -> tuple[PassRequest, Chained]:
    """The pass that `request` (the submit JSON's dict) describes, and what each next one of it is.

    Args:
        program_of: from the request's "program" (not None) to a program; raises `PieError`.
        vocab_size: of the request's "model", which is known; tokens are ids below it.
        masks: from a matcher's handle and the parameter's type to what the matcher allows.
    """
    if type(request) is not dict:
        raise RequestError("a submit is a JSON object")
    unknown = request.keys() - FIELDS
    if unknown:
        raise RequestError(f"a submit has no field {min(unknown)!r:.60}")
    rows = request.get("rows")
    if type(rows) is not list or not rows:
        raise RequestError("a submit needs at least one row")
    geometry = request.get("geometry", "fold")
    if type(geometry) is not str or geometry not in GEOMETRIES:
        raise RequestError(f"geometry {geometry!r:.60} is not one of {', '.join(GEOMETRIES)}")
    readout = request.get("readout")
    if readout is not None:
        if type(readout) is not list or len(readout) != len(rows):
            raise RequestError(f"readout needs one list per row ({len(rows)} rows)")
        readout = tuple(integers(wanted, f"readout of row {i}") for i, wanted in enumerate(readout))
    line = request.get("line") or None
    if line is not None and (type(line) is not str or len(line) > 512):
        raise RequestError("line is a short string")
    text = request.get("program")
    program = None if text is None else program_of(text)
    channels = integers(request.get("channels") or [], "channels")
    wanted = 0 if program is None else len(program.channels)
    if len(channels) != wanted:
        raise RequestError(f"the program uses {wanted} channels, the submit gives {len(channels)}")
    if program is not None and program.rows != len(rows):
        raise RequestError(f"the program was traced for {program.rows} rows, the submit has {len(rows)}")
    parsed = tuple(parse_row(i, row, vocab_size) for i, row in enumerate(rows))
    params = parse_params(request.get("params") or [], () if program is None else program.params, masks)
    made = PassRequest(parsed, GEOMETRIES[geometry], readout, program, params, channels, line, request.get("model"))
    if parse_times(request) > 1 and any(isinstance(param, Future) for param in params):
        raise RequestError("a matcher's mask is good for one pass: times is 1")
    follow = [i for i, row in enumerate(rows) if row.get("chain")]

    def chained(before: PassRequest, ticket: int) -> PassRequest:
        after = list(before.rows)
        for i in follow:
            source = after[i].tokens
            assert isinstance(source, FromTicket)
            after[i] = replace(after[i], tokens=FromTicket(ticket, source.index))
        return replace(before, rows=tuple(after)) if follow else before

    return made, chained


def parse_row(i: int, row: Any, vocab_size: int) -> Row:
    if type(row) is not dict or len(row) != 2 + ("sight" in row) + ("chain" in row) or "set" not in row:
        raise RequestError(f"row {i} needs a set and one of tokens, ticket, channel")
    sight = None if row.get("sight") is None else parse_sight(i, row["sight"])
    handle = None if row["set"] is None else integer(row["set"], f"set of row {i}")
    if "chain" in row and (row["chain"] is not True or "ticket" not in row):
        raise RequestError(f"row {i}: chain is true, for a row that embeds a ticket")
    if "tokens" in row:
        tokens = integers(row["tokens"], f"tokens of row {i}", vocab_size)
        if not tokens:
            raise RequestError(f"row {i} has no tokens")
        return Row(handle, tokens, sight)
    if "ticket" in row:
        source = integers(row["ticket"], f"ticket of row {i}", 1 << 53)
        if len(source) != 2:
            raise RequestError(f"ticket of row {i} is [ticket, result]")
        return Row(handle, FromTicket(*source), sight)
    if "channel" in row:
        return Row(handle, FromChannel(integer(row["channel"], f"channel of row {i}")), sight)
    raise RequestError(f"row {i} needs a set and one of tokens, ticket, channel")


SIGHT = frozenset(("window", "sinks", "places", "tree", "mask", "width", "spans"))
PLACE = 1 << 30


def parse_sight(i: int, sight: Any) -> Sight:
    """What row i's tokens see; whether it fits the set is the engine's to say."""
    if type(sight) is not dict or sight.keys() - SIGHT:
        raise RequestError(f"sight of row {i} is an object of {', '.join(sorted(SIGHT))}")
    window = sight.get("window")
    return Sight(
        window=None if window is None else integer(window, f"window of row {i}", PLACE),
        sinks=integer(sight.get("sinks", 0), f"sinks of row {i}", PLACE),
        places=_signed(sight.get("places"), f"places of row {i}"),
        tree=_signed(sight.get("tree"), f"tree of row {i}"),
        mask=_mask(i, sight.get("mask"), sight.get("width")),
        spans=_spans(sight.get("spans"), f"spans of row {i}"),
    )


def _signed(values: Any, what: str) -> tuple[int, ...] | None:
    if values is None:
        return None
    if type(values) is not list or any(type(value) is not int or abs(value) >= PLACE for value in values):
        raise RequestError(f"{what} is a list of ints")
    return tuple(values)


def _spans(spans: Any, what: str) -> tuple[tuple[int, int], ...] | None:
    if spans is None:
        return None
    if type(spans) is not list:
        raise RequestError(f"{what} is a list of [begin, end]")
    found = [integers(span, what, PLACE) for span in spans]
    if any(len(span) != 2 for span in found):
        raise RequestError(f"{what} is a list of [begin, end]")
    return tuple((begin, end) for begin, end in found)


def _mask(i: int, rows: Any, width: Any) -> np.ndarray | None:
    """bool[T, width] of hexadecimal texts, the lowest bit first."""
    if rows is None:
        return None
    wide = integer(width, f"width of row {i}'s mask", 1 << 24)
    if type(rows) is not list or not rows or any(type(row) is not str or not row.isalnum() for row in rows):
        raise RequestError(f"mask of row {i} is a list of hexadecimal texts")
    try:
        packed = [int(row, 16).to_bytes(-(-wide // 8), "little") for row in rows]
    except (ValueError, OverflowError):
        raise RequestError(f"mask of row {i} is not hexadecimal of {wide} bits") from None
    bits = np.unpackbits(np.frombuffer(b"".join(packed), np.uint8).reshape(len(rows), -1), axis=1, bitorder="little")
    return bits[:, :wide].astype(bool)


def parse_params(
    values: Any, types: tuple[TensorType, ...], masks: Masks = no_masks
) -> tuple[np.ndarray | Future[np.ndarray], ...]:
    if type(values) is not list or len(values) != len(types):
        got = len(values) if type(values) is list else type(values).__name__
        raise RequestError(f"the program has {len(types)} parameters, the submit gives {got}")
    found: list[Any] = [
        value if type(value) is dict else parse_value(value, kind, f"parameter {i}")
        for i, (value, kind) in enumerate(zip(values, types, strict=True))
    ]
    for i, (value, kind) in enumerate(zip(found, types, strict=True)):
        if type(value) is dict:
            if value.keys() != {"matcher"}:
                raise RequestError(f"parameter {i} is an object that names no matcher")
            found[i] = masks(value["matcher"], kind)
    return tuple(found)


def parse_value(value: Any, kind: TensorType, what: str) -> np.ndarray:
    """A JSON number or nested list as an array of exactly `kind`. Floats may be "nan", "inf" and "-inf".

    Native code may give the array itself.
    """
    if isinstance(value, np.ndarray | np.generic):
        if value.shape != kind.shape or value.dtype != kind.dtype.numpy:
            raise RequestError(f"{what} is {value.dtype}{list(value.shape)}, not {kind}")
        return np.asarray(value)
    flat: list[Any] = []
    flatten(value, kind.shape, flat, what)
    kinds = set(map(type, flat))
    match kind.dtype:
        case DType.BOOL:
            good = kinds == {bool}
        case DType.F32:
            good = kinds <= {int, float, str}
            if str in kinds and good:
                good = all(item in ("nan", "inf", "-inf") for item in flat if type(item) is str)
                flat = [float(item) for item in flat] if good else flat
        case _:
            good = kinds == {int}
    if not good:
        raise RequestError(f"{what} is not {kind}")
    try:
        with np.errstate(over="ignore"):
            return np.array(flat, kind.dtype.numpy).reshape(kind.shape)
    except (OverflowError, ValueError):
        raise RequestError(f"{what} has a number that {kind.dtype} cannot hold") from None


def flatten(value: Any, shape: tuple[int, ...], into: list[Any], what: str) -> None:
    if not shape:
        into.append(value)
    elif type(value) is not list or len(value) != shape[0]:
        raise RequestError(f"{what} does not have shape {list(shape)}")
    else:
        for item in value:
            flatten(item, shape[1:], into, what)
