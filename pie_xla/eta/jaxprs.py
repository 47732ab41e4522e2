"""What is asked of a traced native program: its identity, cost, memory, and that it has no effects."""

from __future__ import annotations

import re
from collections.abc import Iterator
from math import prod
from typing import Any

import jax.extend.core as core

from pie_xla.eta.types import EtaError

Jaxpr = Any


def text(jaxpr: Jaxpr) -> str:
    """The jaxpr as text, without the names of the functions that inner `jit`s came from."""
    printed = jaxpr.pretty_print(source_info=False, name_stack=False)
    names = {name: f"inner{at}" for at, name in enumerate(re.findall(r"^let (\S+) = \{", printed, re.MULTILINE))}
    # Every token is renamed alike, so that no two programs can meet in one text.
    printed = re.sub(r"[\w<>.]+", lambda token: names.get(token[0], token[0]), printed)
    return re.sub(r"\bname=[^\s\]]+", "name=_", printed)


def _inner(eqn: Any) -> list[Jaxpr]:
    return [getattr(inner, "jaxpr", inner) for inner in core.jaxprs_in_params(eqn.params)]


def _walk(jaxpr: Jaxpr) -> Iterator[Any]:
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in _inner(eqn):
            yield from _walk(inner)


def refuse_effects(jaxpr: Jaxpr, source: str) -> None:
    """EtaError naming the first callback, print or other effect."""
    where = f" at {source}" if source else ""
    for eqn in _walk(jaxpr):
        name = eqn.primitive.name
        if "callback" in name or "print" in name or name in ("infeed", "outfeed", "run_state"):
            raise EtaError(
                f"the epilogue{where} uses {name}: it runs on the device, inside a batch, and cannot call the host",
                "return the value and look at it after `await`",
            )
    if jaxpr.effects:
        kinds = ", ".join(sorted({type(effect).__name__ for effect in jaxpr.effects}))
        raise EtaError(f"the epilogue{where} has effects ({kinds}); only pure functions can be batched")


def _size(var: Any) -> int:
    return prod(getattr(var.aval, "shape", ()))


def cost(jaxpr: Jaxpr) -> int:
    """Element operations; a `while` of unknown length counts once, because native code is trusted."""
    total = 0
    for eqn in jaxpr.eqns:
        inner = sum(cost(part) for part in _inner(eqn))
        if inner:
            total += inner * int(eqn.params.get("length", 1))
        elif eqn.primitive.name == "dot_general":
            contract, _ = eqn.params["dimension_numbers"]
            shape = eqn.invars[0].aval.shape
            total += max(map(_size, eqn.outvars)) * prod(shape[axis] for axis in contract[0])
        else:
            total += max(map(_size, (*eqn.invars, *eqn.outvars)), default=1)
    return total


def peak(jaxpr: Jaxpr) -> int:
    """Upper estimate of live bytes: values stay from where they are made to their last use."""
    last: dict[Any, int] = {}
    for index, eqn in enumerate(jaxpr.eqns):
        for var in eqn.invars:
            if isinstance(var, core.Var):
                last[var] = index
    for var in jaxpr.outvars:
        if isinstance(var, core.Var):
            last[var] = len(jaxpr.eqns)
    ends: dict[int, int] = {}
    live = most = 0
    for index, eqn in enumerate(jaxpr.eqns):
        made = 0
        for var in eqn.outvars:
            size = _size(var) * getattr(getattr(var.aval, "dtype", None), "itemsize", 4)
            until = max(last.get(var, index), index)
            ends[until] = ends.get(until, 0) + size
            made += size
        live += made
        most = max(most, live + max(map(peak, _inner(eqn)), default=0))
        live -= ends.pop(index, 0)
    return most
