"""Each sampler draws from the distribution that its paper says, by chi-square against NumPy; penalties against their formulas."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pie_xla.eta.program import EtaProgram
from pie_xla.process.sdk import load_sdk

load_sdk()

from inferlet import UsageError, sample, watermark  # noqa: E402
from inferlet.eta import Channel, intrinsics  # noqa: E402
from inferlet.eta._recorder import trace  # noqa: E402

V = 300
DRAWS = 8000
LOGITS = (np.random.default_rng(5).normal(size=V) * 2.5).astype(np.float32)
LOGITS[7] = LOGITS[9]
INF = np.inf

Array = np.ndarray


def softmax(x: Array) -> Array:
    mass = np.exp(x - x[np.isfinite(x)].max())
    return mass / mass.sum()


def entropy(p: Array) -> float:
    return float(-np.sum(p[p > 0] * np.log(p[p > 0])))


def only(p: Array, keep: Array) -> Array:
    return np.where(keep, p, 0) / p[keep].sum()


def usual(x: Array, heat: float, k: int = V, mass: float = 1.0, floor: float = 0.0) -> Array:
    p = softmax(x / heat)
    p = only(p, p >= np.sort(p)[::-1][k - 1])
    order = np.argsort(-p, kind="stable")
    before = np.cumsum(p[order]) - p[order]
    p = only(p, np.isin(np.arange(V), order[before < mass]))
    return only(p, p >= floor * p.max())


def typical(x: Array, mass: float) -> Array:
    p = softmax(x)
    order = np.argsort(np.abs(-np.log(p) - entropy(p)), kind="stable")
    count = int(np.sum(np.cumsum(p[order]) < mass)) + 1
    return only(p, np.isin(np.arange(V), order[:count]))


def tail_free(x: Array, z: float) -> Array:
    p = softmax(x)
    order = np.argsort(-p, kind="stable")
    bend = np.abs(np.diff(np.diff(p[order])))
    cut = np.concatenate([[False], np.cumsum(bend / bend.sum()) > z, [True]])
    return only(p, np.isin(np.arange(V), order[~cut]))


def eta(x: Array, epsilon: float) -> Array:
    p = softmax(x)
    return only(p, p >= min(epsilon, np.sqrt(epsilon) * np.exp(-entropy(p)), p.max()))


def top_n_sigma(x: Array, n: float) -> Array:
    return only(softmax(x), x >= x.max() - n * x.std())


def xtc(x: Array, threshold: float, probability: float) -> Array:
    p = softmax(x)
    top = p >= threshold
    gone = top & (p > p[top].min()) if top.any() else top
    return probability * only(p, ~gone) + (1 - probability) * p


def entropy_temperature(x: Array, highest: float, theta: float, base: float) -> Array:
    return softmax(x / (highest * base ** (theta / entropy(softmax(x)))))


def dynamic_temperature(x: Array, low: float, high: float, exponent: float) -> Array:
    share = entropy(softmax(x)) / np.log(V)
    return softmax(x / (low + (high - low) * share**exponent))


def mirostat(x: Array, mu: float) -> Array:
    p = softmax(x)
    return only(p, -np.log2(p) <= mu)


def by(reference: Callable[..., Array], *values: Any) -> Callable[[Array], Array]:
    return lambda x: reference(x, *values)


CASES: dict[str, tuple[Callable[[], Any], Callable[[Array], Array]]] = {
    "plain": (sample.chain, by(usual, 1.0)),
    "temperature": (partial(sample.temperature, 0.7), by(usual, 0.7)),
    "top_k": (partial(sample.top_k, 5), by(usual, 1.0, 5)),
    "top_k beyond the window": (partial(sample.top_k, 200, temperature=3.0), by(usual, 3.0, 200)),
    "top_p": (partial(sample.top_p, 0.8, temperature=1.3), by(usual, 1.3, V, 0.8)),
    "min_p": (partial(sample.min_p, 0.1), by(usual, 1.0, V, 1.0, 0.1)),
    "all usual ones": (partial(sample.sampler, 1.5, 40, 0.9, 0.05), by(usual, 1.5, 40, 0.9, 0.05)),
    "top_a": (partial(sample.top_a, 0.2), lambda x: only(softmax(x), softmax(x) >= 0.2 * softmax(x).max() ** 2)),
    "epsilon": (partial(sample.epsilon, 0.01), lambda x: only(softmax(x), softmax(x) >= 0.01)),
    "eta": (partial(sample.eta, 0.02), by(eta, 0.02)),
    "typical": (partial(sample.typical, 0.6), by(typical, 0.6)),
    "typical, all": (partial(sample.typical, 1.0), by(usual, 1.0)),
    "tail_free": (partial(sample.tail_free, 0.9), by(tail_free, 0.9)),
    "tail_free, all": (partial(sample.tail_free, 1.0), by(usual, 1.0)),
    "top_n_sigma": (partial(sample.top_n_sigma, 1.5), by(top_n_sigma, 1.5)),
    "xtc": (partial(sample.xtc, 0.05, 0.4), by(xtc, 0.05, 0.4)),
    "entropy_temperature": (partial(sample.entropy_temperature, 2.0, 0.9, 0.7), by(entropy_temperature, 2.0, 0.9, 0.7)),
    "dynamic_temperature": (partial(sample.dynamic_temperature, 0.3, 2.0, 1.5), by(dynamic_temperature, 0.3, 2.0, 1.5)),
    "bias": (
        lambda: sample.chain(sample.Sampler((sample.Bias((3, 9, -1), (4.0, -INF, 0.0)),))),
        lambda x: softmax(np.where(np.arange(V) == 9, -INF, x + 4.0 * (np.arange(V) == 3))),
    ),
    "a chain": (
        lambda: sample.temperature(2.0) | sample.typical(0.7) | sample.temperature(0.5),
        lambda x: only(softmax(x), typical(x / 2, 0.7) > 0),
    ),
}


def channel(*shape: int, dtype: str) -> Channel:
    """One that has no host, for recording."""
    made = Channel.__new__(Channel)
    made.shape, made.dtype, made.capacity = shape, dtype, 1
    return made


def recorded(epilogue: Any) -> tuple[EtaProgram, list[Any]]:
    traced = trace(epilogue, {"logits": ((V,), "f32")}, [None], V)
    program = EtaProgram.from_json(traced.text)
    values = [np.asarray(value, kind.dtype.numpy) for value, kind in zip(traced.params, program.params, strict=True)]
    return program, values


def draws_of(epilogue: Any, cells: list[Any] | None = None) -> Array:
    program, params = recorded(epilogue)

    def one(ordinal: jax.Array) -> jax.Array:
        given = [jnp.asarray(x) for x in params], [jnp.asarray(x) for x in cells or []]
        return program.apply([jnp.asarray(LOGITS)], *given, jnp.asarray([11, 12], jnp.uint32), ordinal)[0][0]

    return np.asarray(jax.jit(jax.vmap(one))(jnp.arange(DRAWS, dtype=jnp.uint32)))


def follows(draws: Array, want: Array) -> None:
    """Chi-square at 4 standard deviations (Wilson-Hilferty); rare tokens are one class."""
    counts = np.bincount(draws, minlength=V)
    assert counts[want == 0].sum() == 0, "a filtered token was drawn"
    often = want * DRAWS >= 5
    assert often.sum() > 1
    expected, seen = want[often] * DRAWS, counts[often]
    rest = want[~often].sum() * DRAWS
    if rest > 1:
        expected, seen = np.append(expected, rest), np.append(seen, counts[~often].sum())
    chi = float(np.sum((seen - expected) ** 2 / expected))
    freedom = len(expected) - 1
    limit = freedom * (1 - 2 / (9 * freedom) + 4 * np.sqrt(2 / (9 * freedom))) ** 3
    assert chi < limit, f"chi-square {chi:.1f} above {limit:.1f}"


@pytest.mark.parametrize("name", list(CASES))
def test_draws_follow_the_exact_distribution(name: str) -> None:
    made, reference = CASES[name]
    want = reference(LOGITS.astype(np.float64))
    assert want.sum() == pytest.approx(1)
    follows(draws_of(made()), want)


def test_mirostat_filters_by_mu_and_moves_it() -> None:
    mu = channel(dtype="f32")
    step = replace(sample.mirostat(3.0, 0.2).steps[0], mu=mu)
    epilogue = sample.Sampler((step,), begun=True)
    want = mirostat(LOGITS.astype(np.float64), 4.0)
    follows(draws_of(epilogue, [np.float32(4.0)]), want)
    program, params = recorded(epilogue)
    (token,), (moved,) = jax.jit(program.apply)(
        [jnp.asarray(LOGITS)],
        [jnp.asarray(p) for p in params],
        [jnp.float32(4.0)],
        jnp.zeros(2, jnp.uint32),
        jnp.uint32(3),
    )
    assert float(moved) == pytest.approx(4.0 - 0.2 * (-np.log2(want[int(token)]) - 3.0), rel=1e-5)


@pytest.mark.parametrize("mark", [watermark.Gumbel(key=9), watermark.Tournament(key=9)])
def test_marks_favour_no_token_over_all_contexts(mark: Any) -> None:
    past = channel(4, dtype="i32")
    program, params = recorded(replace(mark.sampler(), past=past, begun=True))

    def one(ordinal: jax.Array, tokens: jax.Array) -> jax.Array:
        given = [jnp.asarray(p) for p in params]
        return program.apply([jnp.asarray(LOGITS)], given, [tokens], jnp.asarray([1, 2], jnp.uint32), ordinal)[0][0]

    contexts = jnp.asarray(np.random.default_rng(3).integers(0, V, (DRAWS, 4)), jnp.int32)
    draws = np.asarray(jax.jit(jax.vmap(one))(jnp.arange(DRAWS, dtype=jnp.uint32), contexts))
    follows(draws, softmax(LOGITS.astype(np.float64)))
    scores = [
        mark.detect([*context, token]).z for context, token in zip(contexts.tolist(), draws.tolist(), strict=True)
    ]
    assert np.mean(scores) > 0.3  # each alone tells little; unmarked ones are 0 on average


def changed(made: Any, past: list[int]) -> Array:
    """The logits after a sampler's steps, with these tokens before."""
    held = channel(len(past), dtype="i32")

    def epilogue() -> Any:
        x, tokens = intrinsics.output(0, "logits"), held.read()
        for step in made.steps:
            x = step.change(x, tokens)
        return x

    program, params = recorded(epilogue)
    cells = [jnp.asarray(past, jnp.int32)]
    out, _ = jax.jit(program.apply)(
        [jnp.asarray(LOGITS)], [jnp.asarray(p) for p in params], cells, jnp.zeros(2, jnp.uint32), jnp.uint32(0)
    )
    return np.asarray(out[0])


