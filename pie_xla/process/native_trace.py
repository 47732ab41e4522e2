"""Tracing in a native process: the author's function under JAX, with the SDK's ops acting on tracers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from pie_xla.errors import PieError
from pie_xla.eta import native
from pie_xla.eta.program import EtaProgram


def trace(fn: Callable[[], Any], rows: tuple[int | None, ...], facts: Any, stages: Any = None) -> Any:
    """An `inferlet._host.Traced` whose program is a `NativeProgram`.

    A pass with layer stages is recorded as in the sandbox: its functions take the language's ops, and no `jnp` code.
    """
    from inferlet._errors import author_line
    from inferlet._host import Traced
    from inferlet.eta._errors import EtaError
    from inferlet.eta._recorder import recording

    if stages is not None:
        from inferlet.eta._trace import record

        recorded = record(fn, rows, facts, stages)
        return replace(recorded, program=EtaProgram.from_json(recorded.program))

    def run(recorder: Any) -> Any:
        with recording(recorder):
            return fn()

    try:
        made = native.trace(run, facts.outputs, rows, facts.vocab_size, facts.page_size, author_line())
    except PieError as error:
        raise EtaError(str(error)) from None  # the class that the same mistake has in the sandbox
    results = tuple((str(kind.dtype), kind.shape) for kind in made.program.results)
    return Traced(made.program, made.params, made.channels, results, made.program.scalar_result)
