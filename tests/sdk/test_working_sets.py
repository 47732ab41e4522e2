"""What an author does with a set beyond appending to it: the SDK counts as the engine does, and refuses at the author's line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from fake_engine import FakeEngine, greedy
from test_passes import HEAD

from pie_xla.errors import PieError

Run = Callable[..., Any]
HEAD = HEAD + "BUFFER = StateGeometry.buffering()\n"


def main(body: str) -> str:
    lines = "\n".join("    " + line for line in body.strip("\n").split("\n"))
    return f"{HEAD}\nasync def main(input):\n    ws, pipe = WorkingSet(), Pipeline()\n{lines}\n"


def test_commit_keeps_the_first_and_the_set_goes_on_from_there(run: Run) -> None:
    body = """
pipe.submit(forward([1, 2, 3], [ws]))
pipe.submit(forward([4, 5, 6, 7], [ws], BUFFER))
held = len(ws), ws.buffered
ws.commit(2)
fwd = forward([8], [ws])
fwd.epilogue(pick)
return [held, len(ws), ws.buffered, await pipe.submit(fwd)]
"""
    assert run(main(body)) == [[7, 4], 5, 0, greedy([1, 2, 3, 4, 5, 8], 1)[0]]


def test_commit_by_an_output_and_a_pass_behind_it(run: Run) -> None:
    body = """
fwd = forward([4, 5, 6, 7], [ws], BUFFER)
fwd.epilogue(lambda: (cast(param(3), "i32"), pick()))
kept, _ = pipe.submit(fwd)
ws.commit(kept)
try:
    size = len(ws)
except UsageError as error:
    size = str(error)
after = forward([8], [ws])
after.epilogue(pick)
out = pipe.submit(after)
return [size, await out, await ws.length(), len(ws)]
"""
    size, token, length, again = run(main(body))
    assert "a value on the device" in str(size) or size == 3
    assert token == greedy([4, 5, 6, 8], 1)[0]
    assert (length, again) == (4, 4)


def test_truncate_by_an_output(run: Run) -> None:
    body = """
fwd = forward([4, 5, 6, 7], [ws])
out = fwd.epilogue(lambda: cast(param(2), "i32"))
pipe.submit(fwd)
ws.truncate(out)
return [await ws.length(), repr(ws)]
"""
    assert run(main(body)) == [2, "WorkingSet(len=2)"]


def test_a_failed_pass_gives_back_what_it_had_buffered(run: Run, engine: FakeEngine) -> None:
    engine.fail.append("no power")
    body = """
fwd = forward([4, 5, 6, 7], [ws], BUFFER)
fwd.epilogue(lambda: (cast(param(3), "i32"), pick()))
kept, _ = pipe.submit(fwd)
ws.commit(kept)
try:
    await kept
except PassError as error:
    cause = error.cause
return [cause, len(ws), ws.buffered]
"""
    assert run(main(body)) == ["no power", 0, 0]


def test_published_sets_are_opened_by_name(run: Run) -> None:
    body = """
pipe.submit(forward([1, 2, 3], [ws]))
ws.publish("start")
pipe.submit(forward([9], [ws]))
other = WorkingSet.open("start")
fwd = forward([4], [other])
fwd.epilogue(pick)
return [len(ws), len(other), await pipe.submit(fwd), WorkingSet.open("no"), WorkingSet.withdraw("start"), WorkingSet.open("start")]
"""
    assert run(main(body)) == [4, 3, greedy([1, 2, 3, 4], 1)[0], None, True, None]


def test_evict_and_slice_ask_for_the_spans_that_go(run: Run, engine: FakeEngine) -> None:
    body = """
pipe.submit(forward(list(range(1, 21)), [ws]))
ws.evict([(2, 5), (7, 9)])
part = ws.slice(4, 12)
return [len(ws), len(part)]
"""
    assert run(main(body)) == [20, 12]
    (first, spans), (second, before) = engine.clients[0].evicted
    assert spans == ((2, 5), (7, 9)) and before == ((0, 4),) and first != second


def test_masks_reach_the_engine_as_they_were_said(run: Run, engine: FakeEngine) -> None:
    body = """
pipe.submit(forward([1, 2, 3], [ws]))
seen = [[True, False, True, True, False], [True, True, False, True, True]]
a, b, c, d = (ws.fork() for _ in range(4))
pipe.submit(forward([4, 5], [a], FOLD.mask(seen)))
pipe.submit(forward([4, 5, 6], [b], READ.tree([-1, 0, 0])))
pipe.submit(forward([4, 5], [c], FOLD.positions([7, 9])))
await pipe.submit(forward([[4], [5]], [d, ws], [FOLD.window(2, sinks=1), FOLD.only([(0, 1)])]))
return [len(s) for s in (a, b, c, d, ws)]
"""
    assert run(main(body)) == [5, 3, 5, 4, 4]
    submits = engine.clients[0].submits[1:]
    mask = submits[0].rows[0].sight.mask
    assert mask.tolist() == [[True, False, True, True, False], [True, True, False, True, True]]
    assert mask.dtype == np.bool_
    assert submits[1].rows[0].sight.tree == (-1, 0, 0)
    assert submits[2].rows[0].sight.places == (4, 6)
    first, second = (row.sight for row in submits[3].rows)
    assert (first.window, first.sinks, first.spans) == (2, 1, None)
    assert (second.window, second.spans) == (None, ((0, 1),))


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("pipe.submit(forward([1], [ws], BUFFER))\npipe.submit(forward([1], [ws]))", r"1 buffered tokens.*commit"),
        ("ws.commit(1)", r"commit\(1\): 0 tokens are buffered"),
        ("ws.commit(True)", r"commit\(True\)"),
        ("ws.evict([(2, 1)])", r"a span is two ints"),
        ("ws.evict([3])", r"a span is \(begin, end\)"),
        ("ws.truncate(1)", r"truncate\(1\) of a set of 0"),
        ("ws.truncate(1.0)", r"an int or an Output"),
        ("ws.slice(0, 3)", r"slice\(0, 3\) of a set of 0"),
        ("ws.publish('')", r"1 to 256 bytes"),
        ("FOLD.window(0)", r"window size is 0"),
        ("FOLD.tree([0])", r"token 0 follows token 0"),
        ("FOLD.mask([[True], [True, False]])", r"equally long"),
        ("pipe.submit(forward([1, 2], [ws], FOLD.tree([-1])))", r"2 new tokens, but its tree speaks of 1"),
        ("forward([1], [ws], [FOLD, READ])", r"1 sets need one geometry"),
        ("forward([[1], [2]], [ws, WorkingSet()], [FOLD, READ])", r"of the same kind"),
        ("fwd = forward([1], [ws])\nws.commit(fwd.epilogue(lambda: cast(pick(), 'f32')))", r"i32 or u32 scalar"),
    ],
)
def test_what_makes_no_sense_is_refused_where_it_is_said(run: Run, body: str, says: str) -> None:
    with pytest.raises(PieError, match=rf"(?s)main\.py.*{says}"):
        run(main(body))
