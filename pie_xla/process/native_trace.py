"""Tracing in a native process: the author's function under JAX, with the SDK's ops acting on tracers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pie_xla.errors import PieError
from pie_xla.eta import native


def trace(fn: Callable[[], Any], rows: tuple[int | None, ...], facts: Any) -> Any:
    """An `inferlet._host.Traced` whose program is a `NativeProgram`."""
    from inferlet._errors import author_line
    from inferlet._host import Traced
    from inferlet.eta._errors import EtaError
    from inferlet.eta._recorder import recording

    def run(recorder: Any) -> Any:
        with recording(recorder):
            return fn()

    try:
        made = native.trace(run, facts.outputs, rows, facts.vocab_size, facts.page_size, author_line())
    except PieError as error:
        raise EtaError(str(error)) from None  # the class that the same mistake has in the sandbox
    results = tuple((str(kind.dtype), kind.shape) for kind in made.program.results)
    return Traced(made.program, made.params, made.channels, results, made.program.scalar_result)
