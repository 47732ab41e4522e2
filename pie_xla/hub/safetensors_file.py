"""Safetensors checkpoints, single file or sharded, read lazily tensor by tensor.

Format: https://github.com/huggingface/safetensors#format (u64 header size, JSON header, raw little-endian tensors).
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from pie_xla.errors import PieError

_FLOATS = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
}
_INDEX = "model.safetensors.index.json"
_AGAIN = "download or copy the file again"


@dataclass(frozen=True)
class _Place:
    file: Path
    kind: str
    shape: tuple[int, ...]
    start: int
    end: int


class SafetensorsCheckpoint:
    """The tensors and the config of a checkpoint directory.

    Args:
        path: directory with config.json and model.safetensors, or shards with their index.

    Raises:
        PieError: a file is missing, truncated or damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = read_json(path / "config.json")
        self._places: dict[str, _Place] = {}
        self._maps: dict[Path, np.ndarray[Any, Any]] = {}
        for file in self._files():
            self._places |= self._header(file)
        self._check_index()

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Tensor name -> shape."""
        return {name: place.shape for name, place in self._places.items()}

    @property
    def dtype(self) -> str:
        """The widest float dtype among the tensors: what the checkpoint is stored in."""
        kinds = {place.kind for place in self._places.values() if place.kind in _FLOATS}
        return _FLOATS[max(kinds, key=lambda kind: (_FLOATS[kind].itemsize, kind))].name if kinds else "float32"

    def read(self, name: str) -> np.ndarray[Any, Any]:
        """Tensor `name` in its own dtype; a read-only view of the mapped file.

        Raises:
            PieError: the tensor is not a float array.
        """
        place = self._places[name]
        if place.kind not in _FLOATS:
            raise PieError(
                f"{place.file}: tensor {name} has dtype {place.kind}, and only float tensors are imported",
                "GPTQ, AWQ and bitsandbytes checkpoints are not read; import the original one or a GGUF file",
            )
        if place.file not in self._maps:
            self._maps[place.file] = np.memmap(place.file, np.uint8, "r")
        raw = self._maps[place.file][place.start : place.end]
        value: np.ndarray[Any, Any] = raw.view(_FLOATS[place.kind]).reshape(place.shape)
        return value

    def _files(self) -> list[Path]:
        single, index = self.path / "model.safetensors", self.path / _INDEX
        if index.is_file():
            self._index: dict[str, str] = read_json(index).get("weight_map", {})
            files = sorted({self.path / file for file in self._index.values()})
            outside = [file for file in files if file.parent != self.path]
            if outside:
                raise PieError(f"{index} names a file outside its directory: {outside[0].name}")
        elif single.is_file():
            self._index, files = {}, [single]
        else:
            self._index, files = {}, sorted(self.path.glob("*.safetensors"))
            if not files:
                raise PieError(
                    f"{self.path} holds no *.safetensors file",
                    "pickled checkpoints (.bin, .pt) are not read: they are programs",
                )
            if len(files) > 1:
                raise PieError(
                    f"{self.path} holds {len(files)} safetensors files, but no {_INDEX}",
                    "download the checkpoint again, whole",
                )
        for file in files:
            if not file.is_file():
                raise PieError(
                    f"{self.path}: {file.name} is missing, though {_INDEX} names it",
                    "download the checkpoint again, whole",
                )
        return files

    def _header(self, file: Path) -> dict[str, _Place]:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if size < 8 or length > min(size - 8, 100 << 20):
                raise PieError(
                    f"{file} is no safetensors file, or its header is cut off (header {length} bytes, file {size})",
                    _AGAIN,
                )
            try:
                header: dict[str, Any] = json.loads(stream.read(length))
                places = {
                    name: _Place(
                        file, entry["dtype"], tuple(entry["shape"]), *(8 + length + at for at in entry["data_offsets"])
                    )
                    for name, entry in header.items()
                    if name != "__metadata__"
                }
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise PieError(f"{file}: the safetensors header is damaged: {error}", _AGAIN) from error
        for name, place in places.items():
            if place.end > size:
                raise PieError(
                    f"{file} is truncated: tensor {name} needs bytes up to {place.end}, the file has {size}", _AGAIN
                )
            needed = (
                math.prod(place.shape) * _FLOATS[place.kind].itemsize
                if place.kind in _FLOATS
                else place.end - place.start
            )
            if place.start < 8 + length or place.end - place.start != needed:
                raise PieError(
                    f"{file}: tensor {name} of shape {list(place.shape)} and dtype {place.kind} does not fit its bytes",
                    _AGAIN,
                )
        return places

    def _check_index(self) -> None:
        missing = sorted(name for name, file in self._index.items() if name not in self._places)
        if missing:
            raise PieError(
                f"{self.path}: tensor {missing[0]} is missing from {self._index[missing[0]]} ({len(missing)} in all)",
                _AGAIN,
            )


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`; PieError names the file when it is missing or damaged."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise PieError(
            f"{path.parent} has no {path.name}",
            "a checkpoint directory holds config.json, *.safetensors and tokenizer.json",
        ) from None
    except (OSError, ValueError) as error:
        raise PieError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise PieError(f"{path} does not hold a JSON object")
    return value
