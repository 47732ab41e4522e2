"""Slices with steps, joins of many, indices along any axis: as NumPy writes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from eta_programs import OUTPUTS, V
from inferlet.eta import _intrinsics as intrinsics
from inferlet.eta import _ops as ops
from inferlet.eta._recorder import trace

from pie_xla.eta.program import EtaProgram

X = np.arange(V, dtype=np.float32) ** 2


def run(fn: Callable[[Any], Any]) -> list[np.ndarray]:
    """What an epilogue gives for logits of `X`."""
    made = trace(lambda: fn(intrinsics.output(0, "logits")), OUTPUTS, [None], V)
    program = EtaProgram.from_json(made.text)
    params = [np.asarray(v, kind.dtype.numpy) for v, kind in zip(made.params, program.params, strict=True)]
    zero = np.zeros((), np.uint32)
    results, _ = jax.jit(program.apply)([X], params, [], np.zeros(2, np.uint32), zero)
    return [np.asarray(x) for x in results]


@pytest.mark.parametrize(
    "key",
    [
        np.s_[::2],
        np.s_[3:30:7],
        np.s_[::-1],
        np.s_[30:3:-4],
        np.s_[-5:],
        np.s_[::-3],
        np.s_[V - 1 : None : -V],
        np.s_[7],
    ],
)
def test_slices_are_pythons(key: Any) -> None:
    np.testing.assert_array_equal(run(lambda x: x[key])[0], X[key])


def test_slices_of_two_dimensions() -> None:
    got = run(lambda x: x.reshape(4, 10)[::-2, 1:9:3])[0]
    np.testing.assert_array_equal(got, X.reshape(4, 10)[::-2, 1:9:3])


def test_concat_of_many() -> None:
    one, two = run(lambda x: (ops.concat([x[:2], x[5:6], x[9:12], x[:1]]), ops.concat(x[:2], x[3:4])))
    np.testing.assert_array_equal(one, X[[0, 1, 5, 9, 10, 11, 0]])
    np.testing.assert_array_equal(two, X[[0, 1, 3]])
    got = run(lambda x: ops.concat([x.reshape(4, 10), x.reshape(4, 10)[:, :1], x.reshape(4, 10)[:, 3:5]], axis=-1))[0]
    assert got.shape == (4, 13) and got[1, 10] == X[10] and got[3, 12] == X[34]


def test_gather_and_scatter_along_an_axis() -> None:
    square = X.reshape(4, 10)
    got, along, put, added = run(
        lambda x: (
            ops.gather(x.reshape(4, 10), [3, 99, 0], axis=1),
            ops.take_along(x.reshape(4, 10), [[1, 9], [0, 0], [2, 3], [-1, 4]], axis=1),
            ops.scatter_set(x.reshape(4, 10), [3, 3], [-1.0, -2.0], axis=1),
            ops.scatter_add(x.reshape(4, 10), [3, 3], 1.0, axis=-1),
        )
    )
    np.testing.assert_array_equal(got, np.stack([square[:, 3], 0 * square[:, 0], square[:, 0]], 1))
    np.testing.assert_array_equal(along, [[1, 81], [100, 100], [22**2, 23**2], [0, 34**2]])
    want = square.copy()
    want[:, 3] = -2.0
    np.testing.assert_array_equal(put, want)
    want[:, 3] = square[:, 3] + 2
    np.testing.assert_array_equal(added, want)
