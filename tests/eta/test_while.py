"""A loop that ends early: what it gives, alone and among passes that need other numbers of turns."""

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

from pie_xla.eta import native, oracle, rules
from pie_xla.eta.program import EtaProgram
from pie_xla.eta.types import EtaError

BOUND = 9


def doubled() -> Any:
    """(turns, x): the first logit doubled until it is 100 or more."""
    x = intrinsics.output(0, "logits")[0]
    return eta.while_loop(lambda i, c: c[1] < 100.0, lambda i, c: (i + 1, c[1] * 2), (0, x), bound=BOUND)


def logits(first: list[float]) -> np.ndarray:
    return np.stack([np.full(V, x, np.float32) for x in first])


def native_program() -> Any:
    def run(recorder: Any) -> Any:
        with recording(recorder):
            return doubled()

    return native.trace(run, OUTPUTS, [None], V)


def test_each_pass_of_a_batch_ends_by_itself() -> None:
    made = trace(doubled, OUTPUTS, [None], V)
    program = EtaProgram.from_json(made.text)
    first = [1.0, 100.0, 60.0, 0.0, float("nan"), 99.0]
    turns, values = [7, 0, 1, BOUND, 0, 1], [128.0, 100.0, 120.0, 0.0, float("nan"), 198.0]
    other = native_program()
    for one, params in ((program, made.params), (other.program, other.params)):
        given = [np.asarray(v, kind.dtype.numpy) for v, kind in zip(params, one.params, strict=True)]
        n = len(first)
        many = [np.stack([x] * n) for x in given]
        batch = ([logits(first)], many, [], np.zeros((n, 2), np.uint32), np.zeros(n, np.uint32))
        got = jax.jit(jax.vmap(one.apply))(*batch)[0]
        np.testing.assert_array_equal(got[0], turns)
        np.testing.assert_array_equal(got[1], values)
    for x, count in zip(first, turns, strict=True):
        given = [np.asarray(v, kind.dtype.numpy) for v, kind in zip(made.params, program.params, strict=True)]
        assert oracle.run(program, [logits([x])[0]], given, [], (0, 0), 0)[0][0] == count


def test_its_cost_is_the_bound() -> None:
    node = next(n for n in EtaProgram.from_json(trace(doubled, OUTPUTS, [None], V).text).nodes if n.name == "while")
    test, body = (sum(inner.cost for inner in part) for part in (node.test, node.body))
    assert test >= rules.OP_COST and body > test
    assert node.cost == BOUND * (test + body) + test


def test_the_native_bound_is_checked() -> None:
    def run(recorder: Any) -> Any:
        with recording(recorder):
            x = intrinsics.output(0, "logits")
            return eta.while_loop(lambda i, c: ops.reduce_any(c > 0), lambda i, c: ops.softmax(c), x, bound=10**9)

    with pytest.raises(EtaError, match="1000000000 iterations cost"):
        native.trace(run, OUTPUTS, [None], V)
