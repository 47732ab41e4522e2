"""Pipeline: the lane that passes are submitted on."""

from __future__ import annotations

from collections import deque
from types import TracebackType
from typing import Any

from inferlet._errors import InferletError, UsageError, author_line
from inferlet._host import runtime
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
        return self._send(fwd, 1)[0]

    def run_ahead(self, fwd: ForwardPass, count: int, depth: int = 4) -> RunAhead:
        """Submit `fwd` `count` times, up to `depth` in flight from now on: `async for value in pipe.run_ahead(fwd,
        20)`.

        A convenience over `submit`: it sends about half of `depth` passes in one call to the host. The pass should feed
        itself, from its own Output or from a Channel. Leaving the loop early leaves up to `depth - 1` further passes in
        flight: `cancel()` drops them.
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

    def _send(self, fwd: ForwardPass, times: int) -> list[Any]:
        """Submit it so many times; what each submit gives the author."""
        if not isinstance(fwd, ForwardPass):
            raise UsageError(f"submit takes a ForwardPass, not {type(fwd).__name__}")
        if not self._open:
            raise UsageError("submit on a closed pipeline: make a new Pipeline()")
        owner = self._runtime
        rows, counts = fwd._ready_rows(times)
        prepared = fwd._fixed()
        owner.sweep()
        first = owner.transport.submit(self._handle, rows, prepared, author_line(), owner.dropped(), times)
        shots = [owner.shot(first + 2 * i) for i in range(times)]
        for ws, count, geometry in zip(fwd._sets, counts, fwd._geometries, strict=True):
            if geometry.kind != "read":
                ws._append(count * times, tentative=geometry.kind == "buffer")
        epilogue = fwd._epilogue
        if epilogue is None or not epilogue.outputs:
            return [Done(shot) for shot in shots]
        for output in epilogue.outputs:
            output._shot = shots[-1]
        if epilogue.traced.scalar:
            return [epilogue.outputs[0]._at(shot) for shot in shots]
        return [tuple([output._at(shot) for output in epilogue.outputs]) for shot in shots]

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


_AT_ONCE = 32  # submits in one call to the host


class RunAhead:
    """The async iterator of `Pipeline.run_ahead`."""

    def __init__(self, pipe: Pipeline, fwd: ForwardPass, count: int, depth: int) -> None:
        self._pipe, self._fwd, self._left, self._depth = pipe, fwd, count, depth
        self._flying: deque[Any] = deque()
        self._refused: InferletError | None = None
        self._fill()

    def _fill(self) -> None:
        flying = len(self._flying)
        if not self._left or flying > self._depth // 2 or self._refused is not None:
            return
        times = min(self._left, self._depth - flying, _AT_ONCE)
        if times > 1 and not self._fwd._repeats(times):
            times = 1
        try:
            self._flying.extend(self._pipe._send(self._fwd, times))
        except InferletError as error:
            if not flying:
                raise
            self._refused = error  # what is underway comes first
        self._left -= times

    def __aiter__(self) -> RunAhead:
        return self

    async def __anext__(self) -> Any:
        self._fill()
        if not self._flying:
            if self._refused is not None:
                raise self._refused
            raise StopAsyncIteration
        oldest = self._flying.popleft()
        if isinstance(oldest, tuple):
            return tuple([await output for output in oldest])
        return await oldest
