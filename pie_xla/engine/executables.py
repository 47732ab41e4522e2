"""The table of executables, in memory and on disk.

Calling a compiled executable with another shape raises, so a table of them cannot recompile silently: whatever is not in the table was
not planned, and is counted by name. On disk they are serialized machine code, read only from a directory of the user's own.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import platform
import stat
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jaxlib.version

from pie_xla.engine.steps import Compilable
from pie_xla.errors import PieError


@dataclass(frozen=True)
class Key:
    """Identity of an executable within one engine: what it is, of which program, for which shape."""

    kind: str
    program: str
    shape: str

    def __str__(self) -> str:
        return " ".join(part for part in (self.kind, self.program[:12], self.shape) if part)


def compile_now(work: Compilable) -> Any:
    return jax.jit(work.fn, donate_argnums=work.donate).lower(*work.args).compile()


class ExecutableStore:
    """Serialized executables in one private directory (mode 0700); None keeps nothing.

    `devices` are those that executables run on: all of a mesh, or the one that holds the model. `limit`: most bytes kept; those not
    used for longest go first.

    The file name is a digest of all that decides machine code: versions, device kind, CPU features, the engine's own key and the
    executable's.
    """

    def __init__(
        self, root: Path | None, engine_key: str, devices: Sequence[jax.Device], limit: int | None = None
    ) -> None:
        self._root = root
        self._limit = limit
        self._devices = list(devices)
        self._engine_key = engine_key
        if root is not None:
            root.mkdir(parents=True, exist_ok=True, mode=0o700)
            mode = root.stat()
            if mode.st_uid != os.getuid() or mode.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                raise PieError(
                    f"the executable cache {root} can be written by others, and its files are machine code",
                    "make it yours alone: chmod 700, or choose another [cache] dir",
                )
        self._host = "|".join((jax.__version__, jaxlib.version.__version__, _device_identity()))

    def path(self, key: Key) -> Path | None:
        if self._root is None:
            return None
        text = "|".join((self._host, self._engine_key, key.kind, key.program, key.shape))
        return self._root / f"{key.kind}-{hashlib.sha256(text.encode()).hexdigest()[:40]}.xla"

    def load(self, key: Key) -> Any | None:
        path = self.path(key)
        if path is None or not path.exists():
            return None
        from jax.experimental.serialize_executable import deserialize_and_load

        try:
            payload, in_tree, out_tree = pickle.loads(path.read_bytes())
            os.utime(path)  # used now, whatever the mount notes of it
            return deserialize_and_load(payload, in_tree, out_tree, execution_devices=self._devices)
        except Exception:  # a damaged or foreign file costs a compile, nothing more
            path.unlink(missing_ok=True)
            return None

    def save(self, key: Key, executable: Any) -> None:
        path = self.path(key)
        if path is None:
            return
        from jax.experimental.serialize_executable import serialize

        temporary = path.with_suffix(f".{os.getpid()}.{threading.get_ident()}.tmp")
        try:
            temporary.write_bytes(pickle.dumps(serialize(executable)))
            temporary.replace(path)
        except OSError:  # a full disk costs the next start a compile
            temporary.unlink(missing_ok=True)
            return
        self.prune(path)

    def prune(self, latest: Path | None = None) -> int:
        """Delete what was not used for longest until the limit holds, but never `latest`; the bytes deleted. Other processes may do
        the same."""
        if self._root is None or self._limit is None:
            return 0
        found = []
        for path in self._root.glob("*.xla"):
            try:
                facts = path.stat()
            except FileNotFoundError:
                continue
            found.append((facts.st_mtime, facts.st_size, path))
        kept = sum(size for _, size, _ in found)
        deleted = 0
        for _, size, path in sorted(found):
            if kept - deleted <= self._limit:
                break
            if path != latest:
                path.unlink(missing_ok=True)
                deleted += size
        return deleted


class ExecutableTable:
    """Key -> executable. `get` is for the step path and never compiles; `build` compiles and is for everyone else."""

    def __init__(self, store: ExecutableStore) -> None:
        self._store = store
        self._ready: dict[Key, Any] = {}
        self._locks: dict[Key, threading.Lock] = {}
        self._guard = threading.Lock()
        self.compiled: Counter[str] = Counter()
        self.loaded: Counter[str] = Counter()
        self.misses: Counter[str] = Counter()  # compiled on the step path: a planning error
        self.seconds = 0.0

    def get(self, key: Key) -> Any | None:
        return self._ready.get(key)

    def planned(self, key: Key) -> Any:
        """An executable that whoever asks knows to be there."""
        return self._ready[key]

    def keys(self) -> list[Key]:
        return list(self._ready)

    def discard(self, key: Key) -> None:
        """Forget an executable that nobody will launch or build now; it stays on disk."""
        self._ready.pop(key, None)
        self._locks.pop(key, None)

    def build(self, key: Key, work: Callable[[], Compilable]) -> Any:
        """The executable: from memory, from disk, or compiled in this thread. Concurrent callers of one key wait for the first."""
        with self._guard:
            lock = self._locks.setdefault(key, threading.Lock())
        with lock:
            found = self._ready.get(key)
            if found is not None:
                return found
            started = time.perf_counter()
            found = self._store.load(key)
            if found is not None:
                self.loaded[key.kind] += 1
            else:
                found = compile_now(work())
                self.compiled[key.kind] += 1
                self._store.save(key, found)
            self.seconds += time.perf_counter() - started
            self._ready[key] = found
            return found

    def adopt(self, key: Key) -> bool:
        """Take an executable that a compile process has put in the store."""
        found = self._store.load(key)
        if found is None:
            return False
        self._store.prune(self._store.path(key))
        self.loaded[key.kind] += 1
        self._ready[key] = found
        return True

    def build_on_step_path(self, key: Key, work: Callable[[], Compilable]) -> Any:
        """For small moves of sizes nobody announced: built at once, and counted as a miss."""
        found = self._ready.get(key)
        if found is None:
            self.misses[str(key)] += 1
            found = self.build(key, work)
        return found


def _device_identity() -> str:
    device = jax.devices()[0]
    parts = [device.platform, device.device_kind, str(jax.device_count()), platform.machine()]
    if device.platform == "cpu":
        parts.append(_cpu_features())
    return "|".join(parts)


def _cpu_features() -> str:
    """XLA:CPU code of one machine can stop another with an illegal instruction."""
    try:
        with open("/proc/cpuinfo") as info:
            wanted = sorted({line.strip() for line in info if line.startswith(("model name", "flags"))})
    except OSError:
        wanted = [platform.processor()]
    return hashlib.sha256("\n".join(wanted).encode()).hexdigest()[:16]
