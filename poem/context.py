"""What a layer is handed besides its input: its state, the batch and the kernels. Lives only while a step is traced."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from poem.spec import Attention, Batch, Leaf, Ops, Place, State, StateGroup
from poem.taps import Taps, hide_pages, last_token, once_seen


@dataclass
class Context:
    """One layer's view of the state while it is traced.

    Args:
        batch: the launch.
        ops: the kernels.
        state: all pools; replaced as the layers write.
        shared: what `Model.embed` computed once for all layers (rope tables by group name).
        group: the group of the current layer.
        layer: its index within its group; a traced scalar under scan.
        place: shardings for values with logical axes, or None on one device.
        taps: what looks at attention, or None.
        carry: what the taps carry from layer to layer; replaced as they run.
        number: the layer's number among attention layers; a traced scalar under scan.
    """

    batch: Batch
    ops: Ops
    state: State
    shared: Mapping[str, tuple[jax.Array, ...]]
    group: StateGroup
    layer: jax.Array | int
    place: Place | None
    taps: Taps | None = None
    carry: Any = None
    number: jax.Array | int = 0

    def rotate(self, x: jax.Array) -> jax.Array:
        """x [B, Q, H, d] turned by its tokens' positions (rope), with the table of the layer's group."""
        return self.ops.rotate(x, self.shared[self.group.name])

    def attend(self, query: jax.Array, key: jax.Array, value: jax.Array, how: Attention) -> jax.Array:
        """Append key and value [B, Q, K, d] to this layer's pages, and attend: query [B, Q, H, d] -> [B, Q, H, d]."""
        name = self.group.name
        batch, pages, first = self.batch, self.batch.pages[name], self._first()
        taps = self.taps
        if taps is None:
            out, pool = self.ops.attend(query, key, value, self.state[name], pages, first, batch, how)
            self.state = {**self.state, name: pool}
            return out
        last = last_token(query, batch)
        shown, number = last.astype(jnp.float32), jnp.asarray(self.number).astype(jnp.uint32)
        with jax.named_scope("on_attn_proj"):
            bounds = None
            if taps.bounded:
                bounds = self.ops.page_bounds(last, self.state[name], pages, first, batch, how, taps.width)
                key = once_seen(key, bounds)  # it is written after
            self.carry, keep = taps.projected(self.carry, number, shown, bounds)
            if keep is not None:
                batch = hide_pages(batch, pages, self.group.page_size, keep)
        out, pool = self.ops.attend(query, key, value, self.state[name], pages, first, batch, how)
        self.state = {**self.state, name: pool}
        with jax.named_scope("on_attn"):
            scores = None
            if taps.scored:
                scores = self.ops.scores(last, pool, pages, first, batch, how, taps.width)
                out = once_seen(out, scores)
            self.carry = taps.attended(self.carry, number, shown, scores)
        return out

    def read(self) -> dict[str, jax.Array]:
        """This layer's recurrent state of each row, [B, ...] by array name; zeros where slots_in is 0."""
        fresh = self.batch.slots_in == 0
        rows = self._first() + self.batch.slots_in
        return {
            name: jnp.where(fresh.reshape(-1, *[1] * (array.ndim - 1)), jnp.zeros((), array.dtype), array[rows])
            for name, array in self.state[self.group.name].items()
        }

    def write(self, values: dict[str, jax.Array]) -> None:
        """Write this layer's recurrent state of each row, [B, ...] by array name, to slots_out."""
        rows = self._first() + self.batch.slots_out
        pool = self.state[self.group.name]
        if values.keys() != pool.keys():
            raise ValueError(f"group {self.group.name} keeps {sorted(pool)}, the layer wrote {sorted(values)}")
        written = {name: pool[name].at[rows].set(value.astype(pool[name].dtype)) for name, value in values.items()}
        self.state = {**self.state, self.group.name: written}

    def constrain(self, value: jax.Array, *axes: str | None) -> jax.Array:
        """`value` placed by its logical axes; itself on one device."""
        if self.place is None:
            return value
        where = self.place(Leaf(value.shape, value.dtype.name, axes))
        placed: jax.Array = jax.lax.with_sharding_constraint(value, where)  # type: ignore[no-untyped-call, unused-ignore]
        return placed

    def _first(self) -> jax.Array | int:
        units = next(iter(self.state[self.group.name].values())).shape[0] // self.group.layers
        return self.layer * units
