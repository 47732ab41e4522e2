"""Operands given one by one, or as one list."""

from __future__ import annotations

from typing import Any


def parts(given: tuple[Any, ...]) -> tuple[Any, ...]:
    """`f(x, y)` and `f([x, y])` alike."""
    return tuple(given[0]) if len(given) == 1 and isinstance(given[0], list | tuple) else given
