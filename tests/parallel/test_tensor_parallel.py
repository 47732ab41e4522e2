"""Tensor-parallel steps equal the single-device ones, on four virtual CPU devices."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from pie_xla.kernels.ops import Kernel, ops_for
from pie_xla.parallel import ShardingRules, make_mesh, placement, replicated
from poem.lower import Loop, LoweredModel, lower
from poem.spec import Batch, Leaf, State

PAGE, ROWS, CONTEXT = 4, 2, 24

BASE: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
LINEAR = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "full_attention_interval": 2,
}
WINDOW = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8, "query_pre_attn_scalar": 8}
ODD = {"num_attention_heads": 9, "num_key_value_heads": 3}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"} | BASE,
    "llama_3_kv_heads": {"model_type": "llama"} | BASE | ODD,
    "qwen2": {"model_type": "qwen2"} | BASE,
    "qwen3": {"model_type": "qwen3"} | BASE | {"tie_word_embeddings": False},
    "gemma3": {"model_type": "gemma3_text"} | BASE | WINDOW | {"rope_parameters": None},
    "qwen3_5": {"model_type": "qwen3_5_text"} | BASE | LINEAR,
    "qwen3_5_odd": {"model_type": "qwen3_5_text"} | BASE | LINEAR | ODD | {"linear_num_value_heads": 6},
}


def values(model: LoweredModel, seed: int) -> dict[str, np.ndarray[Any, Any]]:
    """Seeded stored parameters."""
    rng = np.random.default_rng(seed)
    return {
        name: (rng.standard_normal(leaf.shape) * (0.2 if len(leaf.shape) > 1 else 0.1)).astype(np.float32)
        for name, leaf in model.stored.items()
    }


def batch(starts: list[int], counts: list[int], width: int) -> Batch:
    """Row i has pages and slot of its own."""
    column = np.arange(width, dtype=np.int32)[None]
    begin, given = np.array(starts, np.int32), np.array(counts, np.int32)
    positions = np.where(column < given[:, None], begin[:, None] + column, -1)
    tokens = np.random.default_rng(width).integers(0, 96, (ROWS, width)).astype(np.int32)
    pages = 1 + np.arange(ROWS * CONTEXT // PAGE, dtype=np.int32).reshape(ROWS, -1)
    slot = 1 + np.arange(ROWS, dtype=np.int32)
    return Batch(
        *map(jnp.asarray, (tokens, positions, begin, given)),
        {"full": jnp.asarray(pages), "window": jnp.asarray(pages)},
        *map(jnp.asarray, (np.where(begin > 0, slot, 0), slot, np.arange(ROWS * width, dtype=np.int32))),
    )


def run(config: dict[str, Any], loop: Loop, devices: int) -> tuple[LoweredModel, State, list[np.ndarray[Any, Any]]]:
    """A prefill of 11 and 5 tokens, then two decode steps: the final state and the logits of real tokens."""
    place = placement(make_mesh(jax.devices()[:devices]), ShardingRules()) if devices > 1 else None

    def put(array: Any, leaf: Leaf) -> jax.Array:
        return jnp.asarray(array) if place is None else jax.device_put(array, place(leaf))

    model = lower(config, ops=ops_for(Kernel.XLA), place=place, page_size=PAGE, loop=loop)
    stored = {name: put(value, model.stored[name]) for name, value in values(model, 5).items()}
    params = {name: put(array, model.params[name]) for name, array in model.pack(stored).items()}
    units = 1 + ROWS * CONTEXT // PAGE
    state: State = {
        group.name: {name: put(np.zeros(leaf.shape, leaf.dtype), leaf) for name, leaf in group.arrays(units).items()}
        for group in model.groups
    }
    step = jax.jit(model.step, donate_argnums=1, static_argnums=3)
    logits = []
    for starts, counts, width in (([0, 0], [11, 5], 12), ([11, 5], [1, 1], 1), ([12, 6], [1, 1], 1)):
        state, outputs = step(params, state, batch(starts, counts, width), ("logits",))
        got = np.asarray(outputs["logits"]).reshape(ROWS, width, -1)
        logits += [got[b, :n] for b, n in enumerate(counts)]
    return model, state, logits


# Four compilations each; these two differ from llama by a bias and a norm.
SLOW = {"qwen2", "qwen3"}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in FAMILIES])
def test_four_devices_equal_one(name: str) -> None:
    """Both the prefill's and the decode steps' logits, scanned on four devices against unrolled on one."""
    _, _, expected = run(FAMILIES[name], Loop.UNROLLED, 1)
    model, state, got = run(FAMILIES[name], Loop.SCAN, 4)
    for a, b in zip(expected, got, strict=True):
        assert np.abs(a).max() > 0.1
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5)
    # The state that comes back lives where the rules say, so the next step gets what it was compiled for.
    mesh = make_mesh(jax.devices()[:4])
    for group in model.groups:
        for array, leaf in zip(state[group.name].values(), group.arrays(13).values(), strict=True):
            assert array.sharding.is_equivalent_to(placement(mesh, ShardingRules())(leaf), len(leaf.shape))


def test_what_divides_is_split_and_the_rest_reported() -> None:
    mesh = make_mesh(jax.devices()[:4])
    place = placement(mesh, ShardingRules())
    model = lower(FAMILIES["llama_3_kv_heads"], ops=ops_for(Kernel.XLA), place=place, page_size=PAGE)
    assert place(model.params["layers.0.mlp.up_proj.kernel"]).spec == PartitionSpec("tensor", None)
    assert place(model.params["embed_tokens.weight"]).spec == PartitionSpec("tensor", None)
    report = replicated(model.params, mesh, ShardingRules())
    assert {r.axis for r in report} == {"heads", "kv_heads"}
    assert str(report[0]).startswith("layers.0.self_attn.")
    even = lower(FAMILIES["llama"], ops=ops_for(Kernel.XLA), place=place, page_size=PAGE)
    assert replicated(even.params, mesh, ShardingRules()) == ()
    shards = sum(np.prod(place(leaf).shard_shape(leaf.shape)) for leaf in even.params.values())
    assert shards < 0.3 * even.facts.param_count
