"""What one process holds of the engine: handles, quotas, and the calls that turn into effects in order.

Calls validate in the caller's thread, so that an error is raised where it was caused; then they are posted to the engine's thread and
return at once.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from pie_xla.engine.api import Event, FromChannel, FromTicket, Geometry, PassError, PassRequest, Row, Sight
from pie_xla.engine.packing import check_param
from pie_xla.engine.programs import NoProgram
from pie_xla.engine.records import (
    Channel,
    DropSet,
    Effect,
    Evict,
    Fork,
    HostPut,
    HostTake,
    Lane,
    Pass,
    PassRow,
    PendingLength,
    Pipeline,
    Shorten,
    Status,
    WorkingSet,
)
from pie_xla.engine.sights import bad_sight
from pie_xla.errors import PieError
from pie_xla.eta.types import DType, Program, TensorType

if TYPE_CHECKING:
    from pie_xla.engine.engine import Engine
    from pie_xla.engine.served import Served

T = TypeVar("T")
NO_PROGRAM: Program = NoProgram()
TOKEN_TYPES = (DType.I32, DType.U32)


class Client:
    """One process's account with the engine; made by `Engine.client`. `close()` gives everything back."""

    def __init__(self, engine: Engine, id: int, name: str, on_event: Event, tenant: str = "") -> None:
        self._engine = engine
        self._quota = engine.options.quota
        self.id = id
        self.name, self.tenant = name, tenant
        self.on_event = on_event
        self._handles = itertools.count(1)
        self._sets: dict[int, WorkingSet] = {}
        self._pipelines: dict[int, Pipeline] = {}
        self._channels: dict[int, Channel] = {}
        self._tickets: dict[int, Pass] = {}
        self._takes: set[int] = set()  # tickets of channel takes that have had no event
        self._words = 0  # device words of channels and of outputs that are not released
        self._closed = False

    # -- working sets --------------------------------------------------------------------------------------------

    def new_set(self, model: str | None = None) -> int:
        """A new, empty working set of a model (None: the default one)."""
        self._room("working sets", len(self._sets), self._quota.sets)
        served = self._engine.served(model)
        made = WorkingSet(next(self._handles), self.id, served, served.ledger.new(), tenant=self.tenant)
        self._sets[made.id] = made
        return made.id

    def fork_set(self, ws: int) -> int:
        """A set with the same content as `ws` after all calls so far; nothing is copied."""
        self._room("working sets", len(self._sets), self._quota.sets)
        parent = self._set(ws)
        child = self._forked(parent, self.id)
        self._sets[child.id] = child
        return child.id

    def truncate_set(self, ws: int, n: int | FromTicket) -> None:
        """Shorten a set to its first `n` tokens. A value on the device (i32 or u32 scalar) beyond the length changes nothing."""
        target = self._set(ws)
        if isinstance(n, FromTicket):
            self._no_recurrent(target, "truncate by a value on the device")
            self._shorten_by(target, n, after=False, most=target.submitted, commit=False)
            return
        if not 0 <= n <= target.submitted:
            raise PieError(f"truncate({n}): the set has {target.submitted} tokens", "give a length from 0 to len(ws)")
        self._known(target, n, f"truncate({n})")
        reason = target.model.cannot_truncate(target, n)
        if reason is not None:
            raise PieError(reason)
        target.shorten(n)
        self._post(Shorten(target, n, lanes=(target.lane,)))

    def commit_set(self, ws: int, n: int | FromTicket) -> None:
        """Keep the first `n` of the buffered tokens, which are final then, and drop the others. A value on the device is clipped."""
        target = self._set(ws)
        most = target.buffered
        if isinstance(n, FromTicket):
            self._no_recurrent(target, "commit by a value on the device")
            self._shorten_by(target, n, after=True, most=most, commit=True)
            target.buffered = 0
            return
        if not 0 <= n <= most:
            raise PieError(f"commit({n}): {most} tokens are buffered", f"give a number from 0 to {most}")
        if n not in (0, most):
            self._no_recurrent(
                target, f"commit({n}) of {most} buffered tokens", "0 or all of them, or fork the set before"
            )
        if target.submitted == target.certain:
            length = target.submitted - most + n
            target.shorten(length)
            target.buffered = 0
            self._post(Shorten(target, length, commit=True, lanes=(target.lane,)))
        else:
            pending = PendingLength(most - n)
            target.expect(pending)
            target.buffered = 0
            self._post(Shorten(target, n, True, most, True, pending=pending, lanes=(target.lane,)))

    def _shorten_by(self, target: WorkingSet, n: FromTicket, *, after: bool, most: int, commit: bool) -> None:
        source = self._tickets.get(n.ticket)
        if source is None:
            raise PieError(f"the length is an output of pass {n.ticket}, which is unknown or was dropped")
        kinds = source.entry.program.results
        if not 0 <= n.index < len(kinds) or kinds[n.index].shape or kinds[n.index].dtype not in TOKEN_TYPES:
            raise PieError("a length on the device is an i32 or u32 scalar")
        if source.status is Status.FAILED and source.error is not None:
            raise source.error
        pending = PendingLength(most)
        target.expect(pending)
        self._post(Shorten(target, 0, after, most, commit, source, n.index, pending=pending, lanes=(target.lane,)))

    def evict_set(self, ws: int, spans: Sequence[tuple[int, int]]) -> None:
        """Kill the cells at the positions in half-open spans; a page whose cells are all dead goes back. Positions stay as they are."""
        target = self._set(ws)
        self._no_recurrent(target, "evict")
        for begin, end in spans:
            if not 0 <= begin <= end <= target.submitted:
                raise PieError(f"evict of {begin}..{end}: the set has positions 0 to {target.submitted}")
            self._known(target, end, f"evict of {begin}..{end}")
        reason = target.model.cannot_evict(spans)
        if reason is not None:
            raise PieError(reason)
        self._post(Evict(target, tuple(spans), lanes=(target.lane,)))

    def _known(self, target: WorkingSet, n: int, what: str) -> None:
        if n > target.certain and target.certain != target.submitted:
            raise PieError(
                f"{what}: the set's length is a value on the device, between {target.certain} and {target.submitted}",
                "await the output that decides it first",
            )

    @staticmethod
    def _no_recurrent(
        target: WorkingSet, what: str, instead: str = "fork the set before the tokens you may take back"
    ) -> None:
        if target.model.recurrent:
            raise PieError(f"{what} is not possible: a recurrent state cannot be undone", instead)

    def publish_set(self, ws: int, name: str) -> None:
        """Keep a fork of the set, after all calls so far, under a name for every client of this tenant."""
        parent = self._set(ws)
        if parent.buffered:
            raise PieError(f"publish: {parent.buffered} tokens of the set are buffered", "commit them first")
        made = self._forked(parent, 0)
        self._engine.named.publish(self.tenant, name, made)

    def open_set(self, name: str, model: str | None = None) -> int | None:
        """A fork of what was published under a name by a set of the model, or None."""
        found = self._engine.named.open(self.tenant, self._engine.served(model).name, name)
        if found is None:
            return None
        self._room("working sets", len(self._sets), self._quota.sets)
        child = self._forked(found, self.id)
        self._sets[child.id] = child
        return child.id

    def withdraw_set(self, name: str, model: str | None = None) -> bool:
        """Forget what was published under a name; False when there is nothing."""
        return self._engine.named.withdraw(self.tenant, self._engine.served(model).name, name)

    def _forked(self, parent: WorkingSet, owner: int) -> WorkingSet:
        model = parent.model
        child = WorkingSet(next(self._handles), owner, model, model.ledger.new(), tenant=self.tenant)
        with parent.guard:
            child.counted, child.buffered, child.pending = parent.counted, parent.buffered, list(parent.pending)
        self._post(Fork(parent, child, lanes=(parent.lane, child.lane)))
        return child

    def set_length(self, ws: int) -> int:
        """Tokens in the set after all calls so far: the next token's position."""
        return self._set(ws).submitted

    def drop_set(self, ws: int) -> None:
        """Give a set back once the calls so far have been served."""
        target = self._sets.pop(ws, None)
        if target is not None:
            self._post(DropSet(target, lanes=(target.lane,)))

    # -- pipelines -----------------------------------------------------------------------------------------------

    def new_pipeline(self, seed: int | None = None) -> int:
        """A pipeline; its random keys come from `seed` (64 bits) or from the operating system."""
        if len(self._pipelines) >= self._quota.pipelines:
            self._pipelines = {h: p for h, p in self._pipelines.items() if p.passes or not p.closed}
        self._room("pipelines", len(self._pipelines), self._quota.pipelines)
        value = secrets.randbits(64) if seed is None else seed % (1 << 64)
        made = Pipeline(next(self._handles), self.id, (value >> 32, value & 0xFFFFFFFF))
        self._pipelines[made.id] = made
        return made.id

    def close_pipeline(self, pipeline: int) -> None:
        """No more submits; what was submitted finishes."""
        target = self._pipeline(pipeline)
        target.closed = True

    def cancel_pipeline(self, pipeline: int) -> None:
        """Close, drop what no step has taken, discard what is in flight."""
        target = self._pipeline(pipeline)
        target.closed = True
        self._engine.post(lambda core: core.cancel_pipeline(target))

    # -- channels ------------------------------------------------------------------------------------------------

    def new_channel(self, kind: TensorType, capacity: int = 1) -> int:
        """A device-resident queue of `capacity` cells."""
        self._room("channels", len(self._channels), self._quota.channels)
        if capacity < 1:
            raise PieError(f"a channel needs a capacity of at least 1, not {capacity}")
        if len(kind.shape) > 4 or any(n < 1 for n in kind.shape):
            raise PieError(f"a channel of {kind} is not possible: rank at most 4, every extent at least 1")
        spare = self._engine.options.depth
        words = kind.size * (capacity + spare)
        self._room("device words", self._words + words - 1, self._quota.device_words)
        offset = self._engine.allocate_words(words)
        if offset is None:
            raise PieError(
                f"no room on the device for a channel of {capacity} x {kind} ({words} words)",
                "drop channels you no longer use",
            )
        self._words += words
        made = Channel(next(self._handles), self.id, kind, capacity, offset, spare)
        self._channels[made.id] = made
        return made.id

    def put_channel(self, channel: int, words: np.ndarray) -> None:
        """Append a host value, as u32 words [elements] in row-major order, once a cell is free."""
        self._host_put(channel, words, replace=False)

    def set_channel(self, channel: int, words: np.ndarray) -> None:
        """Replace the front cell's value, or append one when the channel is empty."""
        self._host_put(channel, words, replace=True)

    def _host_put(self, channel: int, words: np.ndarray, replace: bool) -> None:
        target = self._channel(channel)
        if words.shape != (target.type.size,) or words.dtype.itemsize != 4:
            raise PieError(
                f"the channel holds {target.type}: {target.type.size} words, not {words.dtype}{list(words.shape)}"
            )
        self._room("unfinished puts of a channel", len(target.putters), self._quota.queued_passes)
        self._post(HostPut(target, words.view(np.int32), replace, lanes=(target.putters,)))

    def take_channel(self, channel: int) -> int:
        """Consume the front cell; its value arrives as the event of the returned ticket."""
        return self._host_take(channel, consume=True)

    def read_channel(self, channel: int) -> int:
        """The front cell's value, which stays; arrives as the event of the returned ticket."""
        return self._host_take(channel, consume=False)

    def _host_take(self, channel: int, consume: bool) -> int:
        target = self._channel(channel)
        ticket = next(self._handles)
        self._takes.add(ticket)
        self._post(HostTake(target, ticket, consume, lanes=(target.takers,)))
        return ticket

    def drop_channel(self, channel: int) -> None:
        target = self._channels.pop(channel, None)
        if target is not None:
            self._words -= target.words
            self._engine.post(lambda core: core.drop_channel(target))

    # -- passes --------------------------------------------------------------------------------------------------

    def submit(self, pipeline: int, request: PassRequest) -> int:
        """Queue a pass; its results arrive as the event of the returned ticket.

        Raises:
            PieError: the request breaks a rule; nothing was queued.
        """
        lane = self._pipeline(pipeline)
        if lane.closed:
            raise PieError("this pipeline is closed", "make a new Pipeline() for more passes")
        self._room("unfinished passes", len(lane.passes), self._quota.queued_passes)
        program = request.program or NO_PROGRAM
        model = self._engine.served(request.model)
        rows, producers, embedded = self._rows(model, request)
        self._check_program(model, program, request)
        self._check_stages(model, program, rows)
        channels = self._bind(program, request)
        words = sum(kind.size for kind in program.results)
        self._room("device words", self._words + words - 1, self._quota.device_words)
        entry = model.programs.entry(program)
        ticket = next(self._handles)
        lanes = _lanes(rows, channels, program, embedded)
        item = Pass(
            ticket=ticket,
            client=self.id,
            model=model,
            pipeline=lane,
            request=request,
            rows=rows,
            entry=entry,
            channels=channels,
            ordinal=lane.ordinals,
            read_only=request.geometry is Geometry.READ,
            producers=producers,
            embedded=embedded,
            lanes=lanes,
            params=list(request.params),
            missing=sum(isinstance(value, Future) for value in request.params),
        )
        lane.ordinals += 1
        self._tickets[ticket] = item
        self._words += words
        if not item.read_only:
            for row in rows:
                if row.set is not None:
                    row.set.grow(row.total, tentative=request.geometry is Geometry.BUFFER)
        self._post(item)
        for i, value in enumerate(request.params):
            if isinstance(value, Future):
                value.add_done_callback(partial(self._param_came, item, i))
        return ticket

    def number(self) -> int:
        """The ticket that the next pass would have had; none will have it."""
        return next(self._handles)

    def _param_came(self, item: Pass, index: int, value: Future[np.ndarray]) -> None:
        """From any thread: a parameter that a pass waits for is here, or will never be."""
        self._engine.post_quietly(lambda core: core.param_came(item, index, value))

    def _rows(
        self, model: Served, request: PassRequest
    ) -> tuple[list[PassRow], tuple[Pass | None, ...], tuple[Channel, ...]]:
        if not request.rows:
            raise PieError("a pass needs at least one row of tokens")
        if len(request.rows) > model.max_rows:
            raise PieError(f"a pass of {len(request.rows)} rows; at most {model.max_rows} fit one launch")
        named = [row.set for row in request.rows if row.set is not None]
        if len(set(named)) != len(named):
            raise PieError(
                "the same working set appears twice in one pass", "fork it: two rows cannot append to one state"
            )
        if request.readout is not None and len(request.readout) != len(request.rows):
            raise PieError(f"readout names {len(request.readout)} rows, the pass has {len(request.rows)}")
        rows, producers, embedded = [], [], []
        for i, row in enumerate(request.rows):
            tokens, total, producer, channel = self._tokens(model, i, row)
            producers.append(producer)
            if channel is not None:
                embedded.append(channel)
            last = 1
            if request.readout is not None:
                wanted = request.readout[i]
                if not wanted or min(wanted) < 0 or max(wanted) >= total or list(wanted) != sorted(set(wanted)):
                    raise PieError(
                        f"readout of row {i} must be increasing positions within its {total} tokens, not {list(wanted)}"
                    )
                last = total - wanted[0]
            if producer is not None or channel is not None:
                last = total  # device tokens are taken all at once
            if last > model.chunk:
                raise PieError(f"readout of row {i} spans {last} tokens; one launch reads out at most {model.chunk}")
            target = None if row.set is None else self._set(row.set)
            if target is not None and target.model is not model:
                raise PieError(
                    f"the set of row {i} holds state of the model {target.model.name}, the pass runs {model.name}",
                    f"give ForwardPass and WorkingSet the same model, as in WorkingSet(model={model.name!r})",
                )
            if target is None and model.stateful:
                raise PieError(
                    f"row {i} has no working set", "give each row one: fwd.state([ws, ...], StateGeometry.folding())"
                )
            length = (target.submitted if target is not None else 0) + total
            model.check_length(i, length)
            if target is not None and target.buffered and request.geometry is Geometry.FOLD:
                raise PieError(
                    f"row {i} appends final tokens to a set with {target.buffered} buffered ones",
                    "commit(n) says how many of them stay",
                )
            if row.sight is not None:
                self._check_sight(model, i, row.sight, target, total)
            rows.append(PassRow(target, tokens, total, last, row.sight, before=0 if target is None else target.counted))
        readouts = len(rows) if request.readout is None else sum(map(len, request.readout))
        model.check_launch(len(rows), max(row.last for row in rows), readouts)
        return rows, tuple(producers), tuple(embedded)

    def _check_sight(self, model: Served, i: int, sight: Sight, target: WorkingSet | None, total: int) -> None:
        if target is None or not model.views:
            raise PieError(f"row {i} has a mask, but this model's attention takes none on this backend")
        reason = bad_sight(sight, target.submitted, target.certain, total, windowed=model.windowed)
        if reason is not None:
            raise PieError(f"row {i}: {reason}")

    def _tokens(
        self, model: Served, index: int, row: Row
    ) -> tuple[np.ndarray | None, int, Pass | None, Channel | None]:
        match row.tokens:
            case FromTicket(ticket, result):
                producer = self._tickets.get(ticket)
                if producer is None:
                    raise PieError(f"row {index} embeds the output of pass {ticket}, which is unknown or was dropped")
                kinds = producer.entry.program.results
                if not 0 <= result < len(kinds):
                    raise PieError(f"row {index} embeds result {result} of a pass that has {len(kinds)}")
                if producer.status is Status.FAILED and producer.error is not None:
                    raise producer.error
                return None, self._device_tokens(model, index, kinds[result]), producer, None
            case FromChannel(channel):
                source = self._channel(channel)
                return None, self._device_tokens(model, index, source.type), None, source
            case tokens:
                array = np.asarray(tokens, np.int64)
                if array.ndim != 1 or not array.size:
                    raise PieError(f"row {index} has no tokens", "embed at least one token")
                low, high = int(array.min()), int(array.max())
                if low < 0 or high >= model.vocab_size:
                    wrong = low if low < 0 else high
                    raise PieError(
                        f"row {index} has token id {wrong}; the vocabulary has ids 0 to {model.vocab_size - 1}"
                    )
                return array.astype(np.int32), int(array.size), None, None

    def _device_tokens(self, model: Served, index: int, kind: TensorType) -> int:
        if kind.dtype not in TOKEN_TYPES:
            raise PieError(f"row {index} embeds a {kind}; token ids are i32 or u32")
        if kind.size > model.chunk:
            raise PieError(
                f"row {index} embeds {kind.size} tokens from the device; one launch takes at most {model.chunk}"
            )
        return kind.size

    def _check_program(self, model: Served, program: Program, request: PassRequest) -> None:
        if program is NO_PROGRAM:
            return
        if program.rows != len(request.rows):
            raise PieError(f"the epilogue was traced for {program.rows} rows, the pass has {len(request.rows)}")
        for read in program.reads:
            if read.name not in model.facts.outputs:
                known = ", ".join(model.facts.outputs)
                raise PieError(f"the model {model.name} has no output '{read.name}'; it has: {known}")
            suffix = model.facts.outputs[read.name][0]
            wanted = None if request.readout is None else len(request.readout[read.row])
            expected = suffix if wanted is None else (wanted, *suffix)
            if read.shape != expected or not 0 <= read.row < program.rows:
                raise PieError(
                    f"the epilogue reads {read.name} of row {read.row} as {list(read.shape)}; it is {list(expected)}"
                )
        if len(request.params) != len(program.params):
            raise PieError(f"the epilogue takes {len(program.params)} parameters, {len(request.params)} were given")
        for i, (kind, value) in enumerate(zip(program.params, request.params, strict=True)):
            if not isinstance(value, Future):
                check_param(i, kind, value)

    @staticmethod
    def _check_stages(model: Served, program: Program, rows: list[PassRow]) -> None:
        stages, shown = program.stages, model.facts.attention
        if stages is None:
            return
        if shown is None or not model.views:
            raise PieError(
                f"this pass has layer stages, but the attention of {model.name} cannot be looked at",
                "the model has no attention layers, or its kernels do not show them on this backend",
            )
        page = model.facts.page_size
        if stages.heads != (shown.heads, shown.head_dim) or stages.page != page:
            raise PieError(
                f"the layer stages were recorded for heads {list(stages.heads)} and pages of {stages.page}; "
                f"{model.name} has {[shown.heads, shown.head_dim]} and {page}"
            )
        for i, row in enumerate(rows):
            length = (0 if row.set is None else row.set.submitted) + row.total
            if length > stages.width:
                raise PieError(
                    f"row {i} would be {length} tokens long, the layer stages span {stages.width} positions",
                    "record them for a greater width",
                )

    def _bind(self, program: Program, request: PassRequest) -> tuple[Channel, ...]:
        if len(request.channels) != len(program.channels):
            raise PieError(f"the epilogue uses {len(program.channels)} channels, {len(request.channels)} were given")
        bound = tuple(self._channel(handle) for handle in request.channels)
        for i, (use, channel) in enumerate(zip(program.channels, bound, strict=True)):
            if use.type != channel.type:
                raise PieError(f"channel {i} of the epilogue is {use.type}, the channel given is {channel.type}")
        return bound

    def release(self, ticket: int) -> None:
        """The caller keeps no more reference to a pass's outputs: their device words may be reused."""
        item = self._tickets.pop(ticket, None)
        if item is not None:
            self._words -= sum(kind.size for kind in item.entry.program.results)
            self._engine.post(lambda core: core.release(item))

    # -- the end -------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Cancel everything and give everything back. No event arrives afterwards."""
        if self._closed:
            return
        self._closed = True
        sets, channels, tickets = list(self._sets.values()), list(self._channels.values()), list(self._tickets.values())
        self._sets, self._channels, self._tickets, self._pipelines = {}, {}, {}, {}
        self._engine.close_client(self, sets, channels, tickets)

    def lose_state(self, model: Served, cause: str) -> None:
        """The device lost all state of a model: its sets with content are broken."""
        for target in list(self._sets.values()):
            if target.model is model and target.submitted:
                target.broken = cause

    def lose_words(self, cause: str) -> None:
        """The device lost its words: channels with content are poisoned, outputs that it held cannot be embedded."""
        for channel in list(self._channels.values()):
            if channel.count:
                channel.poison = cause
        for item in list(self._tickets.values()):
            if item.status is Status.DONE:
                item.lost = cause

    def abandon(self, cause: str) -> None:
        """The engine is gone: every unfinished pass fails with the cause."""
        for ticket, item in list(self._tickets.items()):
            if item.status in (Status.QUEUED, Status.RUNNING):
                self.on_event(ticket, PassError(cause, item.line))
        for ticket in list(self._takes):
            self.on_event(ticket, PassError(cause))

    def deliver(self, ticket: int, outcome: tuple[np.ndarray, ...] | PassError) -> None:
        """On the engine's thread: what has become of a ticket."""
        self._takes.discard(ticket)
        if not self._closed:
            self.on_event(ticket, outcome)

    def holds_state(self, model: Served) -> bool:
        """Whether any of its sets holds units of a model's pools."""
        return any(target.model is model and target.state.cells for target in list(self._sets.values()))

    @property
    def closed(self) -> bool:
        return self._closed

    # -- helpers -------------------------------------------------------------------------------------------------

    def _post(self, effect: Effect) -> None:
        self._engine.post(lambda core: core.add(effect))

    def _room(self, what: str, held: int, most: int) -> None:
        if self._closed:
            raise PieError("this process has ended")
        if held >= most:
            raise PieError(f"a process may hold at most {most} {what}", "drop or await some of them first")

    def _set(self, handle: int) -> WorkingSet:
        return _find(self._sets, handle, "working set")

    def _pipeline(self, handle: int) -> Pipeline:
        return _find(self._pipelines, handle, "pipeline")

    def _channel(self, handle: int) -> Channel:
        return _find(self._channels, handle, "channel")


def _find(table: dict[int, T], handle: int, what: str) -> T:
    found = table.get(handle)
    if found is None:
        raise PieError(f"there is no {what} {handle} in this process (closed, dropped, or never made)")
    return found


def _lanes(
    rows: list[PassRow], channels: tuple[Channel, ...], program: Program, embedded: tuple[Channel, ...]
) -> tuple[Lane, ...]:
    lanes: dict[int, Lane] = {}
    for row in rows:
        if row.set is not None:
            lanes[id(row.set.lane)] = row.set.lane
    for channel, use in zip(channels, program.channels, strict=True):
        if use.take or use.read:
            lanes[id(channel.takers)] = channel.takers
        if use.put:
            lanes[id(channel.putters)] = channel.putters
    for channel in embedded:
        lanes[id(channel.takers)] = channel.takers
    return tuple(lanes.values())
