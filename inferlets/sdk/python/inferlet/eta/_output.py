"""Output: the value of an epilogue."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from inferlet._errors import UsageError
from inferlet._host import Shot


class Output:
    """One value computed on the device: await it on the host, or embed it in another pass without waiting.

    The Output that `ForwardPass.epilogue` returns stands for the *last* submit of its pass; the one that
    `Pipeline.submit` returns is of that submit for good. Awaiting gives int, float or bool for a scalar and nested
    lists for an array; the same again each time. `PassError` is raised when the pass failed.

    Attributes:
        dtype: "f32", "i32", "u32" or "bool".
        shape: its dimensions; () for a scalar.
    """

    __slots__ = ("__weakref__", "_index", "_shot", "dtype", "shape")

    def __init__(self, index: int, dtype: str, shape: tuple[int, ...], shot: Shot | None = None) -> None:
        self._index, self.dtype, self.shape, self._shot = index, dtype, shape, shot

    def __await__(self) -> Generator[Any, None, Any]:
        # the shot is taken now: a later submit of the same pass does not change what this await gives
        shot = self._shot
        if shot is None:
            raise UsageError("this Output was never submitted: call `pipe.submit(fwd)` before awaiting it")
        if not shot.done:
            yield from shot.arrived().__await__()
        return plain(shot.value()[self._index], self.dtype == "f32")

    def _at(self, shot: Shot) -> Output:
        return Output(self._index, self.dtype, self.shape, shot)

    @property
    def _source(self) -> tuple[Shot, int]:
        if self._shot is None:
            raise UsageError("this pass embeds an Output that was never submitted: submit the pass it comes from first")
        return self._shot, self._index

    def __bool__(self) -> bool:
        raise UsageError("an Output has no truth value on the host: `await` it first")

    def _compared(self, other: object) -> bool:
        # Two Outputs too: whether they are one object says nothing of their values.
        raise UsageError(
            "an Output cannot be compared on the host: `await` it first (`a is b` tells whether two names mean one Output)"
        )

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _compared  # type: ignore[assignment]
    __hash__ = object.__hash__

    def __repr__(self) -> str:
        state = "not submitted" if self._shot is None else "here" if self._shot.done else "in flight"
        return f"Output({self.dtype}{list(self.shape)}, {state})"


class Done:
    """What submitting a pass without an epilogue gives: awaitable, None when the pass has run."""

    __slots__ = ("_shot",)

    def __init__(self, shot: Shot) -> None:
        self._shot = shot

    def __await__(self) -> Generator[Any, None, None]:
        if not self._shot.done:
            yield from self._shot.arrived().__await__()
        self._shot.value()


def plain(value: Any, is_float: bool) -> Any:
    """A result as the author's own: fresh lists, so that changing one changes nothing else; "nan" and "inf" as
    floats.
    """
    if isinstance(value, list):
        return [plain(item, is_float) for item in value]
    return float(value) if is_float else value
