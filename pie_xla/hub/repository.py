"""A repository of the Hugging Face hub: its checkpoint files downloaded one by one, resumed byte by byte."""

from __future__ import annotations

import fnmatch
import hashlib
import json
import re
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pie_xla.errors import PieError, UsageError
from pie_xla.hub.disk import require_space
from pie_xla.hub.source import HubSource
from pie_xla.progress import Progress

_WANTED = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "chat_template.json",
    "*.safetensors",
    "*.safetensors.index.json",
    "README.md",
    "LICENSE*",
    "LICENCE*",
    "NOTICE*",
    "USE_POLICY*",
)
_LISTING = "listing.json"


@dataclass(frozen=True)
class Checkout:
    """A repository's files on disk.

    Args:
        commit: the full hash.
        license: from the repository's tags, or None.
    """

    directory: Path
    commit: str
    license: str | None


@dataclass(frozen=True)
class _File:
    name: str
    size: int | None
    sha256: str | None  # known for large (LFS) files


def fetch_repository(
    source: HubSource, downloads: Path, *, offline: bool, token: str | None, endpoint: str | None, progress: Progress
) -> Checkout:
    """Download what an import needs of `source`; files that are whole already are kept, partial ones continued.

    Raises:
        UsageError: no such repository or revision.
        PieError: gated, no checkpoint in it, network trouble, a wrong digest, offline and not downloaded.
    """
    base = downloads / "hub" / source.repo.replace("/", "--")
    if offline:
        return _offline(source, base)
    from huggingface_hub import HfApi

    with _naming_errors(source):
        info = HfApi(endpoint=endpoint, token=token).model_info(
            source.repo, revision=source.revision, files_metadata=True
        )
    files = [
        _File(entry.rfilename, entry.size, entry.lfs.sha256 if entry.lfs else None)
        for entry in info.siblings or ()
        if "/" not in entry.rfilename and any(fnmatch.fnmatchcase(entry.rfilename, pattern) for pattern in _WANTED)
    ]
    _check_content(source, [entry.rfilename for entry in info.siblings or ()], files)
    commit = str(info.sha)
    directory = base / commit
    directory.mkdir(parents=True, exist_ok=True)
    missing = [file for file in files if not (directory / file.name).exists()]
    total = sum(file.size or 0 for file in missing)
    have = sum(path.stat().st_size for path in directory.glob("*.part"))
    require_space(directory, max(0, total - have), f"downloading {source}")
    with progress.task(f"download {source}", total) as task:
        for file in missing:
            with _naming_errors(source):
                _download(source, file, commit, directory, token, endpoint, task)
    license_ = next((tag.removeprefix("license:") for tag in info.tags or () if tag.startswith("license:")), None)
    listing = {"files": [file.name for file in files], "license": license_}
    (directory / _LISTING).write_text(json.dumps(listing), encoding="utf-8")
    # A revision resolves without the network later: remember what each name meant last.
    (base / _ref(source)).write_text(commit, encoding="utf-8")
    return Checkout(directory, commit, license_)


def _ref(source: HubSource) -> str:
    return "ref-" + re.sub(r"[^\w.-]", "--", source.revision or "main")


