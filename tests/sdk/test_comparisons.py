"""What lives on the device is never compared by accident."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

HEAD = """
from inferlet import UsageError
from inferlet.eta import *

def refused(fn):
    try:
        return f"gave {fn()!r}"
    except UsageError as error:
        return str(error)
"""


@pytest.mark.parametrize(
    ("expression", "why"),
    [
        ("out == 5", "`await` it first"),
        ("out != 5", "`await` it first"),
        ("out < 5", "`await` it first"),
        ("5 >= out", "`await` it first"),
        ("out == other", "`await` it first"),
        ("out in [1, 2]", "`await` it first"),
        ("out in [other, out]", "`await` it first"),
        ("ch == 1", "compare what `read()`"),
        ("ch != Channel()", "compare what `read()`"),
        ("ws == 3", "len(ws)"),
        ("ws != 3", "len(ws)"),
    ],
)
def test_a_comparison_raises(run: Callable[..., Any], expression: str, why: str) -> None:
    source = f"""{HEAD}
async def main(input):
    fwd, ch, ws = ForwardPass(), Channel(), WorkingSet()
    fwd.embed([1])
    fwd.state([ws], StateGeometry.folding())
    out, other = fwd.epilogue(lambda: (reduce_argmax(intrinsics.output(0, "logits")), 1))
    return refused(lambda: {expression})
"""
    assert why in run(source)


def test_identity_is_there_where_it_is_meant(run: Callable[..., Any]) -> None:
    source = f"""{HEAD}
async def main(input):
    ws, ch = WorkingSet(), Channel()
    fork = ws.fork()
    return [ws == ws, ws == fork, ws != fork, [fork, ws].index(ws), ch is ch, len({{ch, ch, ws, fork}})]
"""
    assert run(source) == [True, False, True, 1, True, 3]


def test_keys_and_early_ends_run_in_a_pass(run: Callable[..., Any]) -> None:
    source = f"""{HEAD}
def epilogue():
    key = random_key(11, iota(3)[2])
    small = while_loop(lambda i, x: x > 3, lambda i, x: x // 2, 100, bound=20)
    return uniform((), key=key), uniform((), key=fold_in(key, 1)), small, concat([iota(4)[::2], iota(4)[::-3], iota(1)])

async def main(input):
    found = []
    for seed in (1, 2):
        fwd, ws = ForwardPass(), WorkingSet()
        fwd.embed([1])
        fwd.state([ws], StateGeometry.folding())
        outs = fwd.epilogue(epilogue)
        Pipeline(seed=seed).submit(fwd)
        found.append([await out for out in outs])
    return found
"""
    first, second = run(source)
    assert first == second and first[0] != first[1]
    assert first[2:] == [3, [0, 2, 3, 0, 0]]
