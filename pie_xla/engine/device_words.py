"""The register file on the device: one `u32[C]` array that the passes of all models read and write, in order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pie_xla.engine.executables import ExecutableTable, Key
from pie_xla.engine.steps import StepShapes

PIECES = (8, 512, 32768)  # words moved at once: every size is made of these, so none compiles while others wait


@dataclass(frozen=True)
class HostWords:
    """Words on their way to the host: (u32[n], first, count) pieces, one after the other."""

    pieces: tuple[tuple[Any, int, int], ...]

    def result(self) -> np.ndarray:
        """u32[count]; waits for the device."""
        return np.concatenate([np.asarray(words)[first : first + count] for words, first, count in self.pieces])


class DeviceWords:
    """Owns the array and queues the small moves on it; launchers replace `array` when an executable that donates it has been queued.

    Args:
        shapes: of any of the models: the moves are the same for all.
    """

    def __init__(self, count: int, shapes: StepShapes, table: ExecutableTable) -> None:
        self._count = count
        self._pieces = tuple(n for n in PIECES if n <= count) or (count,)
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
        done = 0
        while done < len(values):
            n = self._piece(len(values) - done)
            part = values[done : done + n]
            words, at = np.zeros(n, np.int32), np.full(n, -1, np.int32)
            words[: len(part)] = part
            at[: len(part)] = np.arange(offset + done, offset + done + len(part))
            run = self._small(Key("poke", "", str(n)), lambda n=n: self._shapes.poke(n))
            self.array = run(self.array, words, at)
            done += len(part)

    def _piece(self, count: int) -> int:
        """The planned size to move `count` words, or the first of them, with."""
        return next((n for n in self._pieces if n >= count), self._pieces[-1])

    def settle_length(self, change: Sequence[int]) -> None:
        """See `StepShapes.settle_length`."""
        run = self._small(Key("length", "", ""), self._shapes.settle_length)
        self.array = run(self.array, np.array(change, np.int32))

    def peek(self, offset: int, count: int) -> HostWords:
        """`count` words at `offset`, on their way to the host."""
        parts = []
        done = 0
        while done < count:
            n = self._piece(count - done)
            start = min(offset + done, self._count - n)  # a slice does not reach beyond the end
            run = self._small(Key("peek", "", str(n)), lambda n=n: self._shapes.peek(n))
            out = run(self.array, np.int32(start))
            out.copy_to_host_async()
            skip = offset + done - start
            take = min(n - skip, count - done)
            parts.append((out, skip, take))
            done += take
        return HostWords(tuple(parts))

    def _small(self, key: Key, work: Any) -> Any:
        return self._table.build_on_step_path(key, work)

    def warm(self) -> list[tuple[Key, Any]]:
        """The moves every engine needs: (key, work) to build before serving."""
        moves: list[tuple[Key, Any]] = [(Key("length", "", ""), self._shapes.settle_length)]
        for n in self._pieces:
            moves.append((Key("poke", "", str(n)), lambda n=n: self._shapes.poke(n)))
            moves.append((Key("peek", "", str(n)), lambda n=n: self._shapes.peek(n)))
        return moves
