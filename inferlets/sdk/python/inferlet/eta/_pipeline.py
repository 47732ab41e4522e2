"""Pipeline: the lane that passes are submitted on."""

from __future__ import annotations

from collections import deque
from types import TracebackType
from typing import Any

from inferlet._errors import UsageError, author_line
from inferlet._host import Shot, runtime
from inferlet.eta._output import Done
from inferlet.eta._pass import ForwardPass


class Pipeline:
    """A domain for closing, cancelling and failing. `submit` returns at once; any number of passes may be in flight.

    Args:
        seed: what random ops draw from (0 to 2**64 - 1); None takes one from the system. The same seed and the same
            submits give the same values, alone or batched, sandboxed or native.
    """

    __slots__ = ("_handle", "_open", "_runtime", "seed")

    def __init__(self, seed: int | None = None) -> None:
        self._open = False
        if seed is not None and (type(seed) is not int or not 0 <= seed < 1 << 64):
            raise UsageError(f"Pipeline seed {seed!r}: an int from 0 to 2**64 - 1, or None")
        self.seed = seed
        self._runtime = runtime()
        self._runtime.sweep()
        self._handle = self._runtime.transport.new_pipeline(seed)
        self._open = True

    def submit(self, fwd: ForwardPass) -> Any:
        """Send the pass on its way.

        Returns:
            the Output(s) of this submit (a tuple when the epilogue returns one); without any an awaitable
            that ends when the pass has run.
        Raises:
            UsageError: what the pass lacks, at this line. RefusedError: the host's limits.
        """
        shot = self._send(fwd)
        epilogue = fwd._epilogue
        if epilogue is None or not epilogue.outputs:
            return Done(shot)
        if epilogue.traced.scalar:
            return epilogue.outputs[0]._at(shot)
        return tuple(output._at(shot) for output in epilogue.outputs)

    def run_ahead(self, fwd: ForwardPass, count: int, depth: int = 4) -> RunAhead:
        """Submit `fwd` `count` times, up to `depth` in flight from now on: `async for value in pipe.run_ahead(fwd,
        20)`.

        A convenience over `submit`. The pass should feed itself, from its own Output or from a Channel. Leaving the
        loop early leaves up to `depth - 1` further passes in flight: `cancel()` drops them.
        """
        if type(count) is not int or count < 0 or type(depth) is not int or depth < 1:
            raise UsageError(f"run_ahead: count {count!r} is an int of at least 0 and depth {depth!r} of at least 1")
        return RunAhead(self, fwd, count, depth)

    def close(self) -> None:
        """No more submits; what was submitted finishes."""
        self._end(cancel=False)

    def cancel(self) -> None:
        """No more submits; what no step has taken is dropped and what is in flight is discarded (`PassError` at its
        await).
        """
        self._end(cancel=True)

    def _end(self, cancel: bool) -> None:
        if self._open or cancel:
            self._open = False
            self._runtime.transport.close_pipeline(self._handle, cancel)

    def _send(self, fwd: ForwardPass) -> Shot:
        if not isinstance(fwd, ForwardPass):
            raise UsageError(f"submit takes a ForwardPass, not {type(fwd).__name__}")
        if not self._open:
            raise UsageError("submit on a closed pipeline: make a new Pipeline()")
        owner = self._runtime
        rows, counts = fwd._ready_rows()
        prepared = fwd._fixed()
        owner.sweep()
        shot = owner.shot(owner.transport.submit(self._handle, rows, prepared, author_line(), owner.dropped()))
        for ws, count, geometry in zip(fwd._sets, counts, fwd._geometries, strict=True):
            if geometry.kind != "read":
                ws._append(count, tentative=geometry.kind == "buffer")
        if fwd._epilogue is not None:
            for output in fwd._epilogue.outputs:
                output._shot = shot
        return shot

    async def __aenter__(self) -> Pipeline:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end(cancel=kind is not None)

    def __repr__(self) -> str:
        return f"Pipeline({'open' if self._open else 'closed'})"

    def __del__(self) -> None:
        if self._open:
            owner, handle = self._runtime, self._handle
            owner.discard(lambda: owner.transport.close_pipeline(handle, False))


class RunAhead:
    """The async iterator of `Pipeline.run_ahead`."""

    def __init__(self, pipe: Pipeline, fwd: ForwardPass, count: int, depth: int) -> None:
        self._pipe, self._fwd, self._left, self._depth = pipe, fwd, count, depth
        self._flying: deque[Any] = deque()
        self._fill()

    def _fill(self) -> None:
        while self._left and len(self._flying) < self._depth:
            self._flying.append(self._pipe.submit(self._fwd))
            self._left -= 1

    def __aiter__(self) -> RunAhead:
        return self

    async def __anext__(self) -> Any:
        self._fill()
        if not self._flying:
            raise StopAsyncIteration
        oldest = self._flying.popleft()
        if isinstance(oldest, tuple):
            return tuple([await output for output in oldest])
        return await oldest
