"""Keys that a program derives: the same for the same numbers, and unlike each other."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from eta_programs import OUTPUTS, V
from inferlet.eta import _compose as eta
from inferlet.eta import _intrinsics as intrinsics
from inferlet.eta import _ops as ops
from inferlet.eta._recorder import recording, trace

from pie_xla.eta import native, oracle
from pie_xla.eta.program import EtaProgram

LOGITS = np.random.default_rng(0).normal(size=V).astype(np.float32)


def draws() -> Any:
    key = eta.random_key(7)
    many = ops.split_key(key, 3)
    noise = [
        ops.uniform(5, key=k)
        for k in (key, ops.fold_in(key, 1), many[1], eta.random_key(7, 1), eta.random_key(1 << 40))
    ]
    token = ops.categorical(intrinsics.output(0, "logits"), key=key)
    return (
        *noise,
        token,
        ops.normal((2, 3), key=key),
        ops.gumbel(4, key=key),
        ops.random_bits(key, 3),
        eta.random_key(),
    )


def both(seed: int, ordinal: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """What the sandboxed program gives, and the native one."""

    def run(recorder: Any) -> Any:
        with recording(recorder):
            return draws()

    made = trace(draws, OUTPUTS, [None], V)
    program = EtaProgram.from_json(made.text)
    other = native.trace(run, OUTPUTS, [None], V)
    results = []
    for one, params in ((program, made.params), (other.program, other.params)):
        given = [np.asarray(v, kind.dtype.numpy) for v, kind in zip(params, one.params, strict=True)]
        key = np.asarray([seed, 0], np.uint32)
        results.append(jax.jit(one.apply)([LOGITS], given, [], key, np.uint32(ordinal))[0])
        if one is program:
            want, _ = oracle.run(program, [LOGITS], given, [], (seed, 0), ordinal)
            for got, right in zip(results[0], want, strict=True):
                np.testing.assert_allclose(got, right, rtol=1e-5, atol=1e-5)
    return results[0], results[1]


def test_keys_are_their_numbers_alone() -> None:
    first, natively = both(1, 0)
    again, _ = both(99, 7)
    for got, right in zip(first, natively, strict=True):
        np.testing.assert_allclose(got, right, rtol=1e-6)
    for got, right in zip(first[:-1], again[:-1], strict=True):
        np.testing.assert_array_equal(got, right)
    assert not np.array_equal(first[-1], again[-1])  # the pass's own key


def test_derived_keys_draw_apart() -> None:
    results, _ = both(1, 0)
    key, folded, split, two, large = (tuple(np.asarray(x).tolist()) for x in results[:5])
    assert folded == two  # random_key(7, 1) is fold_in(random_key(7), 1)
    assert len({key, folded, split, large}) == 4


@pytest.mark.parametrize("n", [1, 600])
def test_keyed_categorical_equals_the_oracle(n: int) -> None:
    from pie_xla.eta.table import TABLE

    x = np.random.default_rng(n).normal(size=(16, n)).astype(np.float32)
    x[3] = -np.inf
    op, key = TABLE["keyed_categorical"], np.asarray([5, 6], np.uint32)
    np.testing.assert_array_equal(op.lower(jax.numpy.asarray(key), jax.numpy.asarray(x)), op.oracle(key, x))
