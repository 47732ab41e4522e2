"""Native programs: any JAX code, its values as inputs, its identity, what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from eta_programs import HISTORY, OUTPUTS, TOKENS, D, V
from inferlet.eta import _compose as eta
from inferlet.eta import _intrinsics as intrinsics
from inferlet.eta import _ops as ops
from inferlet.eta._recorder import recorder, recording

from pie_xla.eta import native
from pie_xla.eta.program import Limits
from pie_xla.eta.types import EtaError

LOGITS = np.random.default_rng(1).normal(size=(2, V)).astype(np.float32)
KEYS = np.asarray([[1, 2], [1, 2]], np.uint32)
ORDINALS = np.asarray([0, 1], np.uint32)


def traced(fn: Callable[[], Any], rows: tuple[int | None, ...] = (None,), **more: Any) -> native.NativeTrace:
    def run(chosen: native.NativeRecorder) -> Any:
        with recording(chosen):
            return fn()

    return native.trace(run, OUTPUTS, rows, V, 16, "main.py:3", **more)


def logits() -> Any:
    return intrinsics.output(0, "logits")


def call(made: native.NativeTrace, cells: list[np.ndarray] | None = None) -> tuple[list[Any], list[Any]]:
    params = [jnp.stack([jnp.asarray(param)] * 2) for param in made.params]
    return jax.jit(jax.vmap(made.program.apply))([jnp.asarray(LOGITS)], params, cells or [], KEYS, ORDINALS)


def test_plain_jnp_code() -> None:
    made = traced(lambda: jnp.argmax(logits()).astype(jnp.int32))
    assert call(made)[0][0].tolist() == LOGITS.argmax(-1).tolist()
    assert made.params == () and made.program.scalar_result and str(made.program.results[0]) == "i32[]"


def test_closed_over_arrays_and_numbers_are_inputs() -> None:
    def make(bias: np.ndarray, scale: float) -> native.NativeTrace:
        array = jnp.asarray(bias)
        return traced(lambda: ops.mul(logits() + array, scale))

    first, second = make(np.arange(V, dtype=np.float32), 0.5), make(np.ones(V, np.float32), -3.0)
    assert first.program.key == second.program.key
    assert sorted(str(kind) for kind in first.program.params) == ["f32[40]", "f32[]"]
    np.testing.assert_allclose(call(first)[0][0], (LOGITS + np.arange(V)) * 0.5, rtol=1e-6)
    np.testing.assert_allclose(call(second)[0][0], (LOGITS + 1) * -3.0, rtol=1e-6)


def test_param_is_an_input_and_a_python_number_in_jnp_is_code() -> None:
    def key(fn: Callable[[], Any]) -> str:
        return traced(fn).program.key

    assert key(lambda: logits() * eta.param(0.5)) == key(lambda: logits() * eta.param(0.9))
    assert key(lambda: logits() * 0.5) != key(lambda: logits() * 0.9)
    with pytest.raises(EtaError, match="on the device already"):
        traced(lambda: eta.param(logits()))


def test_a_parameter_has_no_value_while_tracing() -> None:
    with pytest.raises(jax.errors.TracerBoolConversionError):
        traced(lambda: logits() if eta.param(0.5) > 0 else -logits())


def test_names_of_inner_functions_are_not_identity() -> None:
    def make(name: str, factor: float) -> str:
        def inner(x: Any) -> Any:
            return x * factor

        inner.__name__ = name
        return traced(lambda: jax.jit(inner)(logits())).program.key

    assert make("first", 2.0) == make("second", 2.0)
    assert make("first", 2.0) != make("first", 3.0)


def test_rows_and_readout_are_identity() -> None:
    keys = {traced(logits, rows).program.key for rows in ((None,), (1,), (2,), (None, None))}
    assert len(keys) == 4


def test_channels_commit_in_order() -> None:
    def epilogue() -> Any:
        token = recorder("t").take(TOKENS)
        history = recorder("t").read(HISTORY)
        recorder("t").put(HISTORY, jnp.roll(history, 1).at[0].set(token))
        recorder("t").put(TOKENS, token + 1)
        return recorder("t").read(TOKENS)

    made = traced(epilogue)
    assert made.channels == (TOKENS, HISTORY)
    first, second = made.program.channels
    assert (first.take, first.read, first.put) == (True, False, True)
    assert (second.take, second.read, second.put) == (False, True, True)
    cells = [np.asarray([7, 8], np.int32), np.asarray([[1, 2, 3, 4]] * 2, np.int32)]
    results, puts = jax.jit(jax.vmap(made.program.apply))([], [], cells, KEYS, ORDINALS)
    assert results[0].tolist() == [8, 9]  # a read after a put sees what is pending
    assert puts[0].tolist() == [8, 9] and puts[1].tolist() == [[7, 1, 2, 3], [8, 1, 2, 3]]


def test_literals_and_draws_inside_a_loop() -> None:
    def body(i: Any, x: Any) -> Any:
        return x + ops.uniform((V,)) * eta.param(0.0) + ops.mul(logits(), 0.25)

    made = traced(lambda: eta.fori(4, body, logits() * 0.0))
    np.testing.assert_allclose(call(made)[0][0], LOGITS, rtol=1e-5)
    assert [float(param) for param in made.params] == [0.0, 0.25]


def test_export_runs_elsewhere() -> None:
    pytest.importorskip("flatbuffers")
    made = traced(lambda: (ops.categorical(ops.div(logits(), 0.7)), recorder("t").take(TOKENS)))
    cells = [np.asarray([5, 6], np.int32)]
    params = [np.stack([param] * 2) for param in made.params]
    loaded = jax.export.deserialize(bytearray(made.program.export(2)))
    again = loaded.call([jnp.asarray(LOGITS)], params, cells, KEYS, ORDINALS)
    for got, want in zip(jax.tree.leaves(again), jax.tree.leaves(call(made, cells)), strict=True):
        np.testing.assert_array_equal(got, want)


def printing() -> Any:
    jax.debug.print("{}", logits()[0])
    return logits()


def looping() -> Any:
    return jax.lax.scan(lambda c, _: (jax.pure_callback(lambda v: v, c, c), None), logits(), None, length=2)[0]


def hidden_add() -> Any:
    return ops.add(logits(), intrinsics.output(0, "hidden"))


WRONG: list[tuple[str, Callable[[], Any], str]] = [
    ("print", printing, "main.py:3 uses debug_print"),
    ("callback in a scan", looping, "uses pure_callback"),
    ("half", lambda: logits().astype(jnp.bfloat16), "bfloat16 is not a dtype of eta"),
    ("long loop", lambda: eta.fori(10**9, lambda i, x: x, logits()), "1000000000 iterations"),
    ("dear loop", lambda: eta.fori(10**7, lambda i, x: ops.softmax(x), logits()), "4800000000 element operations"),
    ("loop type", lambda: eta.fori(2, lambda i, x: x > 0, logits()), "must return what it carries"),
    ("shape", hidden_add, f"f32[{D}] does not broadcast with s = [{V}]"),
    ("row", lambda: intrinsics.output(3, "logits"), "rows 0 to 0"),
    ("text", lambda: "x", "not an array"),
    ("put", lambda: recorder("t").put(TOKENS, logits()[0]), "holds i32"),
]


@pytest.mark.parametrize(("fn", "why"), [case[1:] for case in WRONG], ids=[case[0] for case in WRONG])
def test_refused_by_name(fn: Callable[[], Any], why: str) -> None:
    with pytest.raises(EtaError) as caught:
        traced(fn)
    assert why in str(caught.value)


def test_cost_and_memory_are_estimated() -> None:
    program = traced(lambda: jax.lax.scan(lambda c, _: (jnp.sin(c), None), logits(), None, length=50)[0]).program
    assert 50 * V <= program.cost < 60 * V and 4 * V <= program.memory < 40 * V
    with pytest.raises(EtaError, match="more than 100"):
        traced(lambda: logits() @ jnp.ones((V, V)), limits=Limits(cost=100))


def test_async_is_refused() -> None:
    async def epilogue() -> None: ...

    with pytest.raises(EtaError, match="async def"):
        traced(lambda: epilogue())
