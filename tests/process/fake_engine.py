"""A deterministic stand-in for the engine: one queue, one thread, logits that are a function of the tokens so far."""

from __future__ import annotations

import queue
import threading
from collections import Counter, deque
from concurrent.futures import Future
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pie_xla.engine.api import FromChannel, FromTicket, Geometry, PassError, PassRequest
from pie_xla.errors import PieError
from pie_xla.eta import oracle
from pie_xla.eta.program import EtaProgram
from pie_xla.eta.types import TensorType
from pie_xla.process.interfaces import ModelFacts

V = 300
D = 8
FACTS = ModelFacts(
    name="fake",
    vocab_size=V,
    max_context=64,
    page_size=16,
    outputs={"logits": ((V,), "f32"), "hidden": ((D,), "f32")},
    stop_tokens=(2,),
    prefix=(1,),
)


def logits_of(tokens: list[int]) -> np.ndarray:
    """f32[V] after these tokens."""
    seed = 7
    for token in tokens:
        seed = (seed * 1103515245 + token + 12345) % 2**31
    return np.random.default_rng(seed).normal(size=V).astype(np.float32)


def greedy(tokens: list[int], count: int) -> list[int]:
    """What greedy decoding gives."""
    tokens = list(tokens)
    for _ in range(count):
        tokens.append(int(np.argmax(logits_of(tokens))))
    return tokens[-count:]


_COMPILED: dict[str, Any] = {}


class Bytes:
    """A tokenizer of bytes: token = byte + 3."""

    def encode(self, text: str, specials: bool) -> list[int]:
        return [byte + 3 for byte in text.encode()]

    def decode(self, ids: Any, skip_specials: bool) -> str:
        return bytes(token - 3 for token in ids if 3 <= token < 259).decode("utf-8", "replace")

    def chat(self, messages: list[dict[str, Any]], tools: list[Any] | None, add_generation_prompt: bool) -> list[int]:
        text = "".join(f"<{message['role']}>{message['content']}" for message in messages)
        return self.encode(text + ("<assistant>" if add_generation_prompt else ""), False)


