"""Recorded epilogues, remembered: a loop that makes the same lambda for every token records it once.

A recording is reused only when the function can be seen to give the same one again: it and every function it calls
read nothing but numbers, strings, tuples of them, samplers, this language's own functions and a few pure builtins. Anything
else is recorded anew.
"""

from __future__ import annotations

import builtins
import dis
from collections import OrderedDict
from dataclasses import fields, is_dataclass
from types import CodeType, FunctionType, ModuleType
from typing import Any

ENTRIES = 64
DEPTH = 8

_PURE = frozenset(
    "abs all any bool dict enumerate float int isinstance len list max min range "  # noqa: SIM905
    "reversed round set sorted str sum tuple zip".split()
)
_MODULES = ("inferlet.eta", "inferlet.model", "jax")
# What an epilogue could reach through those modules that does something when called.
_EFFECTS = frozenset(
    "Channel ForwardPass Output Pipeline WorkingSet add append clear extend insert "  # noqa: SIM905
    "pop popitem remove update".split()
)
_REFUSED = (
    "STORE_GLOBAL",
    "DELETE_GLOBAL",
    "STORE_ATTR",
    "DELETE_ATTR",
    "STORE_SUBSCR",
    "DELETE_SUBSCR",
    "IMPORT_NAME",
    "IMPORT_FROM",
)
_GENERATORS = 0x20 | 0x80 | 0x200  # CO_GENERATOR, CO_COROUTINE, CO_ASYNC_GENERATOR


class Unsafe(Exception):
    """Something whose value now says nothing about its value next time."""


class Memo:
    """Recordings by what they depend on; the least recently used go first."""

    def __init__(self) -> None:
        self._made: OrderedDict[Any, tuple[Any, list[Any]]] = OrderedDict()
        self._globals: dict[CodeType, frozenset[str] | None] = {}

    def key(self, fn: Any, facts: Any) -> tuple[Any, list[Any]] | None:
        """(what a recording of `fn` depends on, objects that must live as long as the key), or None to record anew."""
        kept: list[Any] = []
        try:
            return (self._of(fn, kept, DEPTH), facts), kept
        except Unsafe:
            return None

    def get(self, key: tuple[Any, list[Any]]) -> Any:
        found = self._made.get(key[0])
        if found is None:
            return None
        self._made.move_to_end(key[0])
        return found[0]

    def put(self, key: tuple[Any, list[Any]], made: Any) -> None:
        self._made[key[0]] = made, key[1]
        while len(self._made) > ENTRIES:
            self._made.popitem(last=False)

    def _of(self, value: Any, kept: list[Any], depth: int) -> Any:
        kind = type(value)
        if value is None or kind is bool or kind is int or kind is str:
            return kind, value
        if kind is float:
            return kind, value.hex()  # tells -0.0 from 0.0, and NaN is itself
        if depth == 0:
            raise Unsafe
        if kind is tuple:
            return kind, tuple([self._of(item, kept, depth - 1) for item in value])
        if kind is ModuleType:
            if not _is_known(value.__name__):
                raise Unsafe
        elif kind is FunctionType:
            if value.__closure__ or not _is_known(value.__module__ or ""):
                return self._function(value, kept, depth - 1)
        elif is_dataclass(kind) and kind.__module__.startswith("inferlet."):  # a sampler or a step of one: all frozen
            return kind, tuple([self._of(getattr(value, part.name), kept, depth - 1) for part in fields(kind)])
        elif not (callable(value) and not isinstance(value, type) and _is_jax(value)):
            raise Unsafe
        kept.append(value)
        return kind, id(value)

    def _function(self, fn: FunctionType, kept: list[Any], depth: int) -> Any:
        names = self._names(fn.__code__)
        if names is None or depth == 0:
            raise Unsafe
        kept.append(fn.__code__)
        parts: list[Any] = [id(fn.__code__)]
        space = fn.__globals__
        for name in names:
            if name in space:
                parts.append(self._of(space[name], kept, depth))
            elif name not in _PURE or not hasattr(builtins, name):
                raise Unsafe
        for cell in fn.__closure__ or ():
            try:
                parts.append(self._of(cell.cell_contents, kept, depth))
            except ValueError:  # an empty cell
                raise Unsafe from None
        for values in (fn.__defaults__, fn.__kwdefaults__ and tuple(sorted(fn.__kwdefaults__.items()))):
            parts.append(self._of(values, kept, depth))
        return tuple(parts)

    def _names(self, code: CodeType) -> list[str] | None:
        """The globals that a function reads, or None if it does more than compute."""
        if code not in self._globals:
            names: set[str] = set()
            self._globals[code] = frozenset(names) if _read(code, names, frozenset(code.co_freevars)) else None
            if len(self._globals) > 4 * ENTRIES:
                self._globals.pop(next(iter(self._globals)))
        found = self._globals[code]
        return None if found is None else sorted(found)


def _read(code: CodeType, names: set[str], free: frozenset[str]) -> bool:
    if code.co_flags & _GENERATORS and code.co_name not in ("<genexpr>",):
        return False
    for step in dis.get_instructions(code):
        match step.opname:
            case "LOAD_GLOBAL" | "LOAD_NAME":
                names.add(step.argval)
            case "STORE_DEREF" | "DELETE_DEREF" if step.argval in free:
                return False
            case "LOAD_ATTR" | "LOAD_METHOD" if step.argval in _EFFECTS:
                return False
            case name if name in _REFUSED:
                return False
    return all(_read(inner, names, free) for inner in code.co_consts if isinstance(inner, CodeType))


def _is_known(module: str) -> bool:
    return any(module == name or module.startswith(name + ".") for name in _MODULES)


def _is_jax(value: Any) -> bool:
    module = getattr(value, "__module__", None)
    return isinstance(module, str) and (module == "jax" or module.startswith("jax."))
