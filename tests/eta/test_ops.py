"""Every op of the table: its lowering, vmapped over passes, against its oracle."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eta_operands import case
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pie_xla.eta.lowering import lower_op
from pie_xla.eta.oracle import oracle_op
from pie_xla.eta.rng import Draw, OracleDraw
from pie_xla.eta.table import TABLE
from pie_xla.eta.types import DType

PASSES = 3
ULP = {"exp": 4, "log": 4, "sin": 8, "cos": 8, "tanh": 8, "sigmoid": 8, "rsqrt": 2, "sqrt": 1, "pow": 40, "recip": 1}
ULP |= {"keyed_gumbel": 40, "keyed_normal": 60}
ULP |= {"log1p": 8, "expm1": 8, "normal": 60}
ULP |= {"gumbel": 40, "div": 3, "floor_div": 3}  # XLA may divide through a reciprocal; denormals are flushed
LOOSE = {
    "reduce_sum",
    "cumsum",
    "cumprod",
    "softmax",
    "log_softmax",
    "matmul",
    "batch_matmul",
    "scatter_add",
    "reduce_prod",
    "logsumexp",
}


def agree(name: str, got: np.ndarray, want: np.ndarray, why: str) -> None:
    assert (got.dtype, got.shape) == (want.dtype, want.shape), f"{name} {why}"
    if got.dtype != np.float32 or not (name in ULP or name in LOOSE):
        np.testing.assert_array_equal(got, want, f"{name} {why}")
    elif name in LOOSE:
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5, err_msg=f"{name} {why}")
    else:
        tiny = {"div": 2e-38, "floor_div": 2e-38, "normal": 3e-6, "keyed_normal": 3e-6}.get(name, 2e-7)
        np.testing.assert_allclose(got, want, rtol=ULP[name] * 1.2e-7, atol=tiny, err_msg=f"{name} {why}")


NAMES = sorted(set(TABLE) - {"categorical", "keyed_categorical"})  # draws are compared in test_random.py
FEW = settings(max_examples=6, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
MANY = settings(FEW, max_examples=60)


@pytest.mark.parametrize("name", NAMES)
@FEW
@given(form=st.integers(0, 1), seed=st.integers(0, 2**32 - 1))
def test_lowering_equals_oracle(name: str, form: int, seed: int) -> None:
    check(name, form, seed)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@MANY
@given(form=st.integers(0, 7), seed=st.integers(0, 2**32 - 1))
def test_lowering_equals_oracle_more(name: str, form: int, seed: int) -> None:
    check(name, form, seed)


@cache
def compiled(name: str, form: int) -> Any:
    """One executable per op and form, over all values."""
    op = TABLE[name]
    attrs = op.rule.check_attrs(case(op.rule, form, 0, 1)[1])

    def one(operands: list[jax.Array], key: jax.Array, ordinal: jax.Array) -> tuple[jax.Array, ...]:
        return lower_op(op, Draw(key, ordinal), operands, attrs)

    return jax.jit(jax.vmap(one))


def check(name: str, form: int, seed: int) -> None:
    op = TABLE[name]
    sets, given_attrs = case(op.rule, form, seed, PASSES)
    attrs = op.rule.check_attrs(given_attrs)
    kinds = tuple((str(DTYPES[x.dtype]), x.shape) for x in sets[0])
    types, cost = op.rule.infer(kinds, attrs)
    assert cost > 0
    keys = np.random.default_rng(seed).integers(0, 2**32, (PASSES, 2), dtype=np.uint32)
    ordinals = np.arange(5, 5 + PASSES, dtype=np.uint32)
    stacked = [jnp.asarray(np.stack(column)) for column in zip(*sets, strict=True)]
    got = compiled(name, form)(stacked, keys, ordinals)
    for index, operands in enumerate(sets):
        draw = OracleDraw((keys[index, 0], keys[index, 1]), ordinals[index])
        want = oracle_op(name, draw, operands, attrs)
        for part, right, kind in zip(got, want, types, strict=True):
            assert kind == (DTYPES[part.dtype], part.shape[1:])
            agree(name, np.asarray(part[index]), right, f"{kinds} {attrs} form {form} seed {seed}")


DTYPES = {dtype.numpy: str(dtype) for dtype in DType}


@pytest.mark.parametrize(
    ("row", "want"),
    [
        ([np.nan, -np.inf], 1),
        ([np.nan, np.nan], 0),
        ([-np.inf, -np.inf], 0),
        ([1.0, 3.0, 3.0], 1),
        ([np.nan, 2.0, np.inf], 2),
        ([-0.0, 0.0], 0),
    ],
)
def test_argmax_edges(row: list[float], want: int) -> None:
    op = TABLE["reduce_argmax"]
    assert int(op.lower(jnp.asarray(row, jnp.float32))) == want
    assert int(op.oracle(np.asarray(row, np.float32))) == want


def test_integer_edges() -> None:
    low, minus = jnp.int32(-(2**31)), jnp.int32(-1)
    assert int(TABLE["div"].lower(low, minus)) == -(2**31)
    assert int(TABLE["div"].lower(jnp.int32(7), jnp.int32(0))) == 0
    assert int(TABLE["div"].lower(jnp.int32(-7), jnp.int32(2))) == -3
    assert int(TABLE["floor_div"].lower(jnp.int32(-7), jnp.int32(2))) == -4
    assert int(TABLE["rem"].lower(jnp.int32(-7), jnp.int32(2))) == -1
    assert int(TABLE["mod"].lower(jnp.int32(-7), jnp.int32(2))) == 1
    assert int(TABLE["abs"].lower(low)) == -(2**31)
    cast = TABLE["cast"].lower
    assert int(cast(jnp.float32(3e9), "i32")) == 2**31 - 1
    assert int(cast(jnp.float32(3e9), "u32")) == 3_000_000_000
    assert int(cast(jnp.float32(-0.5), "u32")) == 0
    assert int(cast(jnp.float32(jnp.nan), "i32")) == 0
    assert int(cast(minus, "u32")) == 2**32 - 1


def test_scatter_set_keeps_the_last_of_duplicates() -> None:
    base = jnp.zeros(4, jnp.int32)
    idx = jnp.asarray([1, 1, 9, -1, 1], jnp.int32)
    out = TABLE["scatter_set"].lower(base, idx, jnp.asarray([5, 6, 7, 8, 9], jnp.int32), 0)
    assert out.tolist() == [0, 9, 0, 0]


@pytest.mark.parametrize("source", list(DType))
@pytest.mark.parametrize("target", list(DType))
def test_every_pair_casts(source: DType, target: DType) -> None:
    x = np.asarray([0, 1, 1, 0], source.numpy)
    got = jax.jit(lambda v: TABLE["cast"].lower(v, str(target)))(x)
    assert got.dtype == target.numpy and got.tolist() == [0, 1, 1, 0]


def test_floor_division_of_multiples_is_exact() -> None:
    x = np.arange(1, 200, dtype=np.float32)
    for y in (3.0, 7.0, 49.0, 0.5, -41.0):
        got = jax.jit(lambda a, b: TABLE["floor_div"].lower(a, b))(x * np.float32(y), np.float32(y))
        assert got.tolist() == x.tolist()
