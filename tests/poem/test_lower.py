"""The lowering: names, layer runs, memory, outputs, and what a launch may write."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from poem_cases import CASES, tensor
from poem_runner import PAGE, lowered

from poem.lower import Loop, LoweredModel, Segment, find_segments
from poem.spec import Batch, PoemError, StateKind

LLAMA = CASES["llama"]


def batch(model: LoweredModel, counts: list[int], width: int) -> Batch:
    """Rows starting at cell 3 of pages 1, 2, ... (row b owns pages 1 + 2b and 2 + 2b)."""
    rows = len(counts)
    table = np.zeros((rows, model.facts.max_context // PAGE), np.int32)
    table[:, :2] = 1 + np.arange(2 * rows).reshape(rows, 2)
    table[np.array(counts) == 0] = 0
    order = np.arange(width)[None, :]
    real = order < np.array(counts)[:, None]
    zeros = jnp.zeros(rows, jnp.int32)
    return Batch(
        tokens=jnp.asarray(np.where(real, 5 + order, 0).astype(np.int32)),
        positions=jnp.asarray(np.where(real, 3 + order, -1).astype(np.int32)),
        starts=jnp.full(rows, 3, jnp.int32),
        counts=jnp.asarray(counts, jnp.int32),
        pages={g.name: jnp.asarray(table) for g in model.groups if g.kind is StateKind.PAGED},
        slots_in=zeros,
        slots_out=zeros,
        readout=jnp.arange(rows, dtype=jnp.int32) * width,
    )


def params(model: LoweredModel) -> dict[str, jax.Array]:
    """Seeded values for any parameter."""
    return {name: jnp.asarray(tensor(name, leaf.shape)) for name, leaf in model.params.items()}


def zeros(model: LoweredModel, units: int) -> dict[str, dict[str, jax.Array]]:
    """Empty pools."""
    return {
        g.name: {name: jnp.zeros(leaf.shape, leaf.dtype) for name, leaf in g.arrays(units).items()}
        for g in model.groups
    }


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("fff", [Segment(0, 1, 3)]),
        ("f", [Segment(0, 1, 1)]),
        ("wwwwwf" * 3, [Segment(0, 6, 3)]),
        ("wwwwwf" * 4 + "ww", [Segment(0, 6, 4), Segment(24, 1, 2)]),
        ("fwww", [Segment(0, 1, 1), Segment(1, 1, 3)]),
        ("wfw", [Segment(0, 1, 1), Segment(1, 1, 1), Segment(2, 1, 1)]),
    ],
)
def test_segments(pattern: str, expected: list[Segment]) -> None:
    """Repeating runs of layers are found, remainders stay single."""
    assert find_segments(list(pattern)) == expected


def test_names_shapes_axes() -> None:
    """Stored names are the same for both loops; a scanned run is stacked in front."""
    plain, scanned = lowered(LLAMA), lowered(LLAMA, Loop.SCAN)
    assert list(plain.stored) == list(scanned.stored) == list(plain.params)
    kernel = plain.stored["layers.2.self_attn.q_proj.kernel"]
    assert (kernel.shape, kernel.axes) == ((4, 8, 32), ("heads", "head_dim", "embed"))
    stacked = scanned.params["layers.0+1x3.self_attn.q_proj.kernel"]
    assert (stacked.shape, stacked.axes) == ((3, 4, 8, 32), ("layers", "heads", "head_dim", "embed"))
    assert len(scanned.params) == 2 + 9
    assert plain.facts.param_count == scanned.facts.param_count == sum(leaf.size for leaf in plain.stored.values())
    packed = scanned.pack({name: jnp.asarray(tensor(name, leaf.shape)) for name, leaf in scanned.stored.items()})
    assert {name: array.shape for name, array in packed.items()} == {
        n: leaf.shape for n, leaf in scanned.params.items()
    }
    third = tensor("layers.2.self_attn.q_proj.kernel", kernel.shape)
    assert (np.asarray(packed["layers.0+1x3.self_attn.q_proj.kernel"][2]) == third).all()


def test_bytes_per_page() -> None:
    """Keys and values of all layers of a group."""
    (full,) = lowered(LLAMA).groups
    assert full.bytes_per_unit == 3 * 2 * (2 * PAGE * 8) * 4
    window, rest = sorted(lowered(CASES["gemma3"]).groups, key=lambda g: g.name, reverse=True)
    assert (window.name, window.layers, window.window) == ("window", 6, 8)
    assert (rest.name, rest.layers, rest.window) == ("full", 2, None)


@pytest.mark.parametrize("loop", Loop)
def test_temporary_memory_does_not_grow_with_the_pool(loop: Loop) -> None:
    """A copy of the pool anywhere in the step would show."""
    model = lowered(LLAMA, loop)
    temp = []
    for units in (16, 4096):
        structs = {n: leaf.struct for n, leaf in model.params.items()}
        state = {g.name: {n: leaf.struct for n, leaf in g.arrays(units).items()} for g in model.groups}
        launch = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), batch(model, [1, 1], 1))
        step = jax.jit(model.step, donate_argnums=1, static_argnums=3)
        analysis: Any = step.lower(structs, state, launch, ("logits",)).compile().memory_analysis()
        temp.append(analysis.temp_size_in_bytes)
        pool = sum(leaf.nbytes for g in model.groups for leaf in g.arrays(units).values())
        assert analysis.alias_size_in_bytes >= pool
    assert temp[1] <= temp[0] + 4096


def test_outputs() -> None:
    """`hidden` gives `logits` through the tied table; an unwanted output costs nothing; unknown ones are refused."""
    model = lowered(LLAMA)
    weights, launch = params(model), batch(model, [2, 1], 2)
    _, values = jax.jit(model.step)(weights, zeros(model, 8), launch)
    table = np.asarray(weights["embed_tokens.weight"])
    assert values["logits"].shape == (2, 97) and values["hidden"].shape == (2, 32)
    np.testing.assert_allclose(values["logits"], np.asarray(values["hidden"]) @ table.T, rtol=1e-4, atol=1e-4)
    lean = jax.jit(model.step, static_argnums=3).lower(weights, zeros(model, 8), launch, ("hidden",))
    assert "x97xf32>" not in lean.as_text().replace("97x32xf32", "")
    with pytest.raises(PoemError, match="no output 'energy'"):
        model.step(weights, zeros(model, 8), launch, ("energy",))


def test_padding_writes_nothing() -> None:
    """Two real tokens fill cells 3 and 4 of their row; padding tokens and rows touch the dummy page only."""
    model = lowered(LLAMA)
    before = zeros(model, 8)
    after, _ = jax.jit(model.step)(params(model), before, batch(model, [2, 0, 1], 3))
    for array in after["full"].values():
        touched = np.array(jnp.any(array != 0, axis=(1, 3))).reshape(3, 8, PAGE)  # [layers, pages, cells]
        touched[:, 0] = False
        for layer in touched:
            assert {(int(p), int(c)) for p, c in np.argwhere(layer)} == {(1, 3), (2, 0), (5, 3)}


def test_token_outside_the_vocabulary_is_nan() -> None:
    """A bad id poisons its own row and no other."""
    model = lowered(LLAMA)
    launch = batch(model, [1, 1, 1], 1)
    for bad in (97, -1):
        tokens = launch.tokens.at[1, 0].set(bad)
        broken = Batch(**{**vars(launch), "tokens": tokens})
        _, values = jax.jit(model.step)(params(model), zeros(model, 8), broken)
        assert np.isnan(values["logits"]).any(axis=1).tolist() == [False, True, False]


def test_copy_units_copies_every_layer() -> None:
    """Pages 1 and 2 onto 5 and 6, in all layers, nothing else."""
    (group,) = lowered(LLAMA).groups
    rng = np.random.default_rng(0)
    pool = {name: jnp.asarray(rng.standard_normal(leaf.shape, np.float32)) for name, leaf in group.arrays(8).items()}
    copied = group.copy_units(pool, jnp.asarray([1, 2]), jnp.asarray([5, 6]))
    for name, array in pool.items():
        expected = np.asarray(array).reshape(3, 8, -1).copy()
        expected[:, 5:7] = expected[:, 1:3]
        assert (np.asarray(copied[name]).reshape(3, 8, -1) == expected).all()
