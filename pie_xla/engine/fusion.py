"""Fused steps are compiled in another process: XLA in a thread of this one slows every neighbour by four fifths (measured).

The process lowers the model from its recipe, without weights, and leaves a serialized executable in the store. It is niced, and there is
one at a time.
"""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import jax

from pie_xla.engine.api import EngineOptions, Recipe
from pie_xla.engine.buckets import Bucket
from pie_xla.engine.executables import ExecutableStore
from pie_xla.engine.programs import ProgramEntry, ProgramTable

Done = Callable[[ProgramEntry, Bucket, bool], None]


class FusionService:
    """Queues fused compiles; `done(entry, bucket, ok)` is called when one has ended.

    Without a store to hand executables over, without a recipe, or for a program that has no serialized form, nothing is fused.
    """

    def __init__(
        self,
        recipe: Recipe | None,
        store: ExecutableStore,
        units: dict[str, int],
        options: EngineOptions,
        max_context: int,
        done: Done,
    ) -> None:
        self._recipe = recipe
        self._store = store
        self._units = units
        self._options = options
        self._max_context = max_context
        self._done = done
        self._jobs: queue.SimpleQueue[tuple[ProgramEntry, Bucket] | None] = queue.SimpleQueue()
        self._child: subprocess.Popen[bytes] | None = None
        self._closed = False
        self._thread: threading.Thread | None = None
        self.failures: list[str] = []

    def request(self, entry: ProgramEntry, bucket: Bucket) -> None:
        """Called on the engine's thread when a program has filled enough launches alone."""
        entry.fusing.add(bucket)
        if self._recipe is None or self._store.path(ProgramTable.fused_key(entry.program, bucket)) is None:
            return
        if serialized_form(entry.program) is None:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="pie-fusion", daemon=True)
            self._thread.start()
        self._jobs.put((entry, bucket))

    def close(self) -> None:
        self._closed = True
        self._jobs.put(None)
        child = self._child
        if child is not None and child.poll() is None:
            child.kill()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None and not self._closed:
            entry, bucket = job
            path = self._store.path(ProgramTable.fused_key(entry.program, bucket))
            assert path is not None and self._recipe is not None
            ok = path.exists() or self._compile(entry, bucket, str(path))
            if not self._closed:
                self._done(entry, bucket, ok)

    def _compile(self, entry: ProgramEntry, bucket: Bucket, path: str) -> bool:
        job: dict[str, Any] = {
            "recipe": asdict(self._recipe) if self._recipe else None,
            "units": self._units,
            "word_count": self._options.word_count,
            "max_context": self._max_context,
            "bucket": [bucket.rows, bucket.tokens, bucket.readouts],
            "program": serialized_form(entry.program),
            "path": path,
            "platform": jax.devices()[0].platform,
        }
        self._child = subprocess.Popen(
            [sys.executable, "-m", "pie_xla.engine.fuse_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        _, said = self._child.communicate(json.dumps(job).encode())
        if self._child.returncode != 0 and not self._closed:
            self.failures.append(
                said.decode(errors="replace").strip().splitlines()[-1] if said else "the compile process died"
            )
        return self._child.returncode == 0


def serialized_form(program: Any) -> str | None:
    """What another process can rebuild the program from: its canonical JSON; None for a native program, which stays unfused."""
    from pie_xla.eta.program import EtaProgram

    return program.text if isinstance(program, EtaProgram) else None
