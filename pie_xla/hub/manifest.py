"""What a stored model says about itself: source, licence, dtype, digests. Written last, checked first."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from pie_xla.errors import PieError

FORMAT = 1
NAME = "manifest.json"


@dataclass(frozen=True)
class ParamRecord:
    """A stored parameter.

    Args:
        path: dotted, `layers.3.self_attn.q_proj.kernel`.
        bytes: of the array.
        sha256: of the row-major little-endian array, hex.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class FileRecord:
    """A file of the model's directory, by its path inside it."""

    path: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class License:
    """The licence of the weights.

    Args:
        id: as the source names it ("apache-2.0", "gemma"), or None.
        title, url: of terms that ask to be shown, or None.
        documents: files of the model's directory with the texts that came with the weights.
    """

    id: str | None
    title: str | None
    url: str | None
    documents: tuple[str, ...]


@dataclass(frozen=True)
class Manifest:
    """manifest.json.

    Args:
        source: what the user named; `origin` the file, commit or version it was then.
        dtype: of the stored parameters.
        total_bytes: of all parameters.
        unused: checkpoint tensors that the model does not use, with the reason.
    """

    name: str
    source: str
    origin: str
    license: License
    model_type: str
    dtype: str
    param_count: int
    total_bytes: int
    params: tuple[ParamRecord, ...]
    files: tuple[FileRecord, ...]
    unused: dict[str, str]

    def write(self, directory: Path) -> None:
        """Write manifest.json, with a digest of itself."""
        data = asdict(self)
        text = {"format": FORMAT, "sha256": _digest(data), **data}
        (directory / NAME).write_text(json.dumps(text, indent=1), encoding="utf-8")

    @staticmethod
    def read(directory: Path) -> Manifest:
        """The manifest of a model's directory.

        Raises:
            PieError: it is missing, damaged, or of another format.
        """
        path = directory / NAME
        hint = f"remove the model and import it again: pie-xla model remove {directory.name}"
        try:
            data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            found, digest = data.pop("format"), data.pop("sha256")
            if found != FORMAT:
                raise PieError(f"{path} has store format {found}, and this version reads format {FORMAT}", hint)
            if digest != _digest(data):
                raise PieError(f"the store of model {directory.name!r} is damaged: {path} was changed", hint)
            return _manifest(data)
        except FileNotFoundError:
            raise PieError(f"the store of model {directory.name!r} is damaged: {path} is missing", hint) from None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise PieError(
                f"the store of model {directory.name!r} is damaged: {path} cannot be read ({error})", hint
            ) from error


def _manifest(data: dict[str, Any]) -> Manifest:
    values = {field.name: data[field.name] for field in fields(Manifest)}
    values["license"] = License(**data["license"] | {"documents": tuple(data["license"]["documents"])})
    values["params"] = tuple(ParamRecord(**entry | {"shape": tuple(entry["shape"])}) for entry in data["params"])
    values["files"] = tuple(FileRecord(**entry) for entry in data["files"])
    return Manifest(**values)


def _digest(data: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()
