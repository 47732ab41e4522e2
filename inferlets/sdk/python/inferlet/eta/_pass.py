"""ForwardPass: one run of the model over new tokens, described before it is submitted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import index
from typing import Any, NoReturn

from inferlet._errors import UsageError, missing
from inferlet._host import Facts, Runtime, Traced, runtime
from inferlet.eta._channel import Channel
from inferlet.eta._output import Output
from inferlet.eta._stages import Stage, Stages, preceded
from inferlet.eta._state import StateGeometry, WorkingSet

Tokens = list[int] | Output | Channel


@dataclass(frozen=True)
class Epilogue:
    """A recorded epilogue and the facts it was recorded for."""

    fn: Callable[[], Any]
    rows: tuple[int | None, ...]
    traced: Traced
    outputs: tuple[Output, ...]


class ForwardPass:
    """A pass: tokens in, state to meet, positions to read out, and the author's epilogue. May be submitted many
    times.

    Args:
        model: which of the models to run (`model.names()`); None is the default one. Its sets are of the same model; what it
            embeds and its channels may come from passes of others.
    """

    __slots__ = (
        "_early",
        "_epilogue",
        "_facts",
        "_geometries",
        "_prepared",
        "_readout",
        "_rows",
        "_runtime",
        "_sets",
        "_width",
    )

    def __init__(self, model: str | None = None) -> None:
        self._runtime: Runtime = runtime()
        self._facts: Facts = self._runtime.facts.of(model)
        self._rows: list[Tokens] = []
        self._sets: list[WorkingSet] = []
        self._geometries: list[StateGeometry] = []
        self._readout: list[list[int]] | None = None
        self._epilogue: Epilogue | None = None
        self._early: dict[Stage, Callable[[], Any]] = {}
        self._width: int | None = None
        self._prepared: object = None

    def embed(self, tokens: Any) -> ForwardPass:
        """The new tokens.

        Args:
            tokens: ints (one row), an Output or a Channel (one row whose tokens stay on the device), or a list with one
                of these per row. May be called again before the next submit.
        """
        self._rows = [self._row(i, row) for i, row in enumerate(rows_of(tokens))]
        self._facts_changed()
        return self

    def state(self, sets: Sequence[WorkingSet], geometry: StateGeometry | Sequence[StateGeometry]) -> ForwardPass:
        """Row i meets the i-th set in the way `geometry` says; a list of them gives each row its own mask."""
        if isinstance(sets, WorkingSet):
            raise UsageError("state takes a list of sets, one per row: state([ws], ...)")
        geometries = [geometry] * len(sets) if isinstance(geometry, StateGeometry) else list(geometry)
        for one in geometries:
            if not isinstance(one, StateGeometry):
                raise UsageError(f"state needs a StateGeometry, such as StateGeometry.folding(), not {one!r}")
        if len(geometries) != len(sets) or len({one.kind for one in geometries}) > 1:
            raise UsageError(f"state: {len(sets)} sets need one geometry, or {len(sets)} of the same kind")
        for i, ws in enumerate(sets):
            if not isinstance(ws, WorkingSet):
                raise UsageError(f"state: entry {i} is {type(ws).__name__}, not a WorkingSet")
            if any(ws is other for other in sets[:i]):
                raise UsageError(
                    f"state: set {i} is given twice; rows of one pass need sets of their own, such as ws.fork()"
                )
        self._sets, self._geometries = list(sets), geometries
        self._prepared = None
        return self

    def readout(self, rows: Sequence[Any]) -> ForwardPass:
        """The positions whose outputs the epilogue sees, as indices into each row's new tokens (negative: from the
        end).

        Args:
            rows: ints for a pass of one row, else a list of ints per row. Without a readout it is the last token of
                each row.
        """
        if not self._rows:
            raise UsageError("call embed(...) before readout(...): positions count within the new tokens")
        per_row = [rows] if rows and all(isinstance(r, int) for r in rows) else list(rows)
        if len(per_row) != len(self._rows):
            raise UsageError(f"readout names {len(per_row)} rows, but the pass has {len(self._rows)}")
        self._readout = [
            positions(i, wanted, count_of(row)) for i, (wanted, row) in enumerate(zip(per_row, self._rows, strict=True))
        ]
        self._facts_changed()
        return self

    def epilogue(self, fn: Callable[[], Any]) -> Any:
        """Record `fn`, which runs on the device after the model.

        Returns:
            an Output, or a tuple of them when `fn` returns a tuple; they stand for the last submit of this pass.
        """
        if not self._rows:
            raise UsageError("call embed(...) before epilogue(...): the epilogue is recorded for the pass's rows")
        if not callable(fn):
            raise UsageError(f"epilogue takes a function without arguments, not {type(fn).__name__}")
        self._record(fn, None)
        return self._shown()

    def prologue(self, fn: Callable[[], Any]) -> Callable[[], Any]:
        """Record `fn`, which runs on the device before the model; what it computes is seen by the stages after it.

        Like the layer stages it gives back nothing, may be written as a decorator, and is recorded with the epilogue.
        """
        return self._stage(Stage.PROLOGUE, fn, None)

    def on_attn_proj(self, fn: Callable[[], Any], *, width: int | None = None) -> Callable[[], Any]:
        """Record `fn`, which runs in every attention layer after its projections and before it attends.

        It sees `intrinsics.layer`, `query` and `page_bounds`, and may hide pages with `keep_pages`. What it puts into a Channel is found
        there by the stages after it, by the next layer, and, when the pass is done, by everyone.

        Args:
            width: C, the most positions that sets of this pass have; None is the model's context. Scores cost as much as C cells do.
        """
        return self._stage(Stage.PROJ, fn, width)

    def on_attn(self, fn: Callable[[], Any], *, width: int | None = None) -> Callable[[], Any]:
        """Record `fn`, which runs in every attention layer after it has attended: `intrinsics.layer`, `query`, `attn_scores`.

        See `on_attn_proj`.
        """
        return self._stage(Stage.ATTN, fn, width)

    def media(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise missing("ForwardPass.media")

    def adapter(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise missing("ForwardPass.adapter")

    def input(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise missing("ForwardPass.input")

    def _stage(self, stage: Stage, fn: Callable[[], Any], width: int | None) -> Callable[[], Any]:
        if not callable(fn):
            raise UsageError(f"{stage.value} takes a function without arguments, not {type(fn).__name__}")
        if stage.layered and self._facts.attention is None:
            raise UsageError(
                f"{stage.value}: {self._facts.name} shows no attention layers; it has none, or its kernels on this backend cannot"
            )
        most = self._facts.max_context
        if width is not None and (type(width) is not int or not 1 <= width <= most):
            raise UsageError(f"{stage.value}: width {width!r:.20} is not a number of positions from 1 to {most}")
        if width is not None and self._width not in (None, width):
            raise UsageError(f"{stage.value}: width {width}, but another stage of this pass said {self._width}")
        self._width = self._width if width is None else width
        self._early[stage] = fn
        self._prepared = None
        if self._epilogue is not None:
            self._record(self._epilogue.fn, self._epilogue.outputs)
        return fn

    def _stages(self) -> Stages | None:
        if self._early.keys() <= {Stage.PROLOGUE}:
            return None
        facts = self._facts
        assert facts.attention is not None
        fns = tuple((stage, self._early[stage]) for stage in Stage if stage in self._early)
        width = facts.max_context if self._width is None else self._width
        return Stages(fns, width, facts.page_size, (facts.attention.heads, facts.attention.head_dim))

    def _shown(self) -> Any:
        assert self._epilogue is not None
        return self._epilogue.outputs[0] if self._epilogue.traced.scalar else self._epilogue.outputs

    def _row(self, i: int, row: Any) -> Tokens:
        if isinstance(row, (Output, Channel)):
            if row.dtype not in ("i32", "u32") or len(row.shape) > 1:
                raise UsageError(f"row {i} embeds {row!r}: tokens are i32 or u32, a scalar or a vector")
            return row
        tokens = list(row)
        if not tokens:
            raise UsageError(f"row {i} has no tokens: a pass needs at least one new token per row")
        if set(map(type, tokens)) != {int}:
            tokens = [whole(i, token) for token in tokens]
        vocab = self._facts.vocab_size
        if min(tokens) < 0 or max(tokens) >= vocab:
            at = next(j for j, token in enumerate(tokens) if not 0 <= token < vocab)
            raise UsageError(
                f"row {i}, token {at} is {tokens[at]}: the vocabulary of {self._facts.name} is 0 to {vocab - 1}"
            )
        return tokens

    def _asked(self) -> tuple[int | None, ...]:
        """Each row's number of readout positions; None: the last token."""
        if self._readout is None:
            return (None,) * len(self._rows)
        return tuple(len(wanted) for wanted in self._readout)

    def _facts_changed(self) -> None:
        if self._readout is not None:
            fits = len(self._readout) == len(self._rows) and all(
                max(wanted) < count_of(row) for wanted, row in zip(self._readout, self._rows, strict=True)
            )
            if not fits:
                raise UsageError("the readout named earlier does not fit these rows: call readout(...) on a fresh pass")
        if self._epilogue is not None and self._epilogue.rows != self._asked():
            self._record(self._epilogue.fn, self._epilogue.outputs)

    def _record(self, fn: Callable[[], Any], known: tuple[Output, ...] | None) -> None:
        asked, stages = self._asked(), self._stages()
        memo = self._runtime.recordings
        key = memo.key((fn, *self._early.values()), (self._facts.name, asked, self._width, *self._early))
        traced = None if key is None else memo.get(key)
        if traced is None:
            alone = self._early.keys() == {Stage.PROLOGUE}
            whole = preceded(self._early[Stage.PROLOGUE], fn) if alone else fn
            traced = self._runtime.transport.trace(whole, asked, self._facts, stages)
            if key is not None and not traced.channels:
                memo.put(key, traced)
        if known is not None and len(known) == len(traced.results):  # the author's Outputs stay the pass's
            for output, (dtype, shape) in zip(known, traced.results, strict=True):
                output.dtype, output.shape = dtype, shape
            outputs = known
        else:
            outputs = tuple(Output(i, dtype, shape) for i, (dtype, shape) in enumerate(traced.results))
        self._epilogue = Epilogue(fn, asked, traced, outputs)
        self._prepared = None

    def _fixed(self) -> object:
        """All but the tokens, in the transport's form; made once per change."""
        if self._prepared is None:
            if self._early and self._epilogue is None:
                self._record(_nothing, None)
            traced = None if self._epilogue is None else self._epilogue.traced
            other = {} if self._facts is self._runtime.facts else {"model": self._facts.name}
            self._prepared = self._runtime.transport.prepare(
                {
                    **other,
                    "geometry": self._geometries[0].kind,
                    "readout": self._readout,
                    "program": None if traced is None else traced.program,
                    "params": [] if traced is None else list(traced.params),
                    "channels": [] if traced is None else [channel._handle for channel in traced.channels],
                }
            )
        return self._prepared

    def _repeats(self, times: int) -> bool:
        """Whether so many submits in a row are one request but for the Outputs that feed the next."""
        fits = all(
            ws._length + count_of(row) * times <= self._facts.max_context
            for row, ws in zip(self._rows, self._sets, strict=False)
        )
        alike = all(geometry._repeats for geometry in self._geometries)
        late = self._epilogue is not None and any(isinstance(param, dict) for param in self._epilogue.traced.params)
        return fits and alike and not late

    def _ready_rows(self, times: int) -> tuple[list[dict[str, Any]], list[int]]:
        """The rows of so many submits as the host wants them, and how many tokens each has.

        Raises what a submit must refuse.
        """
        if not self._rows:
            raise UsageError("this pass embeds nothing: call embed(tokens)")
        if not self._geometries:
            raise UsageError("this pass has no state: call state([ws], StateGeometry.folding())")
        if len(self._sets) != len(self._rows):
            raise UsageError(f"the pass embeds {len(self._rows)} rows, but state gives {len(self._sets)} sets")
        limit = self._facts.max_context
        rows: list[dict[str, Any]] = []
        counts = [count_of(row) for row in self._rows]
        for i, (row, ws, count) in enumerate(zip(self._rows, self._sets, counts, strict=True)):
            if ws.model != self._facts.name:
                raise UsageError(
                    f"row {i} meets a set of the model {ws.model}, but the pass runs {self._facts.name}: "
                    f"give both the same, as in WorkingSet(model={self._facts.name!r})"
                )
            ws._settle()
            if ws._length + count * times > limit:
                raise UsageError(
                    f"row {i} would be {ws._length + count} tokens long ({ws._length} in the set and {count} new), "
                    f"but the context of {self._facts.name} is {limit}"
                )
            if self._early and self._width is not None and ws._length + count * times > self._width:
                raise UsageError(
                    f"row {i} would be {ws._length + count * times} tokens long, but the layer stages of this pass span {self._width}: "
                    "give on_attn a larger width"
                )
            if ws._buffered and self._geometries[i].kind == "fold":
                raise UsageError(
                    f"row {i}: the set has {ws._buffered} buffered tokens; ws.commit(n) says how many stay"
                )
            match row:
                case Output():
                    shot, result = row._source
                    if shot.runtime is not self._runtime:
                        raise UsageError(f"row {i} embeds an Output of another process")
                    rows.append({"set": ws._handle, "ticket": [shot.ticket, result]})
                    if times > 1 and self._epilogue is not None and any(row is own for own in self._epilogue.outputs):
                        rows[-1]["chain"] = True
                case Channel():
                    rows.append({"set": ws._handle, "channel": row._handle})
                case _:
                    rows.append({"set": ws._handle, "tokens": row})
            sight = self._geometries[i]._row_sight(i, ws, count)
            if sight is not None:
                rows[-1]["sight"] = sight
        return rows, counts

    def __repr__(self) -> str:
        return f"ForwardPass(rows={len(self._rows)}, epilogue={self._epilogue is not None})"


