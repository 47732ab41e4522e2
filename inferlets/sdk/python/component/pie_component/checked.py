"""Check what a program passes to the host.

The generated bindings convert arguments in native code that ends the whole interpreter on a value that does not fit.
These wrappers raise TypeError or ValueError instead, where the program can see it.
"""

from __future__ import annotations

import functools
import operator
from array import array
from collections.abc import Callable
from types import ModuleType
from typing import Any

from wit_world.imports import engine, host, model, session

# The host's own limits (`pie_xla/process/wasm/cabi.py`); a list above it would end the program there.
MAX_TEXT = 16 << 20
MAX_LIST = 1 << 20


def _unsigned(bits: int) -> Callable[[Any], int]:
    limit = 1 << bits

    def check(value: Any) -> int:
        if type(value) is int and 0 <= value < limit:
            return value
        number = operator.index(value)
        if number < 0 or number >> bits:
            raise ValueError(f"{number} does not fit an unsigned {bits}-bit number")
        return number

    return check


def _optional(check: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: None if value is None else check(value)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected a str, not {type(value).__name__}")
    if len(value) > MAX_TEXT:
        raise ValueError(f"a text of {len(value)} characters in one call; at most {MAX_TEXT}")
    if not value.isascii():
        value.encode()  # a lone surrogate has no UTF-8 form: UnicodeEncodeError is a ValueError
    return value


def _tokens(value: Any) -> list[int]:
    items = list(value)
    if len(items) > MAX_LIST:
        raise ValueError(f"a list of {len(items)} numbers in one call; at most {MAX_LIST}")
    return array("I", items).tolist()


_U32, _U64 = _unsigned(32), _unsigned(64)

_PARAMETERS: dict[ModuleType, dict[str, tuple[Callable[[Any], Any], ...]]] = {
    engine: {
        "facts": (),
        "new_set": (),
        "fork_set": (_U32,),
        "truncate_set": (_U32, _U32),
        "drop_set": (_U32,),
        "new_pipeline": (_optional(_U64),),
        "close_pipeline": (_U32, bool),
        "new_channel": (_text,),
        "channel": (_U32, _text, _text),
        "submit": (_U32, _text),
    },
    session: {
        "wait": (_optional(_U32),),
        "send": (_text,),
        "receive": (),
        "log": (_U32, _text),
        "sleep_ms": (_U32,),
    },
    host: {"call": (_text, _text), "start": (_text, _text)},
    model: {"encode": (_text, bool), "decode": (_tokens, bool), "chat": (_text,)},
}


_BAD = (TypeError, ValueError, OverflowError)


def _wrap(function: Callable[..., Any], checks: tuple[Callable[[Any], Any], ...]) -> Callable[..., Any]:
    # One wrapper for each number of arguments: a general one costs more than the host call itself.
    match checks:
        case ():
            return function
        case (check,):

            def call(a: Any) -> Any:
                try:
                    a = check(a)
                except _BAD as error:
                    raise _named(function, error) from None
                return function(a)
        case (check, check_b):

            def call(a: Any, b: Any) -> Any:  # type: ignore[misc]
                try:
                    a = check(a)
                    b = check_b(b)
                except _BAD as error:
                    raise _named(function, error) from None
                return function(a, b)
        case (check, check_b, check_c):

            def call(a: Any, b: Any, c: Any) -> Any:  # type: ignore[misc]
                try:
                    a = check(a)
                    b = check_b(b)
                    c = check_c(c)
                except _BAD as error:
                    raise _named(function, error) from None
                return function(a, b, c)

    return functools.wraps(function)(call)


def _named(function: Callable[..., Any], error: Exception) -> Exception:
    kind = TypeError if isinstance(error, TypeError) else ValueError
    return kind(f"{function.__name__}: {error}")


def install() -> None:
    for module, functions in _PARAMETERS.items():
        for name, checks in functions.items():
            setattr(module, name, _wrap(getattr(module, name), checks))