class FakeClient:
    def __init__(self, engine: FakeEngine, on_event: Any) -> None:
        self.engine, self.on_event = engine, on_event
        self.sets: dict[int, list[int]] = {}
        self.models: Counter[str | None] = Counter()  # sets made, by their model
        self.channels: dict[int, tuple[TensorType, int, deque[np.ndarray], deque[tuple[int, bool]]]] = {}
        self.pipelines: dict[int, int] = {}
        self.cancelled: set[int] = set()
        self.ordinals: dict[int, int] = {}
        self.results: dict[int, Any] = {}
        self.released: list[int] = []
        self.submits: list[PassRequest] = []
        self.buffered: dict[int, int] = {}
        self.evicted: list[Any] = []
        self.closed = False
        self._next = 0

    def _number(self) -> int:
        self._next += 1
        return self._next

    number = _number

    def _set(self, ws: int | None) -> list[int]:
        if ws is None or ws not in self.sets:
            raise PieError(f"working set {ws} is not one of this process")
        return self.sets[ws]

    def new_set(self, model: str | None = None) -> int:
        self.models[model] += 1
        handle = self._number()
        self.sets[handle] = []
        return handle

    def fork_set(self, ws: int) -> int:
        source, handle = self._set(ws), self._number()
        copy: list[int] = []
        self.sets[handle] = copy
        self.engine.post(lambda: copy.extend(source))
        return handle

    def _number_of(self, n: int | FromTicket) -> int:
        return n if isinstance(n, int) else int(self.results[n.ticket][n.index])

    def truncate_set(self, ws: int, n: int | FromTicket) -> None:
        tokens = self._set(ws)
        self.engine.post(lambda: tokens.__delitem__(slice(max(0, self._number_of(n)), None)))

    def commit_set(self, ws: int, n: int | FromTicket) -> None:
        tokens = self._set(ws)
        most = self.buffered.pop(ws, 0)

        def cut() -> None:
            if isinstance(n, FromTicket) and isinstance(self.results[n.ticket], PassError):
                return  # nothing was appended
            kept = min(max(self._number_of(n), 0), most)
            del tokens[len(tokens) - most + kept :]

        self.engine.post(cut)

    def evict_set(self, ws: int, spans: Any) -> None:
        self._set(ws)
        self.evicted.append((ws, tuple(spans)))

    def set_length(self, ws: int) -> int:
        self.engine.settle()
        return len(self._set(ws))

    def publish_set(self, ws: int, name: str) -> None:
        source = self._set(ws)
        copy = self.engine.published[name] = []
        self.engine.post(lambda: copy.extend(source))

    def open_set(self, name: str, model: str | None = None) -> int | None:
        if name not in self.engine.published:
            return None
        handle, source = self._number(), self.engine.published[name]
        copy: list[int] = []
        self.sets[handle] = copy
        self.engine.post(lambda: copy.extend(source))
        return handle

    def withdraw_set(self, name: str, model: str | None = None) -> bool:
        return self.engine.published.pop(name, None) is not None

    def drop_set(self, ws: int) -> None:
        self._set(ws)
        del self.sets[ws]

    def new_pipeline(self, seed: int | None) -> int:
        handle = self._number()
        self.pipelines[handle] = seed or 0
        self.ordinals[handle] = 0
        return handle

    def close_pipeline(self, pipeline: int) -> None:
        self.pipelines.pop(pipeline)

    def cancel_pipeline(self, pipeline: int) -> None:
        self.cancelled.add(pipeline)
        self.pipelines.pop(pipeline, None)

    def new_channel(self, kind: TensorType, capacity: int) -> int:
        handle = self._number()
        self.channels[handle] = (kind, capacity, deque(), deque())
        return handle

    def put_channel(self, channel: int, words: np.ndarray) -> None:
        kind, capacity, cells, _ = self.channels[channel]
        if len(cells) >= capacity:
            raise PieError(f"channel {channel} is full")
        cells.append(value_of(words, kind))
        self.engine.post(lambda: self._serve(channel))

    def set_channel(self, channel: int, words: np.ndarray) -> None:
        kind, _, cells, _ = self.channels[channel]
        if cells:
            cells.popleft()
        cells.appendleft(value_of(words, kind))

    def take_channel(self, channel: int) -> int:
        return self._ask(channel, True)

    def read_channel(self, channel: int) -> int:
        return self._ask(channel, False)

    def _ask(self, channel: int, take: bool) -> int:
        ticket = self._number()
        self.channels[channel][3].append((ticket, take))
        self.engine.post(lambda: self._serve(channel))
        return ticket

    def _serve(self, channel: int) -> None:
        if channel not in self.channels:  # dropped meanwhile
            return
        _, _, cells, asks = self.channels[channel]
        while asks and cells:
            ticket, take = asks.popleft()
            self.on_event(ticket, (cells.popleft() if take else cells[0],))

    def drop_channel(self, channel: int) -> None:
        del self.channels[channel]

    def release(self, ticket: int) -> None:
        self.released.append(ticket)

    def close(self) -> None:
        self.closed = True
        self.sets.clear()
        self.channels.clear()

    def submit(self, pipeline: int, request: PassRequest) -> int:
        if pipeline not in self.pipelines:
            raise PieError(f"pipeline {pipeline} is not one of this process, or is closed")
        for row in request.rows:
            self._set(row.set)
        ticket, ordinal = self._number(), self.ordinals[pipeline]
        self.ordinals[pipeline] += 1
        self.submits.append(request)
        sets = [self._set(row.set) for row in request.rows]
        if request.geometry is Geometry.BUFFER:
            for row in request.rows:
                assert row.set is not None and isinstance(row.tokens, tuple)
                self.buffered[row.set] = self.buffered.get(row.set, 0) + len(row.tokens)
        seed = self.pipelines[pipeline]
        self.engine.post(lambda: self._run(ticket, pipeline, seed, ordinal, request, sets))
        return ticket

    def _run(self, ticket: int, pipeline: int, seed: int, ordinal: int, request: PassRequest, sets: Any) -> None:
        try:
            if pipeline in self.cancelled:
                raise PassError("cancelled", request.line)
            if self.engine.fail:
                raise PassError(self.engine.fail.popleft(), request.line)
            value = self._compute(seed, ordinal, request, sets)
        except PassError as error:
            self.results[ticket] = error
            self.on_event(ticket, error)
            return
        self.results[ticket] = value
        self.on_event(ticket, value)
        for channel in request.channels:
            self._serve(channel)

    def _tokens(self, source: Any, line: str | None) -> list[int]:
        match source:
            case FromTicket(ticket, index):
                value = self.results[ticket]
                if isinstance(value, PassError):
                    raise PassError(value.cause, value.line)
                return [int(token) for token in np.ravel(value[index])]
            case FromChannel(channel):
                return [int(token) for token in np.ravel(self.channels[channel][2].popleft())]
            case tokens:
                return list(tokens)

    def _compute(self, seed: int, ordinal: int, request: PassRequest, sets: Any) -> tuple[np.ndarray, ...]:
        after = []
        for row, tokens in zip(request.rows, sets, strict=True):
            new = self._tokens(row.tokens, request.line)
            after.append((len(tokens), tokens + new))
        if request.geometry is not Geometry.READ:
            for tokens, (_, whole) in zip(sets, after, strict=True):
                tokens[:] = whole
        program = request.program
        if program is None:
            return ()
        reads = []
        for read in program.reads:
            start, whole = after[read.row]
            wanted = None if request.readout is None else request.readout[read.row]
            at = [len(whole) - 1] if wanted is None else [start + i for i in wanted]
            rows = np.stack([logits_of(whole[: i + 1])[: read.shape[-1]] for i in at])
            reads.append(rows.reshape(read.shape))
        cells = []
        for channel, use in zip(request.channels, program.channels, strict=True):
            queue_ = self.channels[channel][2]
            value = np.zeros(use.type.shape, use.type.dtype.numpy)
            if use.take:
                value = queue_.popleft()
            elif use.read:
                value = queue_[0]
            cells.append(value)
        try:
            params = [value.result(10) if isinstance(value, Future) else value for value in request.params]
        except PieError as error:
            raise PassError(str(error), request.line) from None
        results, puts = apply(program, reads, params, cells, (seed >> 32, seed & 0xFFFFFFFF), ordinal)
        putters = [ch for ch, use in zip(request.channels, program.channels, strict=True) if use.put]
        for channel, value in zip(putters, puts, strict=True):
            self.channels[channel][2].append(np.asarray(value))
        return tuple(np.asarray(result) for result in results)


