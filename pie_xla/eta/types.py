"""What the engine sees of a traced program: its inputs, outputs, cost and one pure function."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import prod
from typing import Protocol

import jax
import numpy as np

from pie_xla.errors import PieError


class EtaError(PieError, TypeError):
    """A program that breaks the language's rules; the message names the op, the operand and the author's line."""


class DType(StrEnum):
    """The four element types of the language; every element is one 32-bit word on the device."""

    F32 = "f32"
    I32 = "i32"
    U32 = "u32"
    BOOL = "bool"

    @property
    def numpy(self) -> np.dtype:
        """The NumPy (and JAX) dtype."""
        return _NUMPY[self]


_NUMPY = {
    DType.F32: np.dtype(np.float32),
    DType.I32: np.dtype(np.int32),
    DType.U32: np.dtype(np.uint32),
    DType.BOOL: np.dtype(np.bool_),
}


@dataclass(frozen=True)
class TensorType:
    """Element type and static shape (rank 0 to 4, every extent at least 1)."""

    dtype: DType
    shape: tuple[int, ...] = ()

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"


@dataclass(frozen=True)
class Read:
    """A model output that the program uses: `name` at row `row` of its own pass.

    `shape` is the output's suffix (`[V]` for logits), with the readout count R in front when the row's readout is set.
    """

    row: int
    name: str
    shape: tuple[int, ...]
    dtype: DType

    @property
    def type(self) -> TensorType:
        return TensorType(self.dtype, self.shape)


@dataclass(frozen=True)
class ChannelUse:
    """How a program uses one channel in a pass: static, at most one net take and one net put."""

    type: TensorType
    take: bool
    read: bool
    put: bool


Arrays = list[jax.Array]


class LayerStages(Protocol):
    """The attention-layer part of a program: one pass, unbatched. The engine vmaps each method over passes.

    What the prologue made (`values`) is seen by all that follows. A channel that a layer stage puts to is a register: it is carried
    from layer to layer, and what is left after the last one is what the pass puts.

    Letters: H query heads, d head_dim, C positions of scores and masks, J pages of C positions.
    """

    @property
    def heads(self) -> tuple[int, int]:
        """(H, d) that it was recorded for."""

    @property
    def width(self) -> int:
        """C."""

    @property
    def page(self) -> int:
        """Positions per page; J is ceil(C / page)."""

    @property
    def scored(self) -> tuple[int, ...]:
        """Rows whose attention scores it uses."""

    @property
    def bounded(self) -> tuple[int, ...]:
        """Rows whose page bounds it uses."""

    @property
    def masked(self) -> tuple[int, ...]:
        """Rows from which it hides pages."""

    @property
    def cost(self) -> int:
        """Static upper bound of one layer, element operations."""

    def start(
        self, params: Sequence[jax.Array], cells: Sequence[jax.Array], key: jax.Array, ordinal: jax.Array
    ) -> tuple[Arrays, Arrays]:
        """The prologue: its values, and the registers as the first layer finds them."""

    def projected(
        self,
        values: Sequence[jax.Array],
        registers: Sequence[jax.Array],
        layer: jax.Array,
        queries: Sequence[jax.Array],
        bounds: Sequence[jax.Array],
        params: Sequence[jax.Array],
        cells: Sequence[jax.Array],
        key: jax.Array,
        ordinal: jax.Array,
    ) -> tuple[Arrays, Arrays]:
        """Before a layer's attention.

        Args:
            layer: u32[], counted among attention layers.
            queries: f32[H, d] per row of the pass.
            bounds: f32[J] per row of `bounded`.
        Returns:
            the registers, and bool[J] per row of `masked`: the pages that may be looked at.
        """

    def attended(
        self,
        values: Sequence[jax.Array],
        registers: Sequence[jax.Array],
        layer: jax.Array,
        queries: Sequence[jax.Array],
        scores: Sequence[jax.Array],
        params: Sequence[jax.Array],
        cells: Sequence[jax.Array],
        key: jax.Array,
        ordinal: jax.Array,
    ) -> Arrays:
        """After a layer's attention; `scores`: f32[C] per row of `scored`. Returns the registers."""

    def finish(
        self,
        values: Sequence[jax.Array],
        registers: Sequence[jax.Array],
        reads: Sequence[jax.Array],
        params: Sequence[jax.Array],
        cells: Sequence[jax.Array],
        key: jax.Array,
        ordinal: jax.Array,
    ) -> tuple[Arrays, Arrays]:
        """The epilogue, as `Program.apply`."""


class Program(Protocol):
    """A traced program; `EtaProgram` and `NativeProgram` implement it."""

    @property
    def key(self) -> str:
        """Identity: equal programs share executables; no seed, no parameter value, no source line."""

    @property
    def rows(self) -> int:
        """Rows of the pass it was traced for."""

    @property
    def reads(self) -> tuple[Read, ...]:
        """Model outputs it uses."""

    @property
    def params(self) -> tuple[TensorType, ...]:
        """Values sent with every submit, in this order."""

    @property
    def channels(self) -> tuple[ChannelUse, ...]:
        """In order of first use."""

    @property
    def results(self) -> tuple[TensorType, ...]: ...

    @property
    def scalar_result(self) -> bool:
        """True: the author's function returned one tensor; False: a tuple."""

    @property
    def cost(self) -> int:
        """Static upper bound of one pass, element operations."""

    @property
    def memory(self) -> int:
        """Static upper bound of live intermediate bytes of one pass."""

    @property
    def source(self) -> str:
        """`main.py:14`, for errors."""

    @property
    def stages(self) -> LayerStages | None:
        """What it does inside the model; such a program is compiled together with the step, and its `apply` is not used."""

    def apply(
        self,
        reads: Sequence[jax.Array],
        params: Sequence[jax.Array],
        cells: Sequence[jax.Array],
        key: jax.Array,
        ordinal: jax.Array,
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        """One pass, unbatched: the engine vmaps it over passes.

        Args:
            reads: the model outputs of `self.reads`.
            params: the values of `self.params`.
            cells: one value per channel of `self.channels` (front cell; zeros where it is only put).
            key: u32[2], the pipeline's seed. ordinal: u32[], the pass's number in its pipeline.
        Returns:
            the results, and the value put for each channel with `put`, in channel order.
        """
        ...
