"""What a traced function depends on, so that a loop that writes the same epilogue again does not trace it again.

Everything the function can reach by name is taken by value at the time of the call: its code, closure, defaults and the
globals it names, through plain objects. As under `jax.jit`, state behind a module's attribute is not looked at.
"""

from __future__ import annotations

import functools
from contextvars import ContextVar
from enum import Enum
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import jax
import numpy as np

_BUDGET = 500  # values looked at
_HEAP_TYPE = 1 << 9  # of a class made by a class statement
_BYTES = 1 << 16  # of a NumPy array that is compared by content


class Unknown(Exception):
    """Something that cannot be compared by value: the function is traced each time."""


class Fingerprint:
    """Walks one function.

    `key` is hashable, `channels` are those met, in order, and `alive` must live as long as the key is compared.
    """

    def __init__(self, fn: Any, channel_types: set[type]) -> None:
        self.channels: list[Any] = []
        self.alive: list[Any] = []
        self._channel_types = channel_types
        self._seen: dict[int, int] = {}
        self._left = _BUDGET
        self.key = self._walk(fn)

    def _walk(self, value: Any) -> Any:
        self._left -= 1
        if self._left < 0:
            raise Unknown
        kind = type(value)
        if kind in (int, bool, str, bytes, type(None)):
            return kind, value
        if kind in (float, complex):
            return kind, repr(value)
        if isinstance(value, ModuleType):
            return "module", value.__name__
        if isinstance(value, type | BuiltinFunctionType | np.dtype):
            return self._identity(value)
        if id(value) in self._seen:
            return "again", self._seen[id(value)]
        self._seen[id(value)] = len(self._seen)
        if kind in self._channel_types:
            self.channels.append(value)
            return "channel", str(value.dtype), tuple(value.shape)
        match value:
            case tuple() | list():
                return kind, *map(self._walk, value)
            case dict():
                return kind, *((self._walk(k), self._walk(v)) for k, v in value.items())
            case set() | frozenset():
                return kind, *sorted((self._walk(item) for item in value), key=repr)
            case FunctionType():
                return self._function(value)
            case MethodType():
                return "method", self._walk(value.__func__), self._walk(value.__self__)
            case functools.partial():
                return "partial", self._walk(value.func), self._walk(value.args), self._walk(value.keywords)
            case jax.core.Tracer():
                raise Unknown
            case jax.Array():
                return self._identity(value)
            case np.ndarray() if value.nbytes <= _BYTES and value.dtype != object:
                return "array", str(value.dtype), value.shape, value.tobytes()
            case np.generic():
                return "array", str(value.dtype), value.tobytes()
            case Enum():
                return kind, value.name
        wrapped = getattr(value, "__wrapped__", None)
        if isinstance(wrapped, FunctionType):  # jax.jit and its like
            return "wrapped", kind.__name__, self._function(wrapped)
        if kind.__module__.partition(".")[0] in ("jax", "jaxlib") or isinstance(value, ContextVar | np.ufunc):
            return self._identity(value)
        return self._plain(value)

    def _identity(self, value: Any) -> Any:
        self.alive.append(value)
        return "is", id(value)

    def _function(self, fn: FunctionType) -> Any:
        names = sorted(set(_names(fn.__code__)) & fn.__globals__.keys())
        self.alive.append(fn.__code__)
        return (
            "function",
            fn.__code__,
            tuple(self._cell(cell) for cell in fn.__closure__ or ()),
            self._walk(fn.__defaults__),
            self._walk(fn.__kwdefaults__),
            tuple((name, self._walk(fn.__globals__[name])) for name in names),
        )

    def _cell(self, cell: Any) -> Any:
        try:
            return self._walk(cell.cell_contents)
        except ValueError:
            return "empty"

    def _plain(self, value: Any) -> Any:
        """An instance of a class written in Python, by its attributes."""
        kind = type(value)
        if kind.__flags__ & _HEAP_TYPE == 0:
            raise Unknown
        names = [name for base in kind.__mro__ for name in _slots(base) if name not in ("__weakref__", "__dict__")]
        state = dict(getattr(value, "__dict__", {}))
        for name in names:
            try:
                state[name] = getattr(value, name)
            except AttributeError:  # a slot that was never set
                continue
        return self._identity(kind), self._walk(state)


def _slots(base: type) -> tuple[str, ...]:
    names = base.__dict__.get("__slots__", ())
    return (names,) if isinstance(names, str) else tuple(names)


def _names(code: CodeType) -> list[str]:
    names = list(code.co_names)
    for const in code.co_consts:
        if isinstance(const, CodeType):
            names += _names(const)
    return names
