"""Small epilogues that the tests share; each uses other parts of the language."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from inferlet.eta import _compose as eta
from inferlet.eta import _intrinsics as intrinsics
from inferlet.eta import _ops as ops
from inferlet.eta._recorder import current

V = 40
D = 6
OUTPUTS: dict[str, tuple[tuple[int, ...], str]] = {"logits": ((V,), "f32"), "hidden": ((D,), "f32")}


class FakeChannel:
    """What a recorder needs of a channel."""

    def __init__(self, dtype: str, shape: tuple[int, ...]) -> None:
        self.dtype, self.shape = dtype, shape


TOKENS = FakeChannel("i32", ())
HISTORY = FakeChannel("i32", (4,))


def greedy() -> Any:
    return ops.reduce_argmax(intrinsics.output(0, "logits"))


def top_p() -> Any:
    return eta.nucleus_sample(intrinsics.output(0, "logits") / 0.8, 0.9)


def two_rows() -> Any:
    a, b = intrinsics.output(0, "logits"), intrinsics.output(1, "logits")
    return ops.reduce_argmax(a + (a - b) * 1.5), eta.entropy(ops.softmax(a))


def readout() -> Any:
    x = intrinsics.output(0, "logits")
    best = ops.reduce_argmax(x)
    return best, ops.gather_row(ops.log_softmax(x), best), ops.reduce_max(x[1:])


def carried() -> Any:
    recorder = current()
    assert recorder is not None
    last, history = recorder.take(TOKENS), recorder.read(HISTORY)
    penalty = ops.scatter_set(ops.broadcast(0.0, (V,)), history, -2.0)
    token = ops.reduce_argmax(intrinsics.output(0, "logits") + penalty)
    recorder.put(TOKENS, token)
    recorder.put(HISTORY, ops.concat(history[1:], last.reshape(1)))
    return token


def looped() -> Any:
    def body(i: Any, carry: Any) -> Any:
        x, found = carry
        token = ops.categorical(x)
        return ops.scatter_set(x, token, float("-inf")), ops.scatter_set(found, i, token)

    return eta.fori(3, body, (intrinsics.output(0, "logits"), [-1, -1, -1]))[1]


def ended() -> Any:
    """Draws tokens, each at most once, until one is below 8; the test draws too."""
    logits = intrinsics.output(0, "logits")

    def test(i: Any, carry: Any) -> Any:
        _, _, last = carry
        return (last >= 8) & (ops.uniform(()) < 0.95)

    def body(i: Any, carry: Any) -> Any:
        x, found, _ = carry
        token = ops.categorical(x)
        return ops.scatter_set(x, token, float("-inf")), ops.scatter_set(found, i, token), token

    _, found, last = eta.while_loop(test, body, (logits, [-1] * 6, V), bound=6)
    flag = eta.while_loop(lambda i, go: go, lambda i, go: go & (i < 3), last > 3, bound=5)
    return found, last, flag


def operators() -> Any:
    x = intrinsics.output(0, "hidden")
    n = ops.iota(D).cast("i32") - 3
    mask = (x > 0.5) | ~(x <= -0.5) & (n != 2)
    y = -x * 2 + 1 / (abs(x) + 1.0) - x**2
    return ops.select(mask, y, 0), n // 2, n % 3, (n.cast("u32") & 5) ^ 1, x.reshape(2, 3) @ x.reshape(3, -1), mask


def shaped() -> Any:
    x = intrinsics.output(0, "logits").reshape(4, 10)
    centred = x - ops.reduce_max(x, axis=0) + ops.reduce_min(x, axis=-1).reshape(4, 1)
    stacked = eta.stack(
        [ops.reduce_argmax(centred, axis=0), ops.reduce_argmin(centred, axis=0), eta.argsort(x, 0)[0].cast("i32")], -1
    )
    words = ops.pack_mask(centred > 0.0)
    return (
        stacked,
        ops.popcount(words),
        ops.unpack_mask(words, 10) == (centred > 0.0),
        ops.flip(ops.pad(x, 7, high=2), 0),
    )


EPILOGUES: dict[str, tuple[Callable[[], Any], tuple[int | None, ...]]] = {
    "greedy": (greedy, (None,)),
    "top_p": (top_p, (None,)),
    "two_rows": (two_rows, (None, None)),
    "readout": (readout, (3,)),
    "carried": (carried, (None,)),
    "ended": (ended, (None,)),
    "looped": (looped, (None,)),
    "shaped": (shaped, (None,)),
    "operators": (operators, (None,)),
}
