"""Whole steps through the TPU lowering, scanned and split over four devices, equal those through plain XLA on one."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tpu_reference import reference

from pie_xla.kernels.tpu import TpuOps
from pie_xla.kernels.xla import XlaOps
from pie_xla.parallel import ShardingRules, make_mesh, placement
from poem.lower import Loop, LoweredModel, lower
from poem.spec import Batch, State

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 24,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 8,
    "max_position_embeddings": 24,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}
PAGE, UNITS = 4, 20


def launch(starts: list[int], counts: list[int], width: int) -> Batch:
    """Three rows with pages of their own; a row of no tokens may stand between."""
    column = np.arange(width, dtype=np.int32)[None]
    begin, given = np.array(starts, np.int32), np.array(counts, np.int32)
    tokens = np.random.default_rng(width).integers(0, 96, (3, width)).astype(np.int32)
    slots = jnp.zeros((3,), jnp.int32)
    return Batch(
        tokens=jnp.asarray(tokens),
        positions=jnp.asarray(np.where(column < given[:, None], begin[:, None] + column, -1)),
        starts=jnp.asarray(begin),
        counts=jnp.asarray(given),
        pages={"full": jnp.asarray(1 + np.arange(18, dtype=np.int32).reshape(3, 6))},
        slots_in=slots,
        slots_out=slots,
        readout=jnp.arange(3 * width, dtype=jnp.int32),
    )


def logits(model: LoweredModel) -> list[np.ndarray[Any, Any]]:
    """The logits of real tokens: a prefill, then two decode steps."""
    rng = np.random.default_rng(7)
    stored = {name: rng.standard_normal(leaf.shape) * 0.3 for name, leaf in model.stored.items()}
    params = model.pack({name: jnp.asarray(value, jnp.float32) for name, value in stored.items()})
    state: State = {"full": {n: jnp.zeros(leaf.shape, leaf.dtype) for n, leaf in model.groups[0].arrays(UNITS).items()}}
    if model.place is not None:
        params = {name: jax.device_put(a, model.place(model.params[name])) for name, a in params.items()}
        leaves = model.groups[0].arrays(UNITS)
        state = {"full": {n: jax.device_put(a, model.place(leaves[n])) for n, a in state["full"].items()}}
    step = jax.jit(model.step, donate_argnums=1, static_argnums=3)
    values = []
    for starts, counts, width in (([0, 0, 0], [7, 0, 4], 8), ([7, 0, 4], [1, 1, 1], 1), ([8, 1, 5], [1, 0, 1], 1)):
        state, outputs = step(params, state, launch(starts, counts, width), ("logits",))
        got = np.asarray(outputs["logits"]).reshape(3, width, -1)
        values += [got[b, :n] for b, n in enumerate(counts)]
    return values


def test_steps_equal_plain_xla() -> None:
    expected = logits(lower(LLAMA, ops=XlaOps(), page_size=PAGE))
    mesh = make_mesh(jax.devices()[:4])
    ops = TpuOps(mesh, kernel=reference)
    place = placement(mesh, ShardingRules())
    model = lower(LLAMA, ops=ops, place=place, page_size=PAGE, loop=Loop.SCAN)
    assert model.groups[0].unit["kv"].shape == (PAGE, 8, 128)  # 3 heads of 8, padded to one of 128 per device
    for a, b in zip(expected, logits(model), strict=True):
        np.testing.assert_allclose(b, a, rtol=2e-4, atol=2e-5)
