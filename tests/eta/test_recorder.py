"""Recording in the guest: errors at the author's line, operators, literals."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import pytest
from eta_programs import HISTORY, OUTPUTS, TOKENS, V
from inferlet.eta import _compose as eta
from inferlet.eta import _intrinsics as intrinsics
from inferlet.eta import _ops as ops
from inferlet.eta._errors import EtaError
from inferlet.eta._recorder import GuestRecorder, recording, trace
from inferlet.eta._tensor import Tensor

from pie_xla.eta.program import EtaProgram
from pie_xla.eta.rules import MAX_COST


def record(fn: Callable[[], Any], rows: tuple[int | None, ...] = (None,)) -> Any:
    return trace(fn, OUTPUTS, rows, V, 16)


def logits() -> Any:
    return intrinsics.output(0, "logits")


def hidden() -> Any:
    return intrinsics.output(0, "hidden")


def channel(method: str, *args: Any) -> Any:
    from inferlet.eta._recorder import recorder

    return getattr(recorder("test"), method)(*args)


WRONG: list[tuple[str, Callable[[], Any], str]] = [
    ("shapes", lambda: logits() + hidden(), "y must be num"),
    ("dtypes", lambda: ops.add(ops.iota(4), ops.reduce_argmax(logits())), "x is u32[4] and y is i32[]"),
    ("range", lambda: ops.top_k(logits(), V + 1), "needs k <= n, but k = 41, n = 40"),
    ("attr tensor", lambda: ops.top_k(logits(), ops.reduce_argmax(logits())), "k must be a Python int"),
    ("attr missing", lambda: channel("apply", "top_k", (logits(),), {}), "attribute k is missing"),
    ("float for int", lambda: ops.iota(4) + 0.5, "cannot become u32"),
    ("too large", lambda: ops.iota(4) + (1 << 40), "does not fit u32"),
    ("huge float", lambda: logits() * 1e300, "does not fit f32"),
    ("huge int", lambda: logits() * 10**400, "bits does not fit f32"),
    ("equality", lambda: logits() == None, "neither a tensor nor a number"),  # noqa: E711
    ("negative u32", lambda: ops.iota(4) + -1, "does not fit u32"),
    ("int division", lambda: ops.iota(4) / 2, "/ is for f32"),
    ("if", lambda: 1 if logits()[0] > 0 else 2, "select(condition, x, y)"),
    ("len", lambda: len(logits()), "x.shape"),
    ("iterate", lambda: list(logits()), "cannot be iterated"),
    ("in", lambda: 3.0 in logits(), "reduce_any"),
    ("set", lambda: {logits()}, "as a key"),
    ("axis", lambda: ops.reduce_sum(logits(), 1), "axis 1 is outside f32[40]"),
    ("axes", lambda: ops.permute(logits(), (0, 0)), "each of the 1 dimensions once"),
    ("stack", lambda: eta.stack([logits(), hidden()]), "must have one shape"),
    ("int", lambda: int(ops.reduce_argmax(logits())), "await the Output"),
    ("range of tensor", lambda: range(ops.reduce_argmax(logits())), "fixed when recorded"),
    ("index outside", lambda: logits()[V], "outside dimension 0"),
    ("empty slice", lambda: logits()[5:2], "0 <= start < stop <= n"),
    ("concat of numbers", lambda: ops.concat(1, 2), "axis 0 is outside i32[]"),
    ("concat of nothing", lambda: ops.concat([]), "takes 1 to 256 operands"),
    ("concat of shapes", lambda: ops.concat(logits(), logits().reshape(1, V)), "too many dimensions"),
    ("key", lambda: ops.uniform(3, key=ops.iota(3)), "is not 2"),
    ("updates", lambda: ops.scatter_add(logits(), ops.iota(3), [1.0, 2.0]), "fits(v, a + s + r)"),
    ("mask index", lambda: logits()[logits() > 0], "select(mask, x, 0)"),
    ("row", lambda: intrinsics.output(1, "logits"), "rows 0 to 0"),
    ("output name", lambda: intrinsics.output(0, "logit"), "it has: logits, hidden"),
    ("result", lambda: {"a": logits()}, "not a tensor"),
    ("string", lambda: ops.exp("x"), "not a tensor"),
    ("ragged", lambda: ops.gather(logits(), [[1], [1, 2]]), "rectangular"),
    ("loop", lambda: eta.fori(10**9, lambda i, x: x + 1, 0), "1000000000 iterations"),
    ("loop count", lambda: eta.fori(ops.reduce_argmax(logits()), lambda i, x: x, 0), "n must be a Python int"),
    ("loop types", lambda: eta.fori(3, lambda i, x: x > 0, 0), "must return what it carries (i32[])"),
    ("loop channel", lambda: eta.fori(3, lambda i, x: x + channel("take", TOKENS), 0), "inside a loop"),
    (
        "while bound",
        lambda: eta.while_loop(lambda i, x: x > 0, lambda i, x: x, 0, bound=0),
        "bound must be a Python int",
    ),
    ("while test", lambda: eta.while_loop(lambda i, x: x, lambda i, x: x, 0, bound=3), "must return one bool"),
    (
        "while types",
        lambda: eta.while_loop(lambda i, x: x > 0, lambda i, x: x > 0, 0, bound=3),
        "what it carries (i32[])",
    ),
    (
        "while cost",
        lambda: eta.while_loop(lambda i, x: ops.reduce_any(ops.softmax(x) > 0), lambda i, x: x, logits(), bound=10**9),
        "1000000000 iterations",
    ),
    ("double take", lambda: (channel("take", TOKENS), channel("take", TOKENS)), "already taken"),
    ("double put", lambda: (channel("put", TOKENS, 1), channel("put", TOKENS, 2)), "put once"),
    ("put type", lambda: channel("put", TOKENS, logits()[0]), "holds i32"),
    ("put shape", lambda: channel("put", HISTORY, ops.iota(3).cast("i32")), "size(s) == size(shape)"),
    ("rank", lambda: ops.reshape(logits(), (1, 1, 1, 1, V)), "rank 5"),
    ("many ops", lambda: [logits() + 1 for _ in range(3000)], "more than 4096 ops"),
    ("filter", lambda: eta.pivot_threshold(logits(), 5), "rank_le(k)"),
    ("nested", lambda: record(logits), "cannot record another"),
]


@pytest.mark.parametrize(("fn", "why"), [case[1:] for case in WRONG], ids=[case[0] for case in WRONG])
def test_wrong_epilogues_fail_where_they_are_written(fn: Callable[[], Any], why: str) -> None:
    with pytest.raises(EtaError) as caught:
        record(fn)
    assert why in str(caught.value)
    assert str(caught.value).startswith("test_recorder.py:")
    assert isinstance(caught.value, TypeError)


def test_async_epilogue_is_refused() -> None:
    async def epilogue() -> None: ...

    made = epilogue()
    with pytest.raises(EtaError, match="async def"):
        record(lambda: made)
    made.close()


def test_outside_an_epilogue() -> None:
    with pytest.raises(EtaError, match="inside an epilogue only"):
        ops.exp(1.0)


def test_tensors_do_not_travel() -> None:
    kept: list[Tensor] = []
    record(lambda: kept.append(logits()))
    with pytest.raises(EtaError, match="another epilogue"):
        record(lambda: kept[0] + 1)

    def leak() -> Any:
        inner: list[Tensor] = []
        eta.fori(2, lambda i, x: inner.append(x) or x, logits())
        return inner[0] + 1

    with pytest.raises(EtaError, match="loop that has ended"):
        record(leak)


def test_literals_are_parameters() -> None:
    made = record(lambda: (logits() * 2, 1 - ops.iota(3), eta.param([1, 2]), 5, True))
    assert made.params == (2.0, 1, [1, 2], 5, True)
    program = EtaProgram.from_json(made.text)
    assert [str(kind) for kind in program.params] == ["f32[]", "u32[]", "i32[2]", "i32[]", "bool[]"]
    assert made.results[2:] == (("i32", (2,)), ("i32", ()), ("bool", ()))


def test_none_and_lists_of_results() -> None:
    made = record(lambda: channel("put", TOKENS, 3))
    assert made.results == () and not made.scalar_result and made.channels == (TOKENS,)
    assert record(lambda: [logits()]).scalar_result is False


def test_one_read_per_output_and_row() -> None:
    made = record(lambda: logits() + logits(), (3,))
    body = json.loads(made.text)["body"]
    assert body["reads"] == [[0, "logits", "f32", [3, V]]]
    assert [op[0] for op in body["ops"]] == ["output", "add"]


def test_an_output_first_read_in_a_loop_can_be_read_again() -> None:
    made = record(lambda: eta.fori(2, lambda i, x: x + logits(), logits() * 0) + logits())
    assert EtaProgram.from_json(made.text).reads[0].shape == (V,)

    made = record(lambda: (eta.fori(2, lambda i, x: x + ops.reduce_max(logits()), 0.0), logits()))
    assert len(EtaProgram.from_json(made.text).reads) == 1


def test_costs_agree_with_the_host() -> None:
    with recording(GuestRecorder(OUTPUTS, (None,), V)) as recorder:
        result = eta.fori(7, lambda i, x: ops.softmax(x), logits())
        program = EtaProgram.from_json(recorder.finish(result).text)
    assert recorder._cost == program.cost == 7 * 12 * V + 64
    assert program.cost < MAX_COST


def test_tracing_is_cheap() -> None:
    def greedy() -> Any:
        return ops.reduce_argmax(logits())

    record(greedy)
    best = min(timed(greedy) for _ in range(50))
    assert best < 1e-3, f"{best * 1e6:.0f} us"  # about 30 us on a quiet machine


def timed(fn: Callable[[], Any]) -> float:
    start = time.perf_counter()
    record(fn)
    return time.perf_counter() - start
