"""The host's side of one process: every call a guest can make, on one engine client and one tokenizer.

Sandboxed and native processes use the same object. Calls come from one thread at a time (the process's own); engine
events come from the engine's thread and only append to a queue, which the process's thread collects.
"""

from __future__ import annotations

import json
import secrets
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from pie_xla.engine.api import FromChannel, FromTicket, Geometry, PassError, PassRequest, Row
from pie_xla.engine.packing import words_of
from pie_xla.errors import PieError
from pie_xla.eta.types import DType, Program, TensorType
from pie_xla.process.events import encode_events
from pie_xla.process.interfaces import Client, HostModel, Language, ModelFacts, OpenClient, Sink, Value
from pie_xla.process.limits import HostLimits
from pie_xla.process.model_calls import ModelCalls
from pie_xla.process.requests import (
    Masks,
    ProgramCache,
    RequestError,
    integer,
    integers,
    loads,
    no_masks,
    parse_pass,
    parse_times,
    parse_value,
)
from pie_xla.process.rooms import Answer, OpenRoom, Request
from pie_xla.process.state_calls import StateCalls
from pie_xla.process.wasm.hostapi import Pending

__all__ = ["InferletHost", "ModelFacts"]

T = TypeVar("T")

Landed = Callable[[tuple[Any, ...] | None, str], None]

WORLD = "pie:inferlet@0.1.0"
MAX_CELL = 1 << 22  # elements of one channel cell
DTYPES = {dtype.value: dtype for dtype in DType}
WARNING = 30


@dataclass
class Flight:
    """A submitted pass that the guest can still name: the sizes of its results, and what to undo if it fails."""

    sizes: tuple[int, ...]
    undo: dict[int, tuple[int, int]]  # set -> (its length before the pass, tokens appended)
    line: str | None
    pipeline: int
    arrived: bool = False
    dropped: bool = False


