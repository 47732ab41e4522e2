"""The store: imported models, one directory each, complete or absent.

ROOT/models/NAME/{manifest.json, config.json, tokenizer.json, chat_template.jinja, generation.json, license/, weights/}
ROOT/downloads/   what imports fetched so far, for resuming
ROOT/partial/     imports under way; a directory nobody locks is debris and is deleted by the next import of that name
"""

from __future__ import annotations

import difflib
import errno
import fcntl
import json
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from pie_xla.errors import PieError, UsageError
from pie_xla.hub.disk import sync, sync_tree
from pie_xla.hub.known import file_digest
from pie_xla.hub.manifest import Manifest
from pie_xla.progress import SILENT, Progress

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


@dataclass(frozen=True)
class Generation:
    """How generation starts and ends, generation.json.

    Args:
        bos: the id of the beginning-of-sequence token, or None.
        add_bos: the model expects `bos` before a plain prompt.
        stop_tokens: ids that end a turn or a text.
        special: names of the special tokens a chat template may use: {"bos_token": "<bos>", ...}.
    """

    bos: int | None
    add_bos: bool
    stop_tokens: tuple[int, ...]
    special: dict[str, str]


@dataclass(frozen=True)
class ModelEntry:
    """One imported model, checked to be complete.

    Args:
        path: its directory.
        manifest: what it says about itself.
    """

    path: Path
    manifest: Manifest

    @property
    def name(self) -> str:
        """Its name in the store."""
        return self.path.name

    @cached_property
    def config(self) -> dict[str, Any]:
        """config.json, as `poem.lower.lower` takes it."""
        return dict(json.loads((self.path / "config.json").read_text(encoding="utf-8")))

    @cached_property
    def generation(self) -> Generation:
        """generation.json."""
        data = json.loads((self.path / "generation.json").read_text(encoding="utf-8"))
        return Generation(**data | {"stop_tokens": tuple(data["stop_tokens"])})

    @cached_property
    def chat_template(self) -> str | None:
        """The jinja text of the chat template, or None: a base model."""
        path = self.path / "chat_template.jinja"
        return path.read_text(encoding="utf-8") if path.exists() else None

    @property
    def tokenizer_path(self) -> Path:
        """tokenizer.json."""
        return self.path / "tokenizer.json"

    @property
    def weights_path(self) -> Path:
        """The Orbax checkpoint."""
        return self.path / "weights"


class Store:
    """Imported models under one directory.

    Args:
        root: made when something is imported.
    """

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root).expanduser().absolute()
        self._models, self._partial = self.root / "models", self.root / "partial"

    @property
    def downloads(self) -> Path:
        """What imports fetched so far."""
        return self.root / "downloads"

    def prepare(self) -> None:
        """Make the store's directories; PieError when that is not possible."""
        try:
            for path in (self._models, self._partial, self.downloads):
                path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            if error.errno == errno.ENOSPC:
                raise
            raise PieError(
                f"the store {self.root} cannot be written: {error.strerror}", "set another store directory"
            ) from error

    def list_models(self) -> list[ModelEntry]:
        """All complete models, by name. A damaged one is left out here, and refused by name by `open`."""
        entries = []
        for name in self.names():
            try:
                entries.append(self.open(name))
            except PieError:
                continue
        return entries

    def names(self) -> list[str]:
        """The names of all models, damaged ones included."""
        return sorted(path.name for path in self._models.iterdir() if path.is_dir()) if self._models.is_dir() else []

    def open(self, name: str) -> ModelEntry:
        """The model of exactly this name; sizes are checked, digests are not (see `verify`).

        Raises:
            UsageError: no such model; the nearest name is named.
            PieError: the store of the model is damaged.
        """
        entry = ModelEntry(self._find(name), Manifest.read(self._find(name)))
        for record in entry.manifest.files:
            path = entry.path / record.path
            try:
                size = path.stat().st_size
            except OSError:
                raise self._damage(name, f"{path} is missing") from None
            if size != record.bytes:
                raise self._damage(name, f"{path} has {size} bytes instead of {record.bytes}")
        return entry

    def verify(self, name: str, progress: Progress = SILENT) -> ModelEntry:
        """`open`, and every file's SHA-256 compared with the manifest."""
        entry = self.open(name)
        with progress.task(f"verify {name}", sum(record.bytes for record in entry.manifest.files)) as task:
            for record in entry.manifest.files:
                if file_digest(entry.path / record.path) != record.sha256:
                    raise self._damage(name, f"the digest of {entry.path / record.path} is wrong")
                task.advance(record.bytes)
        return entry

    def remove(self, name: str) -> None:
        """Delete a model, damaged or not. Renamed first, so that a crash leaves no half model behind."""
        path = self._find(name)
        self.prepare()
        with self._locked(name):
            debris = self._partial / name
            shutil.rmtree(debris, ignore_errors=True)
            path.rename(debris)
            shutil.rmtree(debris)

    @contextmanager
    def building(self, name: str) -> Iterator[Path]:
        """A directory to build model `name` in; leaving it without an error syncs it and makes it the model, at once.

        An error, Ctrl-C included, deletes it; a crash leaves it under partial/, where the next import deletes it.

        Raises:
            UsageError: an unfit name.
            PieError: another import of the same name is running.
        """
        if not _NAME.fullmatch(name):
            raise UsageError(
                f"{name!r} cannot be a model's name",
                "use letters, digits, '.', '_' and '-', starting with a letter or digit",
            )
        self.prepare()
        with self._locked(name):
            work = self._partial / name
            shutil.rmtree(work, ignore_errors=True)
            work.mkdir()
            try:
                yield work
                sync_tree(work)
                target = self._models / name
                if target.exists():  # a damaged one: `import_model` refuses to replace a good one
                    old = self._partial / f"{name}.old"
                    shutil.rmtree(old, ignore_errors=True)
                    target.rename(old)
                    shutil.rmtree(old)
                work.rename(target)
                sync(self._models)
            finally:
                shutil.rmtree(work, ignore_errors=True)

    @contextmanager
    def _locked(self, name: str) -> Iterator[None]:
        with (self._partial / f".{name}.lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise PieError(
                    f"model {name!r} is being imported or removed by another process", "wait for it, then try again"
                ) from None
            yield

    def _find(self, name: str) -> Path:
        names = self.names()
        if name in names:
            return self._models / name
        near = difflib.get_close_matches(name, names, 1, 0.4)
        hint = f"the nearest is {near[0]!r}" if near else "import one: pie-xla model import SOURCE"
        raise UsageError(
            f"there is no model {name!r} in {self.root}", hint + (f"; there are: {', '.join(names)}" if names else "")
        )

    def _damage(self, name: str, what: str) -> PieError:
        return PieError(
            f"the store of model {name!r} is damaged: {what}",
            f"remove the model and import it again: pie-xla model remove {name}",
        )
