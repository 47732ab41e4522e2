"""WorkingSet and StateGeometry: a sequence's state, and how a pass's tokens meet it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from inferlet._errors import UsageError
from inferlet._host import Runtime, Shot, runtime
from inferlet.eta._output import Output

Span = tuple[int, int]
MAX_KEY = 256


@dataclass(frozen=True)
class StateGeometry:
    """How a pass's tokens meet the state: `folding()`, `buffering()` or `reading()`, and what they see of it.

    The modifiers give a changed copy: `StateGeometry.folding().window(128, sinks=4)`. Whatever they say, a token never sees a later one.
    """

    kind: str
    sight: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def folding(cls) -> StateGeometry:
        """The tokens are appended, and final."""
        return cls("fold")

    @classmethod
    def buffering(cls) -> StateGeometry:
        """The tokens are appended, but tentative: `ws.commit(n)` keeps the first n of them and drops the others."""
        return cls("buffer")

    @classmethod
    def reading(cls) -> StateGeometry:
        """The tokens attend to the state and to one another and leave nothing behind."""
        return cls("read")

    def window(self, size: int, sinks: int = 0) -> StateGeometry:
        """A token sees the last `size` positions, its own included, and the first `sinks` of all."""
        return self._with("window", _int("window size", size, 1))._with("sinks", _int("sinks", sinks, 0))

    def positions(self, positions: Sequence[int]) -> StateGeometry:
        """The tokens' positions (for rope), instead of len(ws), len(ws) + 1, ..."""
        return self._with("positions", tuple(_int("a position", at, 0) for at in positions))

    def tree(self, parents: Sequence[int]) -> StateGeometry:
        """The tokens form a tree: token i follows token `parents[i]` (an earlier one), or the set's end where it is -1.

        A token sees the set, itself and the tokens it follows, and its position is its depth.
        """
        found = tuple(_int("a parent", parent, -1) for parent in parents)
        for token, parent in enumerate(found):
            if parent >= token:
                raise UsageError(f"tree: token {token} follows token {parent}; parents come before their children")
        return self._with("tree", found)

    def mask(self, rows: Sequence[Sequence[bool]]) -> StateGeometry:
        """A dense mask bool[T, len(ws) + T]: token t sees position p of the set where `rows[t][p]`, then new token p - len(ws)."""
        found = tuple(tuple(bool(seen) for seen in row) for row in rows)
        if not found or any(len(row) != len(found[0]) for row in found):
            raise UsageError("mask takes a list of equally long rows, one per new token")
        return self._with("mask", found)

    def only(self, spans: Iterable[Span]) -> StateGeometry:
        """Of the set, the tokens see only the positions in these half-open spans."""
        return self._with("spans", tuple(span_of(span) for span in spans))

    def _with(self, name: str, value: Any) -> StateGeometry:
        return replace(self, sight=(*((n, v) for n, v in self.sight if n != name), (name, value)))

    @property
    def _repeats(self) -> bool:
        """Whether it says the same of each next pass as of the first."""
        return all(name in ("window", "sinks") for name, _ in self.sight)

    def _row_sight(self, row: int, ws: WorkingSet, count: int) -> dict[str, Any] | None:
        """What the host hears of it for one row of `count` tokens."""
        if not self.sight:
            return None
        told: dict[str, Any] = {}
        for name, value in self.sight:
            match name:
                case "positions":
                    told["places"] = [at - len(ws) for at in value]
                case "mask":
                    told["mask"] = [_hex(bits) for bits in value]
                    told["width"] = len(value[0])
                case "spans":
                    told["spans"] = [list(span) for span in value]
                case _:
                    told[name] = list(value) if isinstance(value, tuple) else value
        for name in ("places", "tree", "mask"):
            if name in told and len(told[name]) != count:
                raise UsageError(f"row {row} has {count} new tokens, but its {name} speaks of {len(told[name])}")
        return told


@dataclass
class _Pending:
    """A length that a result on the device decides."""

    shot: Shot
    index: int
    after: bool  # of the last `most` tokens so many stay; else of all
    most: int


