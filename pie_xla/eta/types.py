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
