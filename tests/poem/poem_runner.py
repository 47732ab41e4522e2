"""Runs a lowered model over whole sequences: pages handed out, launches built, logits collected."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from poem_cases import tensor

from pie_xla.kernels.ops import Kernel, ops_for
from poem.lower import Loop, LoweredModel, lower
from poem.spec import Batch, State, StateKind
from poem.weights import assign

PAGE = 4


def lowered(config: dict[str, Any], loop: Loop = Loop.UNROLLED) -> LoweredModel:
    """The configuration in plain XLA, pages of 4 cells."""
    return lower(config, ops=ops_for(Kernel.XLA), page_size=PAGE, loop=loop)


def load(model: LoweredModel, names: list[str]) -> dict[str, jax.Array]:
    """Seeded parameters, through the weight rules from checkpoint names."""
    assignments = assign(model.weight_rules, model.stored, names).used
    stored = {}
    for a in assignments:
        source = tensor(a.source, a.transform.source_shape(a.leaf.shape))
        stored[a.target] = jnp.asarray(a.transform.apply(source, a.leaf.shape, a.source))
    return model.pack(stored)


class Runner:
    """Sequences with pages of their own, from a shuffled pool; freed window pages are not modelled."""

    def __init__(self, model: LoweredModel, params: dict[str, jax.Array], rows: int) -> None:
        self.model = model
        self.params = params
        self.per_row = -(-model.facts.max_context // PAGE)
        self.units = rows * self.per_row + 1
        self.state: State = {}
        for group in model.groups:
            leaves = group.arrays(self.units if group.kind is StateKind.PAGED else 2 * rows + 1)
            # what nobody wrote must not matter
            self.state[group.name] = {name: jnp.full(leaf.shape, jnp.nan, leaf.dtype) for name, leaf in leaves.items()}
        order = 1 + np.random.default_rng(0).permutation(rows * self.per_row)
        self.table = order.reshape(rows, self.per_row).astype(np.int32)
        self.lengths = np.zeros(rows, np.int32)
        self.slot = np.zeros(rows, np.int32)
        self.step = jax.jit(model.step, donate_argnums=1, static_argnums=3)

    def run(self, chunks: dict[int, np.ndarray[Any, Any]], width: int, height: int) -> dict[int, np.ndarray[Any, Any]]:
        """One launch of `height` rows and `width` tokens: row -> its new tokens; row -> logits [T, V]."""
        tokens = np.zeros((height, width), np.int32)
        positions = np.full((height, width), -1, np.int32)
        starts, counts = np.zeros(height, np.int32), np.zeros(height, np.int32)
        table = np.zeros((height, self.per_row), np.int32)
        slots_in, slots_out = np.zeros(height, np.int32), np.zeros(height, np.int32)
        for b, (row, ids) in enumerate(chunks.items()):
            n = len(ids)
            tokens[b, :n], starts[b], counts[b] = ids, self.lengths[row], n
            positions[b, :n] = self.lengths[row] + np.arange(n)
            table[b] = self.table[row]
            slots_in[b] = self.slot[row]
            self.slot[row] = slots_out[b] = 2 * row + 1 + (self.slot[row] == 2 * row + 1)
            self.lengths[row] += n
        pages = {g.name: jnp.asarray(table) for g in self.model.groups if g.kind is StateKind.PAGED}
        batch = Batch(
            *map(jnp.asarray, (tokens, positions, starts, counts)),
            pages,
            *map(jnp.asarray, (slots_in, slots_out, np.arange(height * width, dtype=np.int32))),
        )
        self.state, values = self.step(self.params, self.state, batch, ("logits",))
        logits = np.asarray(values["logits"]).reshape(height, width, -1)
        return {row: logits[b, : len(ids)] for b, (row, ids) in enumerate(chunks.items())}