def _offline(source: HubSource, base: Path) -> Checkout:
    try:
        ref = base / _ref(source)
        commit = ref.read_text(encoding="utf-8") if ref.exists() else str(source.revision)
        directory = base / commit
        listing: dict[str, Any] = json.loads((directory / _LISTING).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise PieError(
            f"{source} is not in the download cache, and offline mode is on", "import it once with the network"
        ) from None
    for name in listing["files"]:
        if not (directory / name).exists():
            raise PieError(
                f"{name} of {source} is not in the download cache, and offline mode is on",
                "import it once with the network",
            )
    return Checkout(directory, commit, listing["license"])


def _check_content(source: HubSource, names: list[str], files: list[_File]) -> None:
    have = {file.name for file in files}
    if not any(name.endswith(".safetensors") for name in have):
        ggufs = [name for name in names if name.endswith(".gguf")]
        hint = (
            f"download one of its GGUF files and import that: {', '.join(ggufs[:3])}"
            if ggufs
            else "choose a repository with safetensors weights"
        )
        raise PieError(f"{source} holds no *.safetensors file", hint)
    for name in ("config.json", "tokenizer.json"):
        if name not in have:
            raise PieError(
                f"{source} holds no {name}",
                "choose the original model's repository, not an adapter or a re-quantization",
            )


def _download(
    source: HubSource, file: _File, commit: str, directory: Path, token: str | None, endpoint: str | None, task: Any
) -> None:
    """Fetch one file to NAME.part, from where it stopped, check it, and give it its name."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils._headers import build_hf_headers

    url = hf_hub_url(source.repo, file.name, revision=commit, endpoint=endpoint)
    metadata = get_hf_file_metadata(url, token=token, endpoint=endpoint)
    headers = dict(build_hf_headers(token=token))
    if urllib.parse.urlsplit(metadata.location).netloc != urllib.parse.urlsplit(url).netloc:
        headers.pop("authorization", None)  # the storage server is not the hub: it must not see the token
    part = directory / f"{file.name}.part"
    with part.open("ab") as out:
        done = out.tell()
        if metadata.size is not None and done > metadata.size:
            out.truncate(0)
            done = 0
        task.advance(done)
        if done != metadata.size:
            counter: Any = _Counter(out, task)
            with _quiet():
                http_get(metadata.location, counter, resume_size=done, headers=headers, expected_size=metadata.size)
    if file.sha256 is not None:
        with part.open("rb") as stream:
            found = hashlib.file_digest(stream, "sha256").hexdigest()
        if found != file.sha256:
            part.unlink()
            raise PieError(
                f"{file.name} of {source} arrived damaged: sha256 is {found}, expected {file.sha256}",
                "it was deleted; run the import again",
            )
    part.replace(directory / file.name)


class _Counter:
    """A file that reports what is written to it."""

    def __init__(self, out: Any, task: Any) -> None:
        self._out, self._task = out, task

    def write(self, data: bytes) -> int:
        self._task.advance(len(data))
        return int(self._out.write(data))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._out, name)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the client's own progress bars: progress is ours."""
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    before = are_progress_bars_disabled()
    disable_progress_bars()
    try:
        yield
    finally:
        if not before:
            enable_progress_bars()


@contextmanager
def _naming_errors(source: HubSource) -> Iterator[None]:
    from huggingface_hub import errors

    try:
        yield
    except errors.GatedRepoError as error:
        raise PieError(
            f"{source} is gated: the hub did not give access to it",
            f"accept its terms at https://huggingface.co/{source.repo}, then set HF_TOKEN to a token of that account",
        ) from error
    except errors.RevisionNotFoundError as error:
        raise UsageError(
            f"{source.repo} has no revision {source.revision!r}", "see its branches and tags on the hub"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise UsageError(
            f"the hub has no repository {source.repo}, or it is private",
            "check the spelling; for a private one set HF_TOKEN",
        ) from error
    except errors.OfflineModeIsEnabled as error:
        raise PieError(
            f"{source} cannot be downloaded: the hub client is in offline mode",
            "unset HF_HUB_OFFLINE, or use offline mode here",
        ) from error
    except errors.HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else "?"
        hint = "HF_TOKEN is not valid" if status == 401 else "run the import again; what arrived is kept"
        raise PieError(f"the hub refused {source} with HTTP status {status}", hint) from error
    except (OSError, ConnectionError) as error:
        if isinstance(error, OSError) and error.errno is not None and not isinstance(error, ConnectionError):
            raise
        raise PieError(
            f"downloading {source} failed: {error}", "check the network; run the import again, what arrived is kept"
        ) from error
    except PieError:
        raise
    except Exception as error:  # httpx errors: its module name differs between versions of the hub client
        if not type(error).__module__.startswith("httpx"):
            raise
        raise PieError(
            f"downloading {source} failed: {error or type(error).__name__}",
            "check the network; run the import again, what arrived is kept",
        ) from error
