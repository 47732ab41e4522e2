"""An epilogue that is written again is not traced again, and a different one always is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eta_programs import OUTPUTS, FakeChannel, V
from inferlet.eta import _compose as eta
from inferlet.eta import _intrinsics as intrinsics
from inferlet.eta import _ops as ops
from inferlet.eta._recorder import recorder, recording

from pie_xla.eta import native

SCALE = 1.0


@pytest.fixture(autouse=True)
def count() -> None:
    native._known.clear()


def traces(*fns: Callable[[], Any]) -> int:
    seen: list[int] = []

    def make(fn: Callable[[], Any]) -> Callable[[Any], Any]:
        def run(chosen: native.NativeRecorder) -> Any:
            with recording(chosen):
                return fn()

        return run

    for fn in fns:
        native.trace(make(fn), OUTPUTS, (None,), V, 16, "main.py:3")
        seen.append(len(native._known))
    return seen[-1]


def logits() -> Any:
    return intrinsics.output(0, "logits")


def test_the_same_lambda_again() -> None:
    assert traces(*[lambda: ops.reduce_argmax(logits()) for _ in range(3)]) == 1
    assert traces(lambda: ops.reduce_argmax(logits() + 1.0)) == 2


def test_closure_values_count() -> None:
    def make(t: float) -> Callable[[], Any]:
        return lambda: ops.categorical(ops.div(logits(), t))

    assert traces(make(0.5), make(0.7), make(0.5)) == 2


def test_globals_count() -> None:
    global SCALE

    def epilogue() -> Any:
        return ops.mul(logits(), SCALE)

    before = traces(epilogue)
    SCALE += 1.0
    assert traces(epilogue) == before + 1


@dataclass
class Sampler:
    temperature: float

    def __call__(self) -> Any:
        return ops.categorical(logits() / eta.param(self.temperature))


class Plain:
    def __init__(self, k: int) -> None:
        self.k = k

    def sample(self) -> Any:
        return ops.top_k(logits(), self.k)[1]


def test_attributes_count() -> None:
    sampler = Plain(3)
    assert traces(sampler.sample, Plain(3).sample) == 1
    sampler.k = 4
    assert traces(sampler.sample) == 2
    first, second = Sampler(0.5), Sampler(0.6)
    assert traces(lambda: first(), lambda: second()) == 4


def test_arrays_count() -> None:
    one, other = jnp.ones(V), jnp.zeros(V)
    host = np.ones(V, np.float32)

    def make(bias: Any) -> Callable[[], Any]:
        return lambda: logits() + bias

    assert traces(make(one), make(one), make(other)) == 2
    assert traces(make(host), make(host.copy())) == 3
    host[0] = 5
    assert traces(make(host)) == 4


def test_channels_are_places() -> None:
    def make(a: FakeChannel, b: FakeChannel) -> Callable[[Any], Any]:
        def run(chosen: native.NativeRecorder) -> Any:
            with recording(chosen):
                recorder("t").put(b, recorder("t").take(a))

        return run

    a, b, c = (FakeChannel("i32", ()) for _ in range(3))
    native.trace(make(a, b), OUTPUTS, (None,))  # the type of a channel is learned
    first = native.trace(make(a, b), OUTPUTS, (None,))
    second = native.trace(make(c, a), OUTPUTS, (None,))
    assert first.program is second.program
    assert first.channels == (a, b) and second.channels == (c, a)
    assert len(native._known) == 1


def test_jitted_functions_count_by_what_they_are() -> None:
    def make(factor: float) -> Callable[[], Any]:
        inner = jax.jit(lambda x: x * factor)
        return lambda: inner(logits())

    assert traces(make(2.0), make(2.0), make(3.0)) == 2


def test_what_cannot_be_compared_is_traced_each_time() -> None:
    noise = np.random.default_rng(0)
    values = {float(native.trace(noisy(noise), OUTPUTS, (None,)).params[0]) for _ in range(3)}
    assert len(values) == 3
    stream = iter([1.0, 2.0])
    first, second = (native.trace(runner(stream), OUTPUTS, (None,)) for _ in range(2))
    assert float(first.params[0]) == 1.0 and float(second.params[0]) == 2.0


def runner(stream: Any) -> Callable[[Any], Any]:
    def run(chosen: native.NativeRecorder) -> Any:
        with recording(chosen):
            return ops.mul(logits(), next(stream))

    return run


def noisy(noise: np.random.Generator) -> Callable[[Any], Any]:
    def run(chosen: native.NativeRecorder) -> Any:
        with recording(chosen):
            return ops.mul(logits(), float(noise.normal()))

    return run
