"""Steps with programs in them are compiled in other processes: XLA in a thread of this one slows every neighbour by four fifths (measured).

A process lowers the model from its recipe, without weights, and leaves a serialized executable in the store. It is niced. Fused steps are
compiled one at a time, behind the scenes; passes wait for steps with layer stages, so those are compiled when asked for.
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
from pie_xla.eta.types import Program

Done = Callable[[ProgramEntry, Bucket, bool], None]
FUSED_NICE = 19  # whoever waits for tokens comes first
TAPPED_NICE = 10  # as compile threads: a program waits for it


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
        self._children: set[subprocess.Popen[bytes]] = set()
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
        for child in list(self._children):
            if child.poll() is None:
                child.kill()

    def tapped(self, program: Program, bucket: Bucket) -> None:
        """Compile a step with a program's layer stages into the store, and wait for it; where that cannot be, the caller compiles."""
        path = self._store.path(ProgramTable.tapped_key(program, bucket))
        if self._recipe is None or path is None or path.exists() or serialized_form(program) is None:
            return
        self._compile(program, bucket, str(path), TAPPED_NICE)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None and not self._closed:
            entry, bucket = job
            path = self._store.path(ProgramTable.fused_key(entry.program, bucket))
            assert path is not None and self._recipe is not None
            ok = path.exists() or self._compile(entry.program, bucket, str(path), FUSED_NICE)
            if not self._closed:
                self._done(entry, bucket, ok)

    def _compile(self, program: Program, bucket: Bucket, path: str, nice: int) -> bool:
        job: dict[str, Any] = {
            "recipe": asdict(self._recipe) if self._recipe else None,
            "units": self._units,
            "word_count": self._options.word_count,
            "max_context": self._max_context,
            "bucket": [bucket.rows, bucket.tokens, bucket.readouts, bucket.masked],
            "program": serialized_form(program),
            "nice": nice,
            "path": path,
            "platform": jax.devices()[0].platform,
        }
        child = subprocess.Popen(
            [sys.executable, "-m", "pie_xla.engine.fuse_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        self._children.add(child)
        if self._closed:  # meanwhile
            child.kill()
        _, said = child.communicate(json.dumps(job).encode())
        self._children.discard(child)
        if child.returncode != 0 and not self._closed:
            self.failures.append(
                said.decode(errors="replace").strip().splitlines()[-1] if said else "the compile process died"
            )
        return child.returncode == 0


def serialized_form(program: Any) -> str | None:
    """What another process can rebuild the program from: its canonical JSON; None for a native program, which stays unfused."""
    from pie_xla.eta.program import EtaProgram

    return program.text if isinstance(program, EtaProgram) else None