class FakeEngine:
    """`client` as the engine's; `fail`: causes for the next passes to fail with."""

    def __init__(self) -> None:
        self.clients: list[FakeClient] = []
        self.fail: deque[str] = deque()
        self.published: dict[str, list[int]] = {}
        self._work: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._loop, daemon=True)
        self._thread.start()

    def client(self, name: str, on_event: Any) -> FakeClient:
        client = FakeClient(self, on_event)
        self.clients.append(client)
        return client

    def post(self, work: Any) -> None:
        self._work.put(work)

    def settle(self) -> None:
        """Wait until what was posted has happened."""
        done = threading.Event()
        self.post(done.set)
        done.wait(5)

    def close(self) -> None:
        self._work.put(None)
        self._thread.join(5)

    def _loop(self) -> None:
        while (work := self._work.get()) is not None:
            work()


def apply(program: Any, reads: Any, params: Any, cells: Any, key: tuple[int, int], ordinal: int) -> Any:
    """Recorded programs by the NumPy oracle, which compiles nothing; native ones by JAX."""
    if isinstance(program, EtaProgram):
        return oracle.run(program, reads, params, cells, key, ordinal)
    arrays = [[jnp.asarray(value) for value in values] for values in (reads, params, cells)]
    if program.key not in _COMPILED:
        _COMPILED[program.key] = jax.jit(program.apply)
    return _COMPILED[program.key](*arrays, jnp.asarray(key, jnp.uint32), jnp.uint32(ordinal))


def value_of(words: np.ndarray, kind: TensorType) -> np.ndarray:
    if kind.dtype.numpy == np.bool_:
        return (words != 0).reshape(kind.shape)
    return words.view(kind.dtype.numpy).reshape(kind.shape)
