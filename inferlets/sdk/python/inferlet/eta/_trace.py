"""Tracing in the sandbox: an epilogue becomes the program's text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from inferlet._host import Facts, Traced
from inferlet.eta import _recorder
from inferlet.eta._stages import Stages


def record(fn: Callable[[], Any], rows: tuple[int | None, ...], facts: Facts, stages: Stages | None = None) -> Traced:
    """Run an epilogue, and the stages before it, once and record them.

    `rows` holds each row's number of readout positions, None for the last.
    """
    made = _recorder.trace(fn, dict(facts.outputs), rows, facts.vocab_size, facts.page_size, stages)
    return Traced(made.text, made.params, made.channels, made.results, made.scalar_result)
