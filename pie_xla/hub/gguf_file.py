"""A .gguf file: metadata and tensors, read with bounds checks.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3, little endian).
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pie_xla.errors import PieError

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_BLOCK_BYTES = 64 << 20  # float32 bytes dequantized at a time: NumPy's temporaries stay small


@dataclass(frozen=True)
class GgufTensor:
    """One tensor's place in the file.

    Args:
        shape: row-major, the fastest dimension last (the file lists it first).
        kind: ggml quantization type number.
        offset: bytes from the start of the file.
        nbytes: bytes in the file.
    """

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int
    nbytes: int


class _Cursor:
    """Reads forward through the header; running off the end names what was being read."""

    def __init__(self, path: Path, data: np.ndarray[Any, Any]) -> None:
        self.path, self.data, self.at = path, data, 0
        self.reading = "the header"

    def take(self, count: int) -> bytes:
        end = self.at + count
        if count < 0 or end > len(self.data):
            raise PieError(
                f"{self.path} is truncated: it ends at byte {len(self.data)}, inside {self.reading}",
                "download or copy the file again",
            )
        chunk = self.data[self.at : end].tobytes()
        self.at = end
        return chunk

    def scalar(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def string(self) -> str:
        # Tokens of byte-level vocabularies are valid UTF-8; a broken one must not stop an import of its neighbours.
        return self.take(self.scalar("Q")).decode("utf-8", "replace")

    def value(self, kind: int) -> Any:
        if code := _SCALARS.get(kind):
            return self.scalar(code)
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            raise PieError(
                f"{self.path}: {self.reading} has the unknown value type {kind}: damaged, or newer than this reader"
            )
        item, count = self.scalar("I"), self.scalar("Q")
        if code := _SCALARS.get(item):
            size = struct.calcsize("<" + code)
            return np.frombuffer(self.take(size * count), np.dtype("?" if code == "?" else "<" + code)).tolist()
        if count > len(self.data) - self.at:  # every item takes a byte at least: a lie about the count ends here
            self.take(len(self.data) - self.at + 1)
        return [self.value(item) for _ in range(count)]


class GgufFile:
    """An open .gguf file.

    Args:
        path: the file.

    Raises:
        PieError: not a GGUF file, an unknown version, truncated, split over several files, or an unknown quantization.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            size = path.stat().st_size
            self._data = np.memmap(path, np.uint8, "r") if size else np.zeros(0, np.uint8)
        except OSError as error:
            raise PieError(f"{path} cannot be read: {error.strerror}") from error
        cursor = _Cursor(path, self._data)
        magic = self._data[:4].tobytes()
        if magic != b"GGUF":
            raise PieError(
                f"{path} is not a GGUF file: it starts with {magic!r} instead of b'GGUF'",
                "download or copy the file again",
            )
        cursor.take(4)
        version = cursor.scalar("I")
        if version not in (2, 3):
            big = int.from_bytes(version.to_bytes(4, "little"), "big") in (2, 3)
            raise PieError(
                f"{path} has GGUF version {version}{' (big endian)' if big else ''}",
                "this reader knows little-endian versions 2 and 3",
            )
        count, keys = cursor.scalar("Q"), cursor.scalar("Q")
        self.metadata: dict[str, Any] = {}
        for index in range(keys):
            cursor.reading = f"metadata key {index + 1} of {keys}"
            key = cursor.string()
            cursor.reading = f"metadata value {key!r}"
            self.metadata[key] = cursor.value(cursor.scalar("I"))
        if self.metadata.get("split.count", 1) > 1:
            raise PieError(
                f"{path} is one of {self.metadata['split.count']} files of a split GGUF, which is not read",
                "join it with llama-gguf-split --merge",
            )
        self.tensors = self._directory(cursor, count)

    def _directory(self, cursor: _Cursor, count: int) -> dict[str, GgufTensor]:
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        entries = []
        for index in range(count):
            cursor.reading = f"tensor entry {index + 1} of {count}"
            name = cursor.string()
            dims = [cursor.scalar("Q") for _ in range(cursor.scalar("I"))]
            entries.append((name, tuple(reversed(dims)), cursor.scalar("I"), cursor.scalar("Q")))
        alignment = self.metadata.get("general.alignment", 32)
        start = -(-cursor.at // alignment) * alignment
        tensors: dict[str, GgufTensor] = {}
        for name, shape, kind, offset in entries:
            try:
                block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
            except (ValueError, KeyError):
                raise PieError(f"{self.path}: tensor {name} has the unknown quantization type {kind}") from None
            if not shape or shape[-1] % block:
                raise PieError(
                    f"{self.path}: tensor {name} of shape {list(shape)} is no whole number of blocks of {block}"
                )
            tensor = GgufTensor(name, shape, kind, start + offset, math.prod(shape) // block * block_bytes)
            if tensor.offset + tensor.nbytes > len(self._data):
                raise PieError(
                    f"{self.path} is truncated: tensor {name} ends at byte {tensor.offset + tensor.nbytes}, "
                    f"the file at {len(self._data)}",
                    "download or copy the file again",
                )
            if name in tensors:
                raise PieError(f"{self.path} holds tensor {name} twice; the file is damaged")
            tensors[name] = tensor
        return tensors

    def read(self, name: str) -> np.ndarray[Any, Any]:
        """Tensor `name`, dequantized to float32, row-major."""
        from gguf.constants import GGMLQuantizationType
        from gguf.quants import dequantize

        tensor = self.tensors[name]
        raw = self._data[tensor.offset : tensor.offset + tensor.nbytes]
        kind = GGMLQuantizationType(tensor.kind)
        if kind is GGMLQuantizationType.F32:
            return np.array(raw.view("<f4").reshape(tensor.shape))
        rows = math.prod(tensor.shape[:-1])
        packed = raw.reshape(rows, -1)
        out = np.empty((rows, tensor.shape[-1]), np.float32)
        step = max(1, _BLOCK_BYTES // (4 * tensor.shape[-1]))
        for row in range(0, rows, step):
            block = np.ascontiguousarray(packed[row : row + step])
            try:
                out[row : row + step] = self._dequantize(kind, block, dequantize)
            except NotImplementedError:
                raise PieError(
                    f"{self.path}: tensor {name} is quantized as {kind.name}, which cannot be dequantized here"
                ) from None
        return out.reshape(tensor.shape)

    @staticmethod
    def _dequantize(kind: Any, block: np.ndarray[Any, Any], dequantize: Any) -> np.ndarray[Any, Any]:
        match kind.name:
            case "F16":
                return block.view("<f2").astype(np.float32)
            case "BF16":
                return (block.view("<u2").astype(np.uint32) << 16).view(np.float32)
            case _:
                return np.asarray(dequantize(block, kind))
