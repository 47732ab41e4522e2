"""Samplers written in eta, traced as a guest traces them, against their exact distributions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from inferlet.eta import _compose as eta
from inferlet.eta import _intrinsics as intrinsics
from inferlet.eta import _ops as ops
from inferlet.eta._recorder import trace

from pie_xla.eta.program import EtaProgram

V = 300
DRAWS = 8000
logits = (np.random.default_rng(5).normal(size=V) * 2.5).astype(np.float32)
logits[7] = logits[9]


def softmax(x: np.ndarray) -> np.ndarray:
    mass = np.exp(x.astype(np.float64) - x.max())
    return mass / mass.sum()


def keep_only(p: np.ndarray, keep: np.ndarray) -> np.ndarray:
    return np.where(keep, p, 0) / p[keep].sum()


def temperature() -> Any:
    return ops.categorical(intrinsics.output(0, "logits") / 0.7)


def gumbel_temperature() -> Any:
    return eta.gumbel_max(intrinsics.output(0, "logits") / 0.7)


def top_k() -> Any:
    x = intrinsics.output(0, "logits")
    return ops.categorical(eta.mask_apply(x, eta.pivot_threshold(x, eta.rank_le(5))))


def top_k_window() -> Any:
    values, indices = ops.top_k(intrinsics.output(0, "logits"), 5)
    return ops.gather(indices, ops.categorical(values)).cast("i32")


def top_p() -> Any:
    return eta.nucleus_sample(intrinsics.output(0, "logits"), 0.8)


def min_p() -> Any:
    x = intrinsics.output(0, "logits")
    p = ops.softmax(x)
    return ops.categorical(eta.mask_apply(x, eta.pivot_threshold(p, eta.prob_ge(ops.reduce_max(p) * 0.1))))


def exact(name: str) -> np.ndarray:
    p = softmax(logits)
    order = np.argsort(-p, kind="stable")
    match name:
        case "temperature" | "gumbel_temperature":
            return softmax(logits / 0.7)
        case "top_k" | "top_k_window":
            return keep_only(p, np.isin(np.arange(V), order[:5]))
        case "top_p":
            before = np.cumsum(p[order]) - p[order]
            return keep_only(p, np.isin(np.arange(V), order[before < 0.8]))
        case _:
            return keep_only(p, p >= 0.1 * p.max())


SAMPLERS: list[Callable[[], Any]] = [temperature, gumbel_temperature, top_k, top_k_window, top_p, min_p]


@pytest.mark.parametrize("sampler", SAMPLERS, ids=lambda fn: fn.__name__)
def test_draws_follow_the_exact_distribution(sampler: Callable[[], Any]) -> None:
    traced = trace(sampler, {"logits": ((V,), "f32")}, [None], V)
    program = EtaProgram.from_json(traced.text)
    params = [np.asarray(value, kind.dtype.numpy) for value, kind in zip(traced.params, program.params, strict=True)]

    def one(ordinal: jax.Array) -> jax.Array:
        key = jnp.asarray([11, 12], jnp.uint32)
        return program.apply([jnp.asarray(logits)], [jnp.asarray(p) for p in params], [], key, ordinal)[0][0]

    draws = np.asarray(jax.jit(jax.vmap(one))(jnp.arange(DRAWS, dtype=jnp.uint32)))
    assert draws.dtype == np.int32 and draws.shape == (DRAWS,)
    want = exact(sampler.__name__)
    counts = np.bincount(draws, minlength=V)
    assert counts[want == 0].sum() == 0, "a filtered token was drawn"
    often = want * DRAWS >= 5
    expected = np.append(want[often] * DRAWS, max(want[~often].sum() * DRAWS, 1e-9))
    seen = np.append(counts[often], counts[~often].sum())
    chi = (
        float(np.sum((seen - expected) ** 2 / expected))
        if expected[-1] > 1
        else float(np.sum((seen[:-1] - expected[:-1]) ** 2 / expected[:-1]))
    )
    freedom = len(expected) - 1
    # Wilson-Hilferty: the chi-square quantile at 4 standard deviations.
    limit = freedom * (1 - 2 / (9 * freedom) + 4 * np.sqrt(2 / (9 * freedom))) ** 3
    assert chi < limit, f"chi-square {chi:.1f} above {limit:.1f}"
