"""One int32 block in, per launch: where each field lies, for the host that writes it and the device that reads it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pie_xla.errors import PieError
from pie_xla.eta.types import DType, TensorType


class Layout:
    """Named fields of one int32 vector.

    >>> layout = Layout({"tokens": (2, 3), "starts": (2,)})
    >>> layout.size
    8
    """

    def __init__(self, fields: Mapping[str, tuple[int, ...]]) -> None:
        self._fields: dict[str, tuple[int, tuple[int, ...]]] = {}
        offset = 0
        for name, shape in fields.items():
            self._fields[name] = (offset, shape)
            offset += math.prod(shape)
        self.size = max(1, offset)  # an empty argument would change the executable's signature

    def buffer(self) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """A zeroed block and writable views of its fields."""
        block = np.zeros(self.size, np.int32)
        return block, {
            name: block[at : at + math.prod(shape)].reshape(shape) for name, (at, shape) in self._fields.items()
        }

    def unpack(self, block: jax.Array) -> dict[str, jax.Array]:
        """The fields of a traced block: static slices, which XLA folds away."""
        return {name: block[at : at + math.prod(shape)].reshape(shape) for name, (at, shape) in self._fields.items()}

    @property
    def argument(self) -> jax.ShapeDtypeStruct:
        return struct((self.size,), jnp.int32)


def struct(shape: tuple[int, ...], dtype: Any, sharding: Any = None) -> jax.ShapeDtypeStruct:
    """An argument to compile for."""
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)  # type: ignore[no-untyped-call]


def words_of(value: np.ndarray, kind: TensorType) -> np.ndarray:
    """A host value as i32 words (bit patterns); shape [elements]. bool is 0 or 1."""
    match kind.dtype:
        case DType.F32:
            return np.ascontiguousarray(value, np.float32).reshape(-1).view(np.int32)
        case DType.U32:
            return np.ascontiguousarray(value, np.uint32).reshape(-1).view(np.int32)
        case DType.I32 | DType.BOOL:
            return np.ascontiguousarray(value, np.int32).reshape(-1)


def check_param(i: int, kind: TensorType, value: np.ndarray) -> None:
    """Refuse a parameter that is not of the type that the program takes."""
    if value.shape != kind.shape or value.dtype != kind.dtype.numpy:
        raise PieError(f"parameter {i} is {value.dtype}{list(value.shape)}, the epilogue takes {kind}")


def value_of(words: np.ndarray, kind: TensorType) -> np.ndarray:
    """Device words u32[elements] as a host value of the type's shape."""
    words = np.ascontiguousarray(words)
    match kind.dtype:
        case DType.F32:
            return words.view(np.float32).reshape(kind.shape)
        case DType.I32:
            return words.view(np.int32).reshape(kind.shape)
        case DType.U32:
            return words.view(np.uint32).reshape(kind.shape)
        case DType.BOOL:
            return np.asarray(words != 0).reshape(kind.shape)


def from_words(words: jax.Array, kind: TensorType) -> jax.Array:
    """Traced i32 or u32 words [elements] as a value of the type."""
    match kind.dtype:
        case DType.F32:
            out = jax.lax.bitcast_convert_type(words, jnp.float32)
        case DType.I32:
            out = jax.lax.bitcast_convert_type(words, jnp.int32)
        case DType.U32:
            out = jax.lax.bitcast_convert_type(words, jnp.uint32)
        case DType.BOOL:
            out = words != 0
    return out.reshape(kind.shape)


def to_words(value: jax.Array, kind: TensorType) -> jax.Array:
    """A traced value as u32 words [elements]."""
    match kind.dtype:
        case DType.BOOL:
            return value.reshape(-1).astype(jnp.uint32)
        case _:
            return jax.lax.bitcast_convert_type(value.reshape(-1), jnp.uint32)