class WorkingSet:
    """A sequence's state, whatever the model keeps: KV pages, recurrent slots.

    `len(ws)` is the number of tokens submitted to it, which is the next token's position. Calls take effect in the order they are made,
    without waiting: a fork of a set with passes in flight is the set after them.

    Args:
        model: whose state it is (`model.names()`); None is the default one.

    Attributes:
        model: the name of its model.
    """

    __slots__ = ("__weakref__", "_buffered", "_handle", "_length", "_pending", "_runtime", "model")

    def __init__(self, model: str | None = None) -> None:
        owner = runtime()
        self._adopt(owner, None, 0, owner.facts.of(model).name)

    def _adopt(self, owner: Runtime, handle: int | None, length: int, model: str) -> None:
        self._runtime = owner
        self.model = model
        self._length = length  # the most it can be while lengths are pending
        self._buffered = 0
        self._pending: list[_Pending] = []
        owner.sweep()
        self._handle = self._made() if handle is None else handle
        owner.know_set(self._handle, self)

    def _made(self) -> int:
        transport = self._runtime.transport
        if self.model == self._runtime.facts.name:
            return transport.new_set()
        handle: int = transport.call("set.new", {"model": self.model})
        return handle

    def __len__(self) -> int:
        self._settle()
        if self._pending:
            raise UsageError(
                "len: this set's length is a value on the device; await ws.length(), or the Output that decides it"
            )
        return self._length

    async def length(self) -> int:
        """The number of tokens, waited for where only the device knows it yet."""
        while self._pending:
            shot = self._pending[0].shot
            if not shot.done:
                await shot.arrived()
            self._settle()
        return self._length

    @property
    def buffered(self) -> int:
        """Tokens at the end that `commit` decides on."""
        return self._buffered

    def __bool__(self) -> bool:
        return True  # an empty set is still a set: `ws or WorkingSet()` must not make a second one

    def __eq__(self, other: object) -> bool:
        if isinstance(other, WorkingSet):
            return self is other  # a set is a place, as a file is; its content is on the device
        raise UsageError(f"a WorkingSet is compared with {other!r:.60}; its number of tokens is len(ws)")

    __hash__ = object.__hash__

    def fork(self) -> WorkingSet:
        """A copy that goes its own way; shared state is copied only when written."""
        fork = WorkingSet.__new__(WorkingSet)
        fork._adopt(self._runtime, self._runtime.transport.fork_set(self._handle), self._length, self.model)
        fork._buffered, fork._pending = self._buffered, [replace(pending) for pending in self._pending]
        return fork

    def slice(self, start: int, end: int | None = None) -> WorkingSet:
        """A fork that keeps only the positions from `start` to `end` (half-open); they stay the positions they are."""
        length = len(self)
        end = length if end is None else end
        if type(start) is not int or type(end) is not int or not 0 <= start <= end <= length:
            raise UsageError(f"slice({start!r}, {end!r}) of a set of {length} tokens")
        part = self.fork()
        part.truncate(end)
        if start:
            part.evict([(0, start)])
        return part

    def truncate(self, length: int | Output) -> None:
        """Forget everything from position `length` on. An Output (i32 or u32 scalar) is a length that the host need not know.

        Raises:
            UsageError: `length` is not an int in 0..len(ws), and not an Output of one.
            RefusedError: the model's state cannot be cut back (recurrent layers).
        """
        if isinstance(length, Output):
            self._shorten("set.truncate", length, after=False)
            return
        if type(length) is not int:
            raise UsageError(f"truncate takes an int or an Output, not {type(length).__name__}")
        self._settle()
        if not 0 <= length <= self._length:
            raise UsageError(f"truncate({length}) of a set of {self._length} tokens: 0 to {self._length} are possible")
        self._runtime.transport.truncate_set(self._handle, length)
        self._buffered = max(0, self._buffered - (self._length - length))
        self._length, self._pending = length, []

    def commit(self, n: int | Output) -> None:
        """Keep the first `n` of the buffered tokens, which are final now, and drop the others.

        Args:
            n: an int, or an Output (i32 or u32 scalar): then passes that follow start where the device says, without the host.
        """
        if isinstance(n, Output):
            self._shorten("set.commit", n, after=True)
            self._buffered = 0
            return
        if type(n) is not int or not 0 <= n <= self._buffered:
            raise UsageError(f"commit({n!r}): {self._buffered} tokens are buffered, so 0 to {self._buffered} can stay")
        self._runtime.transport.call("set.commit", {"set": self._handle, "n": n})
        self._length -= self._buffered - n
        self._buffered = 0

    def evict(self, spans: Iterable[Span]) -> None:
        """Forget the cells at the positions in half-open spans; pages without a live cell go back.

        Positions stay as they are, so `len(ws)` does too: later tokens do not see what is gone.
        """
        found = [span_of(span) for span in spans]
        self._runtime.transport.call("set.evict", {"set": self._handle, "spans": [list(span) for span in found]})

    def publish(self, key: str) -> None:
        """Keep a fork of this set under a name, for every process of the same tenant (`WorkingSet.open`). The name's former set goes."""
        self._runtime.transport.call("set.publish", {"set": self._handle, "name": _key(key)})

    @classmethod
    def open(cls, key: str, model: str | None = None) -> WorkingSet | None:
        """A fork of the set of the model that was published under this name; None when there is none (any more: memory is limited)."""
        owner = runtime()
        name = owner.facts.of(model).name
        found = owner.transport.call("set.open", {"name": _key(key), "model": name})
        if found is None:
            return None
        opened = cls.__new__(cls)
        opened._adopt(owner, found["set"], found["length"], name)
        return opened

    @classmethod
    def withdraw(cls, key: str, model: str | None = None) -> bool:
        """Forget the model's set that was published under this name; False when there was nothing."""
        owner = runtime()
        return bool(owner.transport.call("set.withdraw", {"name": _key(key), "model": owner.facts.of(model).name}))

    def _shorten(self, call: str, n: Output, *, after: bool) -> None:
        if n.dtype not in ("i32", "u32") or n.shape:
            raise UsageError(f"a length is an i32 or u32 scalar, not {n!r}")
        shot, index = n._source
        self._settle()
        most = self._buffered if after else self._length
        self._runtime.transport.call(call, {"set": self._handle, "ticket": shot.ticket, "result": index})
        self._pending.append(_Pending(shot, index, after, most))

    def _settle(self) -> None:
        """Take over the lengths that have become known."""
        while self._pending and self._pending[0].shot.done:
            first = self._pending.pop(0)
            less = 0
            try:
                value = first.shot.value()[first.index]
                less = first.most - min(max(value, 0), first.most)
            except Exception:  # the pass has failed, and what it had appended was undone
                continue
            self._length -= less
            for later in self._pending:
                if not later.after:
                    later.most -= less

    def _append(self, count: int, *, tentative: bool) -> None:
        self._length += count
        if tentative:
            self._buffered += count

    def _undo(self, count: int) -> None:
        """A pass that was to append `count` tokens failed or was dropped."""
        self._length = max(0, self._length - count)
        self._buffered = max(0, self._buffered - count)

    def __repr__(self) -> str:
        self._settle()
        return f"WorkingSet(len={'at most ' if self._pending else ''}{self._length})"

    def __del__(self) -> None:
        try:
            owner, handle = self._runtime, self._handle
        except AttributeError:
            return  # the host refused to make it
        owner.discard(lambda: owner.transport.drop_set(handle))


def span_of(span: Any) -> Span:
    """A half-open span of positions as two ints."""
    try:
        begin, end = span
    except (TypeError, ValueError):
        raise UsageError(f"a span is (begin, end), not {span!r:.60}") from None
    if type(begin) is not int or type(end) is not int or not 0 <= begin <= end:
        raise UsageError(f"a span is two ints, 0 <= begin <= end, not {span!r:.60}")
    return begin, end


def _int(what: str, value: Any, least: int) -> int:
    if type(value) is not int or value < least:
        raise UsageError(f"{what} is {value!r:.60}: an int of at least {least}")
    return value


def _key(key: Any) -> str:
    if not isinstance(key, str) or not 1 <= len(key.encode()) <= MAX_KEY:
        raise UsageError(f"a published name is a text of 1 to {MAX_KEY} bytes, not {key!r:.60}")
    return key


def _hex(bits: Sequence[bool]) -> str:
    """Bits, the first lowest, as hexadecimal."""
    return format(int("".join("1" if bit else "0" for bit in reversed(bits)), 2), "x")
