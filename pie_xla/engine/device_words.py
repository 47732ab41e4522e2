"""The register file on the device: one `u32[C]` array that the passes of all models read and write, in order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pie_xla.engine.executables import ExecutableTable, Key
from pie_xla.engine.steps import StepShapes, power_of_two


class DeviceWords:
    """Owns the array and queues the small moves on it; launchers replace `array` when an executable that donates it has been queued.

    Args:
        shapes: of any of the models: the moves are the same for all.
    """

    def __init__(self, count: int, shapes: StepShapes, table: ExecutableTable) -> None:
        self._count = count
        self._shapes = shapes
        self._table = table
        self.array: Any = None

    def rebuild(self) -> None:
        """Fresh, zeroed words: at start, and after a failed executable has taken them along."""
        self.array = jnp.zeros((self._count,), jnp.uint32)

    @property
    def lost(self) -> bool:
        """Whether a failed executable has consumed them."""
        return self.array is not None and bool(self.array.is_deleted())

    def sound(self) -> bool:
        """Whether they can be read; waits for the device."""
        try:
            jax.block_until_ready(self.array)
        except Exception:
            return False
        return True

    def poke(self, values: np.ndarray, offset: int) -> None:
        """Write host words i32[n] at `offset`."""
        n = power_of_two(len(values), 8)
        words, at = np.zeros(n, np.int32), np.full(n, -1, np.int32)
        words[: len(values)] = values
        at[: len(values)] = np.arange(offset, offset + len(values))
        self.array = self._small(Key("poke", "", str(n)), lambda: self._shapes.poke(n))(self.array, words, at)

    def settle_length(self, change: Sequence[int]) -> None:
        """See `StepShapes.settle_length`."""
        run = self._small(Key("length", "", ""), self._shapes.settle_length)
        self.array = run(self.array, np.array(change, np.int32))

    def peek(self, offset: int, count: int) -> Any:
        """u32[count] at `offset`, on its way to the host."""
        run = self._small(Key("peek", "", str(count)), lambda: self._shapes.peek(count))
        out = run(self.array, np.int32(offset))
        out.copy_to_host_async()
        return out

    def _small(self, key: Key, work: Any) -> Any:
        return self._table.build_on_step_path(key, work)

    def warm(self) -> list[tuple[Key, Any]]:
        """The moves every engine needs: (key, work) to build before serving."""
        return [
            (Key("poke", "", "8"), lambda: self._shapes.poke(8)),
            (Key("length", "", ""), self._shapes.settle_length),
            (Key("peek", "", "1"), lambda: self._shapes.peek(1)),
        ]