def _nothing() -> None:
    """The epilogue of a pass that has only stages."""


def rows_of(tokens: Any) -> list[Any]:
    """The rows that `embed`'s argument means."""
    if isinstance(tokens, (Output, Channel)):
        return [tokens]
    if isinstance(tokens, (str, bytes)):
        raise UsageError("embed takes token ids; turn text into them with model.encode(text)")
    try:
        items = list(tokens)
    except TypeError:
        raise UsageError(
            f"embed takes a list of ints, an Output, a Channel or a list of these, not {tokens!r:.60}"
        ) from None
    if not items:
        raise UsageError("embed got no tokens: a pass needs at least one new token")
    nested = [isinstance(item, (Output, Channel, list, tuple, range)) for item in items]
    if all(nested):
        return items
    if any(nested):
        at = nested.index(True)
        raise UsageError(
            f"embed got ints mixed with {type(items[at]).__name__} (entry {at}): one row is ints only, rows are lists"
        )
    return [items]


def whole(row: int, token: Any) -> int:
    if isinstance(token, bool):
        raise UsageError(f"row {row} holds {token!r}: tokens are ints")
    try:
        return index(token)
    except TypeError:
        raise UsageError(f"row {row} holds {token!r:.60}: tokens are ints") from None


def count_of(row: Tokens) -> int:
    """How many tokens a row has."""
    if isinstance(row, list):
        return len(row)
    return row.shape[0] if row.shape else 1


def positions(row: int, wanted: Any, count: int) -> list[int]:
    """One row's readout, counted from its start."""
    found = []
    for position in wanted:
        at = whole(row, position)
        if not -count <= at < count:
            raise UsageError(f"readout names position {at} of row {row}, which has {count} new tokens")
        found.append(at % count)
    if not found:
        raise UsageError(f"readout of row {row} names no position")
    if any(a >= b for a, b in pairwise(found)):
        raise UsageError(f"readout of row {row} is {found}: positions come in increasing order, each once")
    return found
