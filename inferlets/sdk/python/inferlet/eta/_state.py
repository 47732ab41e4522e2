"""WorkingSet and StateGeometry: a sequence's state, and how a pass's tokens meet it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

from inferlet._errors import UsageError, missing
from inferlet._host import Runtime, runtime


@dataclass(frozen=True)
class StateGeometry:
    """How a pass's tokens meet the state; made by `folding()` or `reading()`."""

    kind: str

    @classmethod
    def folding(cls) -> StateGeometry:
        """The tokens are appended, and final."""
        return cls("fold")

    @classmethod
    def reading(cls) -> StateGeometry:
        """The tokens attend to the state and to one another and leave nothing behind."""
        return cls("read")

    @classmethod
    def buffering(cls, *args: Any, **kwargs: Any) -> NoReturn:
        raise missing("StateGeometry.buffering", "fork the set and keep the fork that you accept")

    def mask(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise missing("StateGeometry.mask")

    def positions(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise missing("StateGeometry.positions", "positions follow from the set's length")


class WorkingSet:
    """A sequence's state, whatever the model keeps: KV pages, recurrent slots.

    `len(ws)` is the number of tokens submitted to it, which is the next token's position. Calls take effect in the
    order they are made, without waiting: a fork of a set with passes in flight is the set after them.

    Args:
        model: whose state it is (`model.names()`); None is the default one.

    Attributes:
        model: the name of its model.
    """

    __slots__ = ("__weakref__", "_handle", "_length", "_runtime", "model")

    def __init__(self, model: str | None = None) -> None:
        owner = runtime()
        self._adopt(owner, None, 0, owner.facts.of(model).name)

    def _adopt(self, owner: Runtime, handle: int | None, length: int, model: str) -> None:
        self._runtime = owner
        self.model = model
        self._length = length
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
        return self._length

    def __bool__(self) -> bool:
        return True  # an empty set is still a set: `ws or WorkingSet()` must not make a second one

    def fork(self) -> WorkingSet:
        """A copy that goes its own way; shared state is copied only when written."""
        fork = WorkingSet.__new__(WorkingSet)
        fork._adopt(self._runtime, self._runtime.transport.fork_set(self._handle), self._length, self.model)
        return fork

    def truncate(self, length: int) -> None:
        """Forget everything from position `length` on.

        Raises:
            UsageError: `length` is not an int in 0..len(ws).
            RefusedError: the model's state cannot be cut back (recurrent layers).
        """
        if type(length) is not int:
            raise missing(f"WorkingSet.truncate with a {type(length).__name__}", "give it an int")
        if not 0 <= length <= self._length:
            raise UsageError(f"truncate({length}) of a set of {self._length} tokens: 0 to {self._length} are possible")
        self._runtime.transport.truncate_set(self._handle, length)
        self._length = length

    def evict(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise missing("WorkingSet.evict")

    def commit(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise missing("WorkingSet.commit")

    def slice(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise missing("WorkingSet.slice", "fork the set and truncate the fork")

    def publish(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise missing("WorkingSet.publish")

    @classmethod
    def open(cls, *args: Any, **kwargs: Any) -> NoReturn:
        raise missing("WorkingSet.open")

    def _undo(self, count: int) -> None:
        """A pass that was to append `count` tokens failed or was dropped."""
        self._length = max(0, self._length - count)

    def __repr__(self) -> str:
        return f"WorkingSet(len={self._length})"

    def __del__(self) -> None:
        try:
            owner, handle = self._runtime, self._handle
        except AttributeError:
            return  # the host refused to make it
        owner.discard(lambda: owner.transport.drop_set(handle))
