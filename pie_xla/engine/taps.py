"""The layer stages of the passes of one launch, as one thing that looks at attention (`poem.taps.Taps`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pie_xla.eta.types import LayerStages


class StageTaps:
    """Pass p's row r is row p * R + r of the launch, R rows a pass. Letters: P passes, B rows, H query heads, d head_dim, J pages.

    Args:
        rows: R.
        passes: P; rows beyond P * R belong to nobody, and see all.
        inputs: params, cells, keys u32[P, 2] and ordinals u32[P], all with a leading axis of P.
    """

    def __init__(
        self, stages: LayerStages, rows: int, passes: int, inputs: tuple[Any, Any, jax.Array, jax.Array]
    ) -> None:
        self._stages, self._rows, self._passes, self._inputs = stages, rows, passes, inputs
        self._values: list[jax.Array] = []

    @property
    def width(self) -> int:
        """See `poem.taps.Taps`."""
        return self._stages.width

    @property
    def scored(self) -> bool:
        """See `poem.taps.Taps`."""
        return bool(self._stages.scored)

    @property
    def bounded(self) -> bool:
        """See `poem.taps.Taps`."""
        return bool(self._stages.bounded)

    def start(self) -> list[jax.Array]:
        """The prologues; the registers as the first layer finds them."""
        self._values, registers = jax.vmap(self._stages.start)(*self._inputs)
        return registers

    def projected(
        self, carry: list[jax.Array], layer: jax.Array, query: jax.Array, bounds: jax.Array | None
    ) -> tuple[list[jax.Array], jax.Array | None]:
        """See `poem.taps.Taps`."""
        stages = self._stages

        def one(values: Any, registers: Any, queries: Any, bounds: Any, *inputs: Any) -> Any:
            return stages.projected(values, registers, layer, queries, bounds, *inputs)

        mine = self._of_rows(bounds, stages.bounded)
        new, masks = jax.vmap(one)(self._values, carry, self._of_rows(query), mine, *self._inputs)
        if not stages.masked:
            return _alike(new, carry), None
        B, J = query.shape[0], -(-stages.width // stages.page)
        keep = jnp.ones((B, J), bool)
        first = jnp.arange(self._passes, dtype=jnp.int32) * self._rows
        for row, mask in zip(stages.masked, masks, strict=True):
            keep = keep.at[first + row].set(mask)
        return _alike(new, carry), keep

    def attended(
        self, carry: list[jax.Array], layer: jax.Array, query: jax.Array, scores: jax.Array | None
    ) -> list[jax.Array]:
        """See `poem.taps.Taps`."""
        stages = self._stages

        def one(values: Any, registers: Any, queries: Any, scores: Any, *inputs: Any) -> Any:
            return stages.attended(values, registers, layer, queries, scores, *inputs)

        mine = self._of_rows(scores, stages.scored)
        new = jax.vmap(one)(self._values, carry, self._of_rows(query), mine, *self._inputs)
        return _alike(new, carry)

    def finish(self, carry: list[jax.Array], reads: list[jax.Array]) -> tuple[list[jax.Array], list[jax.Array]]:
        """The epilogues: results and puts, [P, ...]. `reads`: the outputs that they use, [P, ...]."""
        return jax.vmap(self._stages.finish)(self._values, carry, reads, *self._inputs)

    def _of_rows(self, values: jax.Array | None, rows: Sequence[int] | None = None) -> list[jax.Array]:
        """[B, ...] -> per row of a pass (those named, or all) [P, ...]."""
        if values is None:
            return []
        per_pass = values[: self._passes * self._rows].reshape(self._passes, self._rows, *values.shape[1:])
        return [per_pass[:, row] for row in (range(self._rows) if rows is None else rows)]


def _alike(new: list[jax.Array], old: list[jax.Array]) -> list[jax.Array]:
    """A loop's carry keeps its types, weak ones too."""
    return [jax.lax.convert_element_type(value, before.dtype) for value, before in zip(new, old, strict=True)]
