"""The compiled language component on disk: found in 4 ms, built when it is missing or damaged.

The cached file is native code that is mapped and run, so its directory is the user's alone (0700), a file appears there
by rename only, and its size, time and digest are kept beside it.
"""

from __future__ import annotations

import enum
import fcntl
import hashlib
import json
import os
import queue
import shutil
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import wasmtime
from wasmtime.component import Component

from pie_xla.errors import PieError
from pie_xla.process.wasm import engine_config
from pie_xla.process.wasm.build import Sources, build_component, componentize_version, shipped
from pie_xla.progress import Progress

# Every change of the SDK makes another pair of files of 35 and 50 MB.
_KEEP = 3
_STALE_SECONDS = 3600.0


def ensure_component(
    engine: wasmtime.Engine,
    cache_dir: Path,
    progress: Progress,
    sources: Sources | None = None,
    verify: Callable[[Component], None] | None = None,
) -> Component:
    """The Python language component, compiled for this machine; built (15 s) and compiled (5 s) once, then cached.

    Several processes may ask at once: one builds, the others wait for it.

    Args:
        verify: a self test, run once for each compiled component before it is entered in the cache; raises on failure.

    Raises:
        PieError: the cache directory belongs to somebody else, the disk is full, or a build step failed.
    """
    sources = sources or Sources.default()
    directory = _private(cache_dir / "component")
    ready = shipped(sources)
    key = sources.key() if ready else f"{sources.key()}-{_short(componentize_version())}"
    compiled = directory / f"python-{key}-{_short(engine_config.fingerprint())}.cwasm"
    found = _load(engine, compiled)
    if isinstance(found, Component):
        return found
    try:
        with _locked(directory / "lock"):
            found = _load(engine, compiled)  # another process may have built it meanwhile
            if isinstance(found, Component):
                return found
            if found is _Absent.DAMAGED:
                progress.note(f"the compiled language component {compiled.name} is damaged and is made again")
            _sweep(directory)
            wasm = ready or directory / f"python-{key}.wasm"
            component = _compile_cached(engine, wasm, compiled, sources, progress, ready is not None)
            if verify is not None:
                verify(component)
            _write_manifest(compiled)
            _forget_old(directory)
            return component
    except OSError as error:
        raise PieError(
            f"the language component cannot be stored in {directory}: {error.strerror or error}",
            "free some space (about 150 MB) or set another cache directory",
        ) from error


def _compile_cached(
    engine: wasmtime.Engine, wasm: Path, compiled: Path, sources: Sources, progress: Progress, is_shipped: bool
) -> Component:
    if not wasm.is_file():
        build_component(sources, wasm, progress)
    try:
        with progress.task("compiling the Python language component (once)"):
            data = _compile(engine, wasm)
    except wasmtime.WasmtimeError as error:
        if is_shipped:
            raise PieError(f"the language component in {wasm} is damaged: {error}", "install pie-xla again") from error
        progress.note(f"the cached language component {wasm.name} is damaged and is built again")
        wasm.unlink()
        build_component(sources, wasm, progress)
        data = _compile(engine, wasm)
    with _replacing(compiled) as temporary:
        temporary.write_bytes(data)
    return Component.deserialize_file(engine, str(compiled))


def _compile(engine: wasmtime.Engine, wasm: Path) -> bytes:
    """Machine code for a component; on a thread of its own, since a native call here would keep Ctrl-C waiting."""
    answers: queue.SimpleQueue[bytes | BaseException] = queue.SimpleQueue()

    def work() -> None:
        try:
            answers.put(bytes(Component(engine, wasm.read_bytes()).serialize()))
        except BaseException as error:
            answers.put(error)

    threading.Thread(target=work, name="pie-cranelift", daemon=True).start()
    answer = answers.get()
    if isinstance(answer, BaseException):
        raise answer
    return answer


# -- the compiled file and its manifest --------------------------------------------------------------------------------


def _manifest(compiled: Path) -> Path:
    return compiled.with_suffix(".json")


def _write_manifest(compiled: Path) -> None:
    facts = compiled.stat()
    entry = {"bytes": facts.st_size, "mtime_ns": facts.st_mtime_ns, "sha256": _digest(compiled)}
    with _replacing(_manifest(compiled)) as temporary:
        temporary.write_text(json.dumps(entry))


class _Absent(enum.Enum):
    """Why there is no compiled component."""

    MISSING = enum.auto()
    DAMAGED = enum.auto()


def _load(engine: wasmtime.Engine, compiled: Path) -> Component | _Absent:
    if not compiled.is_file():
        return _Absent.MISSING
    try:
        entry = json.loads(_manifest(compiled).read_text())
        facts = compiled.stat()
        intact = facts.st_size == entry["bytes"]
        if intact and facts.st_mtime_ns != entry["mtime_ns"]:  # touched, or copied from elsewhere
            intact = _digest(compiled) == entry["sha256"]
            if intact:
                _write_manifest(compiled)
        if intact:
            component = Component.deserialize_file(engine, str(compiled))
            with suppress(OSError):
                os.utime(_manifest(compiled))  # used now
            return component
    except FileNotFoundError:
        return _Absent.MISSING  # not finished: its self test did not pass, or it was interrupted
    except (OSError, ValueError, KeyError, TypeError, wasmtime.WasmtimeError):
        pass
    return _Absent.DAMAGED


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


# -- the directory -----------------------------------------------------------------------------------------------------


def _private(directory: Path) -> Path:
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        facts = directory.stat()
        if facts.st_uid != os.getuid():
            raise PieError(
                f"{directory} belongs to another user; code from there would run as you",
                "set another cache directory",
            )
        if stat.S_IMODE(facts.st_mode) != 0o700:
            directory.chmod(0o700)
    except OSError as error:
        raise PieError(f"the cache directory {directory} cannot be used: {error.strerror or error}") from error
    return directory


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # released when the file is closed, also by a crash
        yield


@contextmanager
def _replacing(target: Path) -> Iterator[Path]:
    """A temporary file beside `target` that takes its place at the end, and is gone after a failure."""
    handle, name = tempfile.mkstemp(prefix=".new-", dir=target.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


def _sweep(directory: Path) -> None:
    """Remove what killed builders left; the caller holds the lock."""
    for path in directory.glob("build-*"):
        shutil.rmtree(path, ignore_errors=True)
    for path in directory.glob(".new-*"):
        if time.time() - path.stat().st_mtime > _STALE_SECONDS:  # a younger one may be somebody's manifest
            path.unlink(missing_ok=True)


def _forget_old(directory: Path) -> None:
    """Keep the components that were used last; `_load` touches their manifests."""
    compiled = sorted(directory.glob("python-*.cwasm"), key=_last_use, reverse=True)
    for path in compiled[_KEEP:]:
        path.unlink(missing_ok=True)
        _manifest(path).unlink(missing_ok=True)
    for path in directory.glob("python-*.wasm"):
        if not any(kept.name.startswith(path.stem) for kept in compiled[:_KEEP]):
            path.unlink(missing_ok=True)


def _last_use(compiled: Path) -> int:
    manifest = _manifest(compiled)
    return (manifest if manifest.is_file() else compiled).stat().st_mtime_ns
