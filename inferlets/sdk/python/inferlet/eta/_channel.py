"""Channel: a bounded queue on the device."""

from __future__ import annotations

from collections.abc import Awaitable, Generator
from typing import Any

from inferlet._errors import UsageError
from inferlet._host import Shot, runtime
from inferlet.eta._output import plain
from inferlet.eta._recorder import current

DTYPES = ("f32", "i32", "u32", "bool")


class Taken:
    """The awaitable of a host `take()` or `read()`."""

    __slots__ = ("_is_float", "_shot")

    def __init__(self, shot: Shot, is_float: bool) -> None:
        self._shot, self._is_float = shot, is_float

    def __await__(self) -> Generator[Any, None, Any]:
        if not self._shot.done:
            yield from self._shot.arrived().__await__()
        return plain(self._shot.value()[0], self._is_float)


class Channel:
    """A bounded queue of equal cells on the device, and the only state that traced programs share.

    Inside an epilogue `take()`, `read()` and `put(x)` are traced. Outside, `put(value)` and `set(value)` act at once,
    and `await ch.take()` / `await ch.read()` wait for a cell.

    Args:
        shape: an int, or a tuple of dimensions; () for a scalar.
        dtype: "f32", "i32", "u32", "bool", or the names of `inferlet.eta` for them.
        capacity: cells it can hold, at least 1.
    """

    __slots__ = ("__weakref__", "_handle", "_runtime", "capacity", "dtype", "shape")

    def __init__(self, shape: int | tuple[int, ...] | list[int] = (), dtype: Any = "f32", capacity: int = 1) -> None:
        self.shape = (shape,) if isinstance(shape, int) else tuple(shape)
        self.dtype = dtype_name(dtype)
        if any(type(n) is not int or n < 1 for n in self.shape):
            raise UsageError(f"Channel shape {self.shape}: dimensions are ints of at least 1")
        if type(capacity) is not int or capacity < 1:
            raise UsageError(f"Channel capacity {capacity!r}: at least 1 cell")
        self.capacity = capacity
        self._runtime = runtime()
        self._runtime.sweep()
        self._handle = self._runtime.transport.new_channel(self.dtype, self.shape, capacity)

    @classmethod
    def of(cls, value: Any, dtype: Any = None, capacity: int = 1) -> Channel:
        """A channel that holds `value`; its shape and dtype are the value's (int -> i32, float -> f32, bool ->
        bool).
        """
        shape, kind = describe(value)
        channel = cls(shape, kind if dtype is None else dtype, capacity)
        channel.put(value)
        return channel

    def take(self) -> Any:
        """The front cell, consumed. In an epilogue: a tensor. On the host: an awaitable."""
        recorder = current()
        if recorder is not None:
            return recorder.take(self)
        return self._ask("take")

    def read(self) -> Any:
        """The front cell, which stays. In an epilogue: a tensor. On the host: an awaitable."""
        recorder = current()
        if recorder is not None:
            return recorder.read(self)
        return self._ask("read")

    def put(self, value: Any) -> None:
        """Append a cell, once one is free. In an epilogue it commits with the pass; on the host it returns at once."""
        recorder = current()
        if recorder is not None:
            recorder.put(self, value)
            return
        self._runtime.transport.channel(self._handle, "put", checked(value, self))

    def set(self, value: Any) -> None:
        """Replace the front cell (or fill an empty channel), on the host only: a control value for passes that
        `read`.
        """
        if current() is not None:
            raise UsageError("Channel.set is for the host; inside an epilogue use put")
        self._runtime.transport.channel(self._handle, "set", checked(value, self))

    def __eq__(self, other: object) -> bool:
        raise UsageError(
            "a Channel cannot be compared: compare what `read()` or `take()` gives (awaited on the host); `a is b` tells "
            "whether two names mean one channel"
        )

    __hash__ = object.__hash__

    def _ask(self, op: str) -> Awaitable[Any]:
        self._runtime.sweep()
        shot = self._runtime.shot(self._runtime.transport.channel(self._handle, op, None))
        return Taken(shot, self.dtype == "f32")

    def __repr__(self) -> str:
        return f"Channel({self.dtype}{list(self.shape)}, capacity={self.capacity})"

    def __del__(self) -> None:
        try:
            owner, handle = self._runtime, self._handle
        except AttributeError:
            return
        owner.discard(lambda: owner.transport.channel(handle, "drop", None))


def dtype_name(dtype: Any) -> str:
    """The op table's name of a dtype: a string, or an enum member whose value is one."""
    name = getattr(dtype, "value", dtype)
    if name not in DTYPES:
        raise UsageError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    return name


def describe(value: Any) -> tuple[tuple[int, ...], str]:
    """Shape and dtype of a host value: int, float, bool, or equally long nested lists of one of them."""
    match value:
        case bool():
            return (), "bool"
        case int():
            return (), "i32"
        case float():
            return (), "f32"
        case list() | tuple() if len(value) > 0:
            inner = {describe(item) for item in value}
            if len(inner) == 1:
                shape, dtype = inner.pop()
                return (len(value), *shape), dtype
    raise UsageError(f"{str(value)[:60]} is not a number, or nested lists of equal length of one kind of number")


def checked(value: Any, channel: Channel) -> Any:
    """`value` as nested lists, if it fits the channel's cells."""
    shape, dtype = describe(value)
    if shape != channel.shape:
        raise UsageError(f"a value of shape {list(shape)} does not fit {channel!r}")
    if dtype == channel.dtype:
        return value
    if dtype == "i32" and channel.dtype in ("u32", "f32"):
        return value if channel.dtype == "u32" else floats(value)
    raise UsageError(f"a value of dtype {dtype} does not fit {channel!r}")


def floats(value: Any) -> Any:
    return [floats(item) for item in value] if isinstance(value, (list, tuple)) else float(value)
