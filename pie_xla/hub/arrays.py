"""The weights on disk: an Orbax PyTree checkpoint (zarr3, uncompressed), written and read one array at a time.

Orbax's own save holds the whole tree twice and its import costs over a second, so the files are made through
tensorstore in Orbax's layout: `PyTreeCheckpointer().restore(directory)` gives NumPy arrays, `StandardCheckpointer` with
shardings gives JAX's.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

_ALIGNMENT = 64
_CHUNK_BYTES = 32 << 20  # chunks of a large array are read in parallel, and apart for shards


class ArrayWriter:
    """Writes one weights directory.

    Args:
        directory: made if absent.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._shapes: dict[str, tuple[int, ...]] = {}
        directory.mkdir(parents=True, exist_ok=True)

    def write(self, path: str, value: np.ndarray[Any, Any]) -> str:
        """Store the parameter `path` (dotted); its SHA-256 over row-major little-endian bytes, hex."""
        import tensorstore as ts

        value = np.ascontiguousarray(value)
        store = ts.open(_spec(self._directory / path, value.shape, value.dtype.name), create=True).result()
        store.write(value).result()
        self._shapes[path] = value.shape
        return hashlib.sha256(value.reshape(-1).view(np.uint8).data).hexdigest()

    def finish(self) -> None:
        """Write Orbax's tree metadata; without it the directory is no checkpoint."""
        tree = {
            str((path,)): {
                "key_metadata": [{"key": path, "key_type": 2}],
                "value_metadata": {"value_type": "np.ndarray", "skip_deserialize": False, "write_shape": list(shape)},
            }
            for path, shape in self._shapes.items()
        }
        metadata = {
            "tree_metadata": tree,
            "use_ocdbt": False,
            "use_zarr3": True,
            "store_array_data_equal_to_fill_value": True,
        }
        (self._directory / "_METADATA").write_text(json.dumps(metadata | {"custom_metadata": None}), encoding="utf-8")


class ArrayReader:
    """Reads one weights directory; arrays are opened without touching their metadata files.

    Args:
        directory: what `ArrayWriter` wrote.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def read(
        self, path: str, shape: tuple[int, ...], dtype: str, index: tuple[slice, ...] = (), cast: str | None = None
    ) -> Callable[[], np.ndarray[Any, Any]]:
        """Begin reading the slice `index` of the parameter `path`, stored as `dtype`, cast on the way when asked.

        Returns:
            A function that waits for the array, which starts on a cache line: XLA:CPU takes it over without a copy.
        """
        import tensorstore as ts

        store = ts.open(_spec(self._directory / path, shape, dtype), open=True, assume_metadata=True).result()
        part = store[index] if index else store
        part = part if cast in (None, dtype) else ts.cast(part, cast)
        out = _aligned_empty(tuple(part.shape), part.dtype.numpy_dtype)
        future = ts.array(out, copy=False, write=True).write(part)

        def finish() -> np.ndarray[Any, Any]:
            future.result()
            return out

        return finish


def _aligned_empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    size = math.prod(shape) * dtype.itemsize
    raw = np.empty(size + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    value: np.ndarray[Any, Any] = raw[start : start + size].view(dtype).reshape(shape)
    return value


def chunk_shape(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """The first dimension is halved until a chunk is small enough: [49152, 576] f32 -> [12288, 576]."""
    chunk = list(shape)
    while chunk and chunk[0] > 1 and math.prod(chunk) * itemsize > _CHUNK_BYTES:
        chunk[0] = -(-chunk[0] // 2)
    return tuple(chunk)


def _spec(path: Path, shape: tuple[int, ...], dtype: str) -> dict[str, Any]:
    itemsize = 2 if dtype in ("bfloat16", "float16") else np.dtype(dtype).itemsize
    return {
        "driver": "zarr3",
        "kvstore": {"driver": "file", "path": f"{path}/"},
        "metadata": {
            "shape": list(shape),
            "data_type": dtype,
            "fill_value": 0.0,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(chunk_shape(shape, itemsize))}},
            "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}],
        },
        "store_data_equal_to_fill_value": True,  # a missing file is damage, never zeros
    }
