"""What taps see, and what they hide, is the same on four virtual devices as on one."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from test_tensor_parallel import CONTEXT, FAMILIES, PAGE, ROWS, batch, values

from pie_xla.kernels.ops import Kernel, ops_for
from pie_xla.parallel import ShardingRules, make_mesh, placement
from poem.lower import Loop, lower
from poem.spec import Leaf, State


class Sums:
    """Scores and queries summed over layers; page 1 is hidden."""

    width, scored, bounded = CONTEXT, True, True

    def start(self) -> Any:
        return jnp.zeros((ROWS, CONTEXT)), jnp.zeros((ROWS, 8, 8)), jnp.zeros((ROWS, CONTEXT // PAGE))

    def projected(self, carry: Any, layer: jax.Array, query: jax.Array, bounds: jax.Array | None) -> Any:
        scores, queries, most = carry
        assert bounds is not None
        keep = jnp.broadcast_to(jnp.arange(CONTEXT // PAGE) != 1, most.shape)
        return (scores, queries + query, most + jnp.where(jnp.isfinite(bounds), bounds, 0.0)), keep

    def attended(self, carry: Any, layer: jax.Array, query: jax.Array, scores: jax.Array | None) -> Any:
        return carry[0] + scores, *carry[1:]


def run(loop: Loop, devices: int) -> list[np.ndarray[Any, Any]]:
    place = placement(make_mesh(jax.devices()[:devices]), ShardingRules()) if devices > 1 else None

    def put(array: Any, leaf: Leaf) -> jax.Array:
        return jnp.asarray(array) if place is None else jax.device_put(array, place(leaf))

    model = lower(FAMILIES["llama"], ops=ops_for(Kernel.XLA), place=place, page_size=PAGE, loop=loop)
    stored = {name: put(value, model.stored[name]) for name, value in values(model, 5).items()}
    params = {name: put(array, model.params[name]) for name, array in model.pack(stored).items()}
    units = 1 + ROWS * CONTEXT // PAGE
    state: State = {
        group.name: {name: put(np.zeros(leaf.shape, leaf.dtype), leaf) for name, leaf in group.arrays(units).items()}
        for group in model.groups
    }
    step = jax.jit(lambda p, s, b: model.tapped_step(p, s, b, Sums(), ("logits",)))
    found = []
    for starts, counts, width in (([0, 0], [11, 5], 12), ([11, 5], [1, 1], 1)):
        state, outputs, seen = step(params, state, batch(starts, counts, width))
        found += [np.asarray(outputs["logits"]).reshape(ROWS, width, -1)[:, 0], *map(np.asarray, seen)]
    return found


def test_four_devices_see_what_one_sees() -> None:
    one, four = run(Loop.UNROLLED, 1), run(Loop.SCAN, 4)
    for a, b in zip(one, four, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5)
    scores = one[5]
    np.testing.assert_allclose(scores.sum(1), 2.0, atol=1e-5)
    assert (scores[0, 4:8] == 0).all() and (scores[0, :4] > 0).all() and (scores[0, 8:12] > 0).all()
