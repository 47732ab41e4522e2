"""Randomness: bit for bit the paper's words, and draws that follow their law."""

from __future__ import annotations

from typing import Any

import jax
import jax.extend.random
import jax.numpy as jnp
import numpy as np
import pytest

from pie_xla.eta import rng
from pie_xla.eta.lowering import lower_op
from pie_xla.eta.oracle import oracle_op
from pie_xla.eta.rng import Draw, OracleDraw
from pie_xla.eta.table import TABLE

KEY = (0x13198A2E, 0x03707344)


def words(stream: int, count: int, ordinal: int = 7) -> np.ndarray:
    fn = jax.jit(lambda k, o: Draw(k, o).bits(stream, count))
    return np.asarray(fn(np.asarray(KEY, np.uint32), np.uint32(ordinal)))


def sampled(name: str, operands: list[np.ndarray], **attrs: Any) -> np.ndarray:
    fn = jax.jit(lambda k, o, xs: lower_op(TABLE[name], Draw(k, o), xs, attrs)[0])
    return np.asarray(fn(np.asarray(KEY, np.uint32), np.uint32(7), operands))


def test_known_answer_of_threefry() -> None:
    # Random123's kat_vectors: threefry2x32 with 20 rounds.
    assert OracleDraw._threefry((0, 0), (0, 0)) == (0x6B200159, 0x99BA4EFE)
    full = 0xFFFFFFFF
    assert OracleDraw._threefry((full, full), (full, full)) == (0x1CB996FC, 0xBB002BE7)
    assert OracleDraw._threefry(KEY, (0x243F6A88, 0x85A308D3)) == (0xC4923A9C, 0x483DF7A0)


def test_words_equal_jax_and_the_oracle() -> None:
    key = np.asarray(KEY, np.uint32)
    counter = np.asarray([7, 5], np.uint32)
    sub = jax.extend.random.threefry_2x32(key, counter)
    counters = jnp.concatenate([jnp.zeros(6, jnp.uint32), jnp.arange(6, dtype=jnp.uint32)])
    want = np.asarray(jax.extend.random.threefry_2x32(sub, counters)).reshape(2, 6).T.reshape(-1)[:11]
    np.testing.assert_array_equal(words(5, 11), want)
    np.testing.assert_array_equal(OracleDraw(KEY, 7).bits(5, 11), want)
    np.testing.assert_array_equal(
        np.asarray(jax.jit(lambda k, o: Draw(k, o).iteration(jnp.uint32(3)).bits(5, 11))(key, np.uint32(7))),
        OracleDraw(KEY, 7).iteration(3).bits(5, 11),
    )


def test_streams_ordinals_and_lengths_are_independent() -> None:
    base = words(0, 64)
    assert not np.array_equal(base, words(1, 64))
    assert not np.array_equal(base, words(0, 64, 8))
    np.testing.assert_array_equal(base[:7], words(0, 7))


def test_extreme_words_stay_finite() -> None:
    extreme = jnp.asarray([0, 1, 0xFFFFFFFF, 0x80000000], jnp.uint32)
    u = np.asarray(rng.uniform(extreme))
    assert (u > 0).all() and (u < 1).all()
    assert np.isfinite(np.asarray(rng.gumbel(extreme))).all()


@pytest.mark.parametrize("n", [1, 256, 257, 1000])
def test_categorical_equals_the_oracle(n: int) -> None:
    generator = np.random.default_rng(n)
    x = (generator.normal(size=(16, n)) * 2).astype(np.float32)
    x[generator.random((16, n)) < 0.3] = -np.inf
    x[0, :], x[1, :] = -np.inf, np.nan
    x[2, n // 2] = np.inf
    x[3, 0] = np.nan
    got = sampled("categorical", [x], stream=2)
    want = oracle_op("categorical", OracleDraw(KEY, 7), [x], {"stream": 2})[0]
    assert got[0] == 0 and got[1] == 0 and got[2] == n // 2
    np.testing.assert_array_equal(got, want)


def test_categorical_never_draws_what_has_no_mass() -> None:
    x = np.full((64, 600), -np.inf, np.float32)
    x[:, [255, 256, 599]] = [0.0, -2.0, -3.0]
    got = sampled("categorical", [x], stream=0)
    assert set(got) <= {255, 256, 599}


def test_gumbel_follows_its_law() -> None:
    sample = np.sort(sampled("gumbel", [], shape=(20000,), stream=0))
    cdf = np.exp(-np.exp(-sample.astype(np.float64)))
    steps = np.arange(1, 20001) / 20000
    assert np.max(np.abs(cdf - steps)) < 1.63 / np.sqrt(20000)  # Kolmogorov-Smirnov at 1 %