class InferletHost:
    """Implements `pie_xla.process.wasm.hostapi.HostApi` for one process.

    Args:
        open_client: makes the engine client, given the event callback.
        facts, language: the default model. others: those beside it.
        programs: shared parse cache.
        rooms: what else it can ask for, by name.
        seed: what pipelines without a seed of their own draw from; None takes one from the system.
    """

    def __init__(
        self,
        open_client: OpenClient,
        facts: ModelFacts,
        language: Language,
        programs: ProgramCache,
        sink: Sink,
        limits: HostLimits | None = None,
        seed: int | None = None,
        rooms: Sequence[OpenRoom] = (),
        others: Sequence[HostModel] = (),
    ) -> None:
        self._facts, self._programs, self._sink = facts, programs, sink
        self._default = HostModel(facts, language)
        self._models = {model.facts.name: model for model in (self._default, *others)}
        self._limits = limits or HostLimits()
        self._seed = secrets.randbits(53) if seed is None else seed
        self._pipelines = 0
        self._cancelled: set[int] = set()
        self._events: deque[tuple[int, Value]] = deque()  # engine tickets
        self._arrived = 0  # bytes, counted by the engine's thread
        self._collected = 0  # bytes, counted by the process's thread
        self._waiter: Callable[[], None] | None = None
        self.masks: Masks = no_masks  # a room may give them
        self._landings: dict[int, list[Landed]] = {}  # engine tickets
        self._landing = threading.RLock()  # an event is queued, or somebody starts to wait for it
        self._flights: dict[int, Flight] = {}
        self._lengths: dict[int, int] = {}  # of each set, counting submitted tokens
        self._asks: dict[int, TensorType] = {}  # takes and reads in flight
        self._cells: dict[int, TensorType] = {}
        self._receives: deque[int] = deque()
        self._own_tickets = 0  # odd numbers; the engine's tickets are the even ones
        self._still_born: dict[int, PassError] = {}  # passes that could not be queued, since what they embed had failed
        self._own_events: deque[tuple[int, int, Any]] = deque()
        self._inbox: deque[str] = deque()
        self._inbox_open = True
        self._output = 0
        self._logged = 0
        self._closed = False
        self._client = open_client(self._on_event)
        self._started = 0  # asks of `start` without an answer
        openers: tuple[OpenRoom, ...] = (StateCalls, ModelCalls, *rooms)
        self._rooms = [open_room(self) for open_room in openers]
        self._calls = {name: call for room in self._rooms for name, call in room.calls.items()}
        self._starts = {name: start for room in self._rooms for name, start in room.starts.items()}

    # -- events

    def _on_event(self, ticket: int, value: Value) -> None:
        """On the engine's thread."""
        if not isinstance(value, PassError):
            self._arrived += sum(array.nbytes for array in value)
        with self._landing:
            self._events.append((ticket, value))
            waiting = self._landings.pop(ticket, ())
        for landed in waiting:
            _tell(landed, value)
        self._wake()

    def on_landing(self, ticket: int, landed: Landed) -> None:
        """Call `landed` with a pass's results, or with None and the cause, as soon as they are on the host: on any thread.

        Args:
            ticket: the engine's, of a pass that is underway.
        """
        with self._landing:
            values = [value for known, value in self._events if known == ticket]
            if not values:
                self._landings.setdefault(ticket, []).append(landed)
                return
        _tell(landed, values[0])

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None:
            waiter()

    def listen(self, ready: Callable[[], None]) -> None:
        """Call `ready`, on any thread, whenever `collect` may have something: for a native process."""
        self._waiter = ready

    def collect(self) -> list[tuple[int, int, Any]]:
        """Finished tickets as (ticket, 0, value) or (ticket, 1, {"message", "line", "undone"}); on the process's
        thread.
        """
        found: list[tuple[int, int, Any]] = []
        while self._events:
            ticket, value = self._events.popleft()
            event = self._event(ticket, value)
            if event is not None:
                found.append(event)
        found.extend(self._own_events)
        self._own_events.clear()
        while self._receives and (self._inbox or not self._inbox_open):
            ticket = self._receives.popleft()
            found.append((ticket, 0, self._inbox.popleft() if self._inbox else None))
        return found

    def _event(self, ticket: int, value: Value) -> tuple[int, int, Any] | None:
        flight = self._flights.get(ticket)
        if flight is not None:
            flight.arrived = True
            if flight.dropped:
                del self._flights[ticket]
        ask = self._asks.pop(ticket, None)
        if isinstance(value, PassError):
            undone = [] if flight is None else [[ws, count] for ws, (_, count) in flight.undo.items()]
            for ws, count in undone:
                if ws in self._lengths:
                    self._lengths[ws] = max(0, self._lengths[ws] - count)
            if flight is not None and flight.dropped and not self._closed and flight.pipeline not in self._cancelled:
                where = value.line or flight.line
                self.log(WARNING, f"a pass submitted at {where} failed, and nothing awaits it: {value.cause}\n")
            return ticket * 2, 1, {"message": value.cause, "line": value.line or "", "undone": undone}
        self._collected += sum(array.nbytes for array in value)
        if (flight is None and ask is None) or (flight is not None and flight.dropped):
            return None
        return ticket * 2, 0, [array.tolist() for array in value]

    def wait(self, timeout_ms: int | None) -> str | Pending[str]:
        found = self.collect()
        if found:
            return encode_events(found)
        pending: Pending[str] = Pending(lambda: encode_events(self.collect()), timeout_ms)
        self._waiter = pending.wake
        if self._events or self._own_events or (self._receives and (self._inbox or not self._inbox_open)):
            pending.wake()  # it came between the collection and the waiter
        return pending

    # -- engine

    def facts(self) -> str:
        own = facts_json(self._facts)
        others = {name: facts_json(model.facts) for name, model in self._models.items() if model is not self._default}
        return json.dumps({"world": WORLD, **own, "seed": self._seed, "models": others}, separators=(",", ":"))

    def model(self, name: Any) -> HostModel:
        """A model by its name; None is the default one.

        Raises:
            RequestError: there is none of this name.
        """
        found = self._default if name is None else self._models.get(name) if type(name) is str else None
        if found is None:
            raise RequestError(f"there is no model {name!r:.60} here; there is {', '.join(self._models)}")
        return found

    def engine_name(self, model: str | None) -> str | None:
        """A known model's name, None where it is the default one's."""
        found = self.model(model)
        return None if found is self._default else found.facts.name

    def new_set(self, model: str | None = None) -> int:
        handle = self._live().new_set(self.engine_name(model))
        self._lengths[handle] = 0
        return handle

    def fork_set(self, ws: int) -> int:
        handle = self._live().fork_set(ws)
        self._lengths[handle] = self._lengths.get(ws, 0)
        return handle

    def truncate_set(self, ws: int, n: int) -> None:
        self._live().truncate_set(ws, n)
        self.shortened(ws, min(n, self._lengths.get(ws, 0)))

    def shortened(self, ws: int, length: int) -> None:
        """A set has `length` tokens now."""
        self._lengths[ws] = length
        for flight in self._flights.values():
            if not flight.arrived and ws in flight.undo:  # of what it appends, this much can still be undone
                start, count = flight.undo[ws]
                flight.undo[ws] = start, min(count, max(0, length - start))

    def opened(self, ws: int) -> int:
        """Remember a set that was made by another call than `new_set`; its length."""
        self._lengths[ws] = self.client.set_length(ws)
        return self._lengths[ws]

    @property
    def client(self) -> Client:
        """The engine's account of this process, while it runs."""
        return self._live()

    def drop_set(self, ws: int) -> None:
        self._live().drop_set(ws)
        self._lengths.pop(ws, None)

    def new_pipeline(self, seed: int | None) -> int:
        if seed is None:
            seed = nth_seed(self._seed, self._pipelines)
            self._pipelines += 1
        return self._live().new_pipeline(seed)

    def close_pipeline(self, p: int, cancel: bool) -> None:
        if cancel:
            self._cancelled.add(p)
            self._live().cancel_pipeline(p)
        else:
            self._live().close_pipeline(p)

    def new_channel(self, spec: str) -> int:
        wanted = loads(spec, 4096, "a channel's spec")
        if type(wanted) is not dict or wanted.keys() != {"dtype", "shape", "capacity"}:
            raise RequestError("a channel's spec has exactly dtype, shape and capacity")
        dtype = wanted["dtype"]
        if type(dtype) is not str or dtype not in DTYPES:
            raise RequestError(f"a channel's dtype is {dtype!r:.60}, not one of {', '.join(DTYPES)}")
        shape = integers(wanted["shape"], "a channel's shape", MAX_CELL + 1)
        if len(shape) > 4 or 0 in shape:
            raise RequestError(f"a channel's shape is {list(shape)}: at most 4 dimensions of at least 1")
        kind = TensorType(DTYPES[dtype], shape)
        if kind.size > MAX_CELL:
            raise RequestError(f"a channel's cell has {kind.size} elements; the limit is {MAX_CELL}")
        capacity = integer(wanted["capacity"], "a channel's capacity", 1 << 16)
        if capacity < 1:
            raise RequestError("a channel's capacity is at least 1")
        channel = self._live().new_channel(kind, capacity)
        self._cells[channel] = kind
        return channel

    def channel(self, ch: int, op: str, value: str) -> int:
        client = self._live()
        match op:
            case "take" | "read":
                kind = self._cell(ch)
                self._room()
                ticket = client.take_channel(ch) if op == "take" else client.read_channel(ch)
                self._asks[ticket] = kind
                return ticket * 2
            case "put" | "set":
                kind = self._cell(ch)
                given = loads(value, self._limits.request_bytes, "a channel's value")
                words = words_of(parse_value(given, kind, "the channel's value"), kind)
                if op == "put":
                    client.put_channel(ch, words)
                else:
                    client.set_channel(ch, words)
                return 0
            case "drop":
                self._cell(ch)
                del self._cells[ch]
                client.drop_channel(ch)
                return 0
        raise RequestError(f"a channel has no operation {op!r:.60}")

    def submit(self, pipe: int, request: str) -> int:
        return self.submit_request(pipe, loads(request, self._limits.request_bytes, "a submit"))

    def submit_traced(self, pipe: int, request: dict[str, Any]) -> int:
        """A submit of trusted native code: "program" is a traced `Program` or None, parameters may be arrays."""
        return self.submit_request(pipe, request, lambda program: program)

    def submit_request(self, pipe: int, request: Any, program_of: Callable[[Any], Program] | None = None) -> int:
        """A submit as its dict."""
        client = self._live()
        if type(request) is dict:
            self._drop(integers(request.get("drop") or [], "drop", 1 << 53))
        times = parse_times(request)
        self._room(times)
        facts = self.model(request.get("model") if type(request) is dict else None).facts
        parsed, chained = parse_pass(request, program_of or self._program, facts.vocab_size, self.masks)
        first = self._submit_or_fail(client, pipe, parsed)
        for i in range(1, times):  # each embeds what the one before it gives; numbers follow one another
            self._submit_or_fail(client, pipe, chained(parsed, first + 2 * (i - 1)), later=True)
        return first

    def _submit_or_fail(self, client: Client, pipe: int, parsed: PassRequest, later: bool = False) -> int:
        """The guest's number of a pass; one that cannot be queued since what it embeds has failed, fails when awaited.

        Args:
            later: others of the same request are underway, so that it can be refused in no other way.
        """
        try:
            return self._submit(client, pipe, parsed)
        except PassError as error:
            failure = error
        except PieError as error:
            if not later:
                raise
            failure = PassError(str(error), parsed.line)
        number = client.number() * 2
        if len(self._still_born) < self._limits.tickets:
            self._still_born[number] = failure
        self._own_events.append((number, 1, {"message": failure.cause, "line": failure.line or "", "undone": []}))
        self._wake()
        return number

    def _own_ticket(self) -> int:
        self._own_tickets += 1
        return self._own_tickets * 2 + 1

    def _submit(self, client: Client, pipe: int, parsed: PassRequest) -> int:
        sources = tuple([self._source(row) for row in parsed.rows])
        if any(one is not other for one, other in zip(sources, parsed.rows, strict=True)):
            parsed = replace(parsed, rows=sources)
        ticket = client.submit(pipe, parsed)
        undo = {}
        if parsed.geometry is not Geometry.READ:
            for row in sources:
                if row.set is not None:
                    undo[row.set] = self._lengths.get(row.set, 0), self._count(row)
                    self._lengths[row.set] = sum(undo[row.set])
        sizes = () if parsed.program is None else tuple(kind.size for kind in parsed.program.results)
        self._flights[ticket] = Flight(sizes, undo, parsed.line, pipe)
        return ticket * 2

    def _program(self, program: Any) -> Program:
        if type(program) is not str:
            raise RequestError("program is a string")
        return self._programs.get(program)

    def _source(self, row: Row) -> Row:
        """The row with the guest's ticket number turned into the engine's, which must be one it may name."""
        match row.tokens:
            case FromTicket(ticket, index):
                return replace(row, tokens=self.result_of(ticket, index))
            case FromChannel(channel):
                self._cell(channel)
        return row

    def result_of(self, ticket: int, index: int) -> FromTicket:
        """A result by the guest's ticket number as the engine knows it.

        Raises:
            RequestError: it is not one that the guest may name. PassError: the pass could not even be queued.
        """
        failure = self._still_born.get(ticket)
        if failure is not None:
            raise PassError(failure.cause, failure.line)
        flight = self._flights.get(ticket // 2)
        if ticket % 2 or flight is None or flight.dropped:
            raise RequestError(f"ticket {ticket} is not a pass of this process, or its Output was dropped")
        if index >= len(flight.sizes):
            raise RequestError(f"ticket {ticket} has {len(flight.sizes)} results, not a result {index}")
        return FromTicket(ticket // 2, index)

    def check_underway(self, ticket: int, index: int) -> None:
        """Refuse a result, by the guest's ticket number, that does not exist or that the process has been told already."""
        try:
            self.result_of(ticket, index)
        except PassError as failure:
            raise RequestError(f"the pass has failed: {failure.cause}") from None
        if self._flights[ticket // 2].arrived:
            raise RequestError("the pass has landed, and its results were collected: use their values")

    def _count(self, row: Row) -> int:
        match row.tokens:
            case FromTicket(ticket, index):
                return self._flights[ticket].sizes[index]
            case FromChannel(channel):
                return self._cells[channel].size
            case tokens:
                return len(tokens)

    def _drop(self, tickets: tuple[int, ...]) -> None:
        for number in tickets:
            ticket = number // 2
            self._still_born.pop(number, None)
            flight = None if number % 2 else self._flights.get(ticket)
            if flight is None or flight.dropped:
                continue  # a take, a receive, or already gone: nothing is held
            flight.dropped = True
            if flight.arrived:
                del self._flights[ticket]
            self._live().release(ticket)

    def _cell(self, channel: int) -> TensorType:
        kind = self._cells.get(channel)
        if kind is None:
            raise RequestError(f"channel {channel} is not one of this process")
        return kind

    def _room(self, more: int = 1) -> None:
        """Refuse to ask for so many more while too much is unread or in flight."""
        unread = self._arrived - self._collected
        if unread > self._limits.unread_bytes:
            raise RequestError(
                f"{unread} bytes of results are unread (the limit is {self._limits.unread_bytes})",
                "await results, or let go of Outputs that you do not need",
            )
        open_tickets = len(self._flights) + len(self._asks) + len(self._receives) + self._started
        if open_tickets + more > self._limits.tickets:
            raise RequestError(
                f"{open_tickets} results are asked for or held (the limit is {self._limits.tickets})",
                "await passes as you go, and do not keep every Output",
            )

    def _live(self) -> Client:
        if self._closed:
            raise RequestError("the process has ended")
        return self._client

    # -- session

    def send(self, text: str) -> None:
        self._output += len(text.encode("utf-8", "replace"))
        if self._output > self._limits.output_bytes:
            raise RequestError(f"the process sent more than its limit of {self._limits.output_bytes} bytes of output")
        self._sink.sent(text)

    def receive(self) -> int:
        self._room()
        ticket = self._own_ticket()
        self._receives.append(ticket)
        if self._inbox or not self._inbox_open:
            self._wake()
        return ticket

    def log(self, level: int, text: str) -> None:
        if self._logged > self._limits.log_bytes:
            return
        self._logged += len(text)
        if self._logged > self._limits.log_bytes:
            text = f"this process logged more than {self._limits.log_bytes} characters; the rest is dropped\n"
            level = WARNING
        self._sink.logged(level, text)

    # -- model

    def encode(self, text: str, specials: bool, model: str | None = None) -> Sequence[int]:
        self._sized(text, "the text to encode")
        return self.model(model).language.encode(text, specials)

    def decode(self, ids: Sequence[int], skip_specials: bool, model: str | None = None) -> str:
        chosen = self.model(model)
        if len(ids) and max(ids) >= chosen.facts.vocab_size:
            raise RequestError(f"token {max(ids)} is not in the vocabulary of {chosen.facts.vocab_size}")
        return chosen.language.decode(ids, skip_specials)

    def chat(self, request: str) -> Sequence[int]:
        return self.render(loads(request, self._limits.text_bytes, "a chat request"))

    def render(self, wanted: Any, model: str | None = None) -> Sequence[int]:
        """A chat request as its dict."""
        if type(wanted) is not dict or type(wanted.get("messages")) is not list:
            raise RequestError("a chat request is an object with messages")
        tools = wanted.get("tools")
        if tools is not None and type(tools) is not list:
            raise RequestError("tools is a list, or null")
        if not all(type(message) is dict for message in wanted["messages"]):
            raise RequestError("a message is an object with role and content")
        language = self.model(model).language
        return language.chat(wanted["messages"], tools, wanted.get("add_generation_prompt") is not False)

    def _sized(self, text: str, what: str) -> None:
        if len(text) > self._limits.text_bytes:
            raise RequestError(f"{what} has {len(text)} characters; the limit is {self._limits.text_bytes}")

    # -- everything else, by name

    def call(self, name: str, request: str) -> str:
        """The answer to a call of one of the rooms, both as JSON."""
        return encode_events(self.ask(name, self._request(name, request)))

    def start(self, name: str, request: str) -> int:
        """A ticket for what a room answers later."""
        return self.begin(name, self._request(name, request))

    def _request(self, name: str, request: str) -> Any:
        return loads(request, self._limits.request_bytes, f"a request of {name:.60}")

    def ask(self, name: str, request: Any) -> Any:
        self._live()
        return _named(self._calls, self._starts, name)(Request.of(name, request))

    def begin(self, name: str, request: Any) -> int:
        self._live()
        start = _named(self._starts, self._calls, name)
        self._room()
        ticket = self._own_ticket()
        self._started += 1
        try:
            start(Request.of(name, request), Answer(lambda failed, value: self._answered(ticket, failed, value)))
        except BaseException:
            self._started -= 1
            raise
        return ticket

    def _answered(self, ticket: int, failed: int, value: Any) -> None:
        """From any thread."""
        self._started -= 1
        self._own_events.append((ticket, failed, value))
        self._wake()

    # -- the process's owner

    def post(self, text: str) -> None:
        """Give the process a message; from any thread."""
        self._sized(text, "a message")
        if not self._inbox_open:
            raise PieError("the process takes no more messages")
        if len(self._inbox) >= self._limits.inbox:
            raise PieError(f"the process has {len(self._inbox)} messages it has not received; that is its limit")
        self._inbox.append(text)
        self._wake()

    def close_inbox(self) -> None:
        """No message will come any more: waiting receives end with None."""
        self._inbox_open = False
        self._wake()

    def close(self) -> None:
        """Give everything back to the engine; later calls are refused."""
        if not self._closed:
            self._closed = True
            self._inbox_open = False
            for room in self._rooms:
                room.close()
            self._client.close()

    @property
    def output_bytes_left(self) -> int:
        return max(0, self._limits.output_bytes - self._output)


def _tell(landed: Landed, value: Value) -> None:
    if isinstance(value, PassError):
        landed(None, value.cause)
    else:
        landed(value, "")


def _named(these: Mapping[str, T], others: Mapping[str, Any], name: str) -> T:
    found = these.get(name)
    if found is None:
        way = "; it is for the other of call and start" if name in others else ""
        raise RequestError(f"this host has no call {name!r:.60}{way}")
    return found


def facts_json(facts: ModelFacts) -> dict[str, Any]:
    """What `engine.facts` says of one model."""
    return {
        "name": facts.name,
        "vocab_size": facts.vocab_size,
        "max_context": facts.max_context,
        "page_size": facts.page_size,
        "outputs": facts.outputs,
        "stop_tokens": facts.stop_tokens,
        "prefix": facts.prefix,
        "attention": facts.attention,
    }


def nth_seed(seed: int, n: int) -> int:
    """The n-th pipeline's seed: the process's own for the first, then splitmix64 steps from it."""
    if n == 0:
        return seed
    mask = (1 << 64) - 1
    z = (seed + n * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)
