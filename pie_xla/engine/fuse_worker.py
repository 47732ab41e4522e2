"""`python -m pie_xla.engine.fuse_worker`: compile one step with a program in it from a job on standard input into the executable store."""

from __future__ import annotations

import json
import os
import pickle
import sys
import threading
from pathlib import Path
from typing import Any


def main() -> None:
    job = json.load(sys.stdin)
    os.nice(job["nice"])
    failure: list[BaseException] = []

    def work() -> None:
        try:
            _compile(job)
        except BaseException as error:
            failure.append(error)

    threading.stack_size(64 << 20)  # XLA recurses deeper than a default thread allows
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if failure:
        raise failure[0]


def _compile(job: dict[str, Any]) -> None:
    import jax
    from jax.experimental.serialize_executable import serialize

    jax.config.update("jax_platforms", job["platform"])  # the parent's choice; the environment may offer others

    from pie_xla.engine.api import Recipe
    from pie_xla.engine.buckets import Bucket
    from pie_xla.engine.executables import compile_now
    from pie_xla.engine.lowering import lower_recipe
    from pie_xla.engine.steps import StepShapes
    from pie_xla.eta.program import EtaProgram

    lowered = lower_recipe(Recipe(**job["recipe"]))
    params = {name: leaf.struct for name, leaf in lowered.params.items()}
    state = {g.name: {k: leaf.struct for k, leaf in g.arrays(job["units"][g.name]).items()} for g in lowered.groups}
    shapes = StepShapes(lowered, job["units"], job["word_count"], job["max_context"], (params, state))
    program, bucket = EtaProgram.from_json(job["program"]), Bucket(*job["bucket"])
    work = shapes.fused(program, bucket) if program.stages is None else shapes.tapped(program, bucket)
    executable = compile_now(work)
    path = Path(job["path"])
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_bytes(pickle.dumps(serialize(executable)))
    temporary.replace(path)


if __name__ == "__main__":
    main()