def test_penalties_are_their_formulas() -> None:
    past = [-1, -1, -2 - 7, -2 - 9, 4, 5, 4, 9]
    x = LOGITS.astype(np.float64).copy()
    for token in (7, 9, 4, 5):
        x[token] = x[token] / 1.3 if x[token] > 0 else x[token] * 1.3
    for token, count in ((4, 2), (5, 1), (9, 1)):
        x[token] -= 0.5 * count + 0.25
    np.testing.assert_allclose(changed(sample.penalties(1.3, 0.25, 0.5), past), x, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(changed(sample.penalties(), past), LOGITS)


def dry(tokens: list[int], multiplier: float, base: float, allowed: int, breakers: tuple[int, ...]) -> Array:
    """p-e-w's definition: for each token, the longest earlier run that it would continue as it did then."""
    x, longest = LOGITS.astype(np.float64).copy(), {}
    for at in range(1, len(tokens)):
        size = 0
        while (
            at - 1 - size >= 0
            and tokens[at - 1 - size] == tokens[len(tokens) - 1 - size]
            and tokens[at - 1 - size] not in breakers
        ):
            size += 1
        longest[tokens[at]] = max(longest.get(tokens[at], 0), size)
    for token, size in longest.items():
        if size >= allowed:
            x[token] -= multiplier * base ** (size - allowed)
    return x


@pytest.mark.parametrize("breakers", [(), (4,)])
@pytest.mark.parametrize("allowed", [1, 2, 3])
def test_dry_is_its_definition(allowed: int, breakers: tuple[int, ...]) -> None:
    tokens = [4, 5, 6, 7, 1, 5, 6, 8, 9, 6, 3, 4, 5, 6, 7, 2, 4, 5, 6]
    past = [-1] * 5 + [-2 - t for t in tokens[:6]] + tokens[6:]
    got = changed(sample.dry(0.9, 1.5, allowed, breakers), past)
    want = dry(tokens, 0.9, 1.5, allowed, breakers)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    assert (got != LOGITS).any() == (allowed < 3 or not breakers)


def test_no_run_comes_twice() -> None:
    past = [-1, -1, -2 - 4, -2 - 5, 6, 5, 6, 7, 4, 5]
    assert set(np.flatnonzero(np.isneginf(changed(sample.no_repeat(3), past)))) == {6}
    assert set(np.flatnonzero(np.isneginf(changed(sample.no_repeat(2), past)))) == {6}
    assert set(np.flatnonzero(np.isneginf(changed(sample.no_repeat(1), past)))) == {4, 5, 6, 7}


def test_values_are_inputs_of_one_program() -> None:
    pairs: list[tuple[Any, Any]] = [
        (sample.sampler(0.7, 5, 0.9, 0.1), sample.min_p(0.3)),
        (sample.typical(0.2), sample.typical(0.9)),
        (sample.xtc(0.1, 0.2), sample.xtc(0.4, 0.9)),
        (sample.temperature(0.3), sample.temperature(1.7)),
        (sample.tail_free(0.5), sample.tail_free(0.6)),
    ]
    for one, other in pairs:
        assert recorded(one)[0].key == recorded(other)[0].key


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (lambda: sample.typical(0.0), "typical mass 0.0"),
        (lambda: sample.xtc(0.1, 1.5), "xtc probability 1.5"),
        (lambda: sample.temperature(float("nan")), "temperature nan"),
        (lambda: sample.temperature(INF), "temperature inf"),
        (lambda: sample.no_repeat(0), "no_repeat n 0"),
        (lambda: recorded(sample.mirostat()), "keeps state"),
        (lambda: recorded(sample.penalties(1.2)), "keeps state"),
        (lambda: sample.greedy() | len, "joins another sampler"),
    ],
)
def test_what_cannot_be_is_named(made: Callable[[], Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        made()
