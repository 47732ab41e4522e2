"""A recording is reused exactly when the function must give the same one again."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from pie_xla.process.sdk import load_sdk

load_sdk()

from inferlet import eta, model, sample  # noqa: E402
from inferlet._memo import Memo  # noqa: E402
from inferlet.eta import intrinsics, reduce_argmax, softmax  # noqa: E402

LEVEL = 3
TABLE = [1, 2]


def key(fn: Any) -> Any:
    made = Memo().key(fn, (None,))
    return None if made is None else made[0]


def greedy() -> Any:
    return lambda: reduce_argmax(intrinsics.output(0, "logits"))


def scaled(by: float) -> Any:
    return lambda: reduce_argmax(intrinsics.output(0, "logits") * by)


def helper(x: Any) -> Any:
    return softmax(x) * LEVEL


def test_the_same_lambda_has_the_same_key() -> None:
    assert key(greedy()) is not None
    assert key(greedy()) == key(greedy())
    assert key(scaled(0.5)) == key(scaled(0.5)) is not None
    assert key(sample.top_p(0.9)) == key(sample.top_p(0.9)) is not None


def test_what_it_reads_is_in_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len({key(scaled(by)) for by in (0.5, 1, 1.0, True, -0.0, 0.0)}) == 6
    assert key(scaled(float("nan"))) == key(scaled(float("nan")))
    fn = lambda: helper(intrinsics.output(0, "logits"))  # noqa: E731
    before = key(fn)
    monkeypatch.setitem(globals(), "LEVEL", 4)
    assert before is not None and key(fn) not in (None, before)
    assert key(sample.top_p(0.9)) != key(sample.top_p(0.8)) != key(sample.min_p(0.8))

    def with_default(x: int = LEVEL) -> int:
        return x

    def with_other(x: int = 99) -> int:
        return x

    assert key(lambda: with_default()) != key(lambda: with_other())


class Holder:
    value = 3


@pytest.mark.parametrize(
    "fn",
    [
        lambda: random.random(),
        lambda: TABLE[0],
        lambda: Holder.value,
        lambda: print("x"),
        lambda: __import__("time"),
        lambda: eta.Channel(()),
        lambda: input(),
        lambda: unknown_name,  # type: ignore[name-defined]  # noqa: F821
        len,
        Holder,
    ],
)
def test_what_cannot_be_known_is_recorded_anew(fn: Callable[[], Any]) -> None:
    assert key(fn) is None


def test_effects_are_recorded_anew() -> None:
    seen: list[int] = []
    count = 0

    def counts() -> Any:
        nonlocal count
        count += 1
        return count

    def imports() -> Any:
        import time

        return time.time()

    def writes() -> Any:
        global LEVEL
        LEVEL = 7

    assert key(lambda: seen.append(1)) is None
    assert key(counts) is None and key(imports) is None and key(writes) is None
    assert key(lambda: [0, 1][0]) is not None
    assert key(lambda: model.vocab_size()) is not None
    assert key(lambda: sum(x * 2 for x in range(3))) is not None


def test_the_memo_is_bounded() -> None:
    memo = Memo()
    for i in range(200):
        made = memo.key(scaled(float(i)), None)
        assert made is not None
        memo.put(made, i)
    assert len(memo._made) == 64
    assert memo.get(memo.key(scaled(199.0), None) or (None, [])) == 199
