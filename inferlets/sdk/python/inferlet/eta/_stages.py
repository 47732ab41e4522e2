"""Stages of a pass: when the author's functions run, and what a channel may see in each."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from enum import Enum
from typing import Any

from inferlet.eta._errors import EtaError


class Stage(Enum):
    """When ops run; in this order, the middle two once per attention layer."""

    PROLOGUE = "prologue"
    PROJ = "on_attn_proj"
    ATTN = "on_attn"
    EPILOGUE = "epilogue"

    @property
    def layered(self) -> bool:
        return self in (Stage.PROJ, Stage.ATTN)


# Where each thing that the model shows may be used.
SHOWN = {
    "layer": (Stage.PROJ, Stage.ATTN),
    "query": (Stage.PROJ, Stage.ATTN),
    "bound": (Stage.PROJ,),
    "pages": (Stage.PROJ,),
    "score": (Stage.ATTN,),
}


@dataclass(frozen=True)
class Stages:
    """The author's functions before the epilogue, and what they are recorded for.

    Args:
        fns: by stage, in order; without the epilogue.
        width: C, the positions that scores and pages span. page: positions per page.
        heads: (H, d), query heads and the numbers of one.
    """

    fns: tuple[tuple[Stage, Callable[[], Any]], ...]
    width: int
    page: int
    heads: tuple[int, int]

    @property
    def pages(self) -> int:
        """J, the pages of C positions."""
        return -(-self.width // self.page)


_EARLY: ContextVar[bool] = ContextVar("inferlet_before_the_model", default=False)


def before_the_model() -> bool:
    """Whether a prologue is being recorded."""
    return _EARLY.get()


def preceded(prologue: Callable[[], Any], epilogue: Callable[[], Any]) -> Callable[[], Any]:
    """Both as one epilogue: what comes before the model and sees nothing of it may as well come after."""

    def both() -> Any:
        token = _EARLY.set(True)
        try:
            made = prologue()
        finally:
            _EARLY.reset(token)
        if made is not None:
            raise EtaError(f"prologue gives back nothing: put what should stay into a Channel, got {made!r:.60}")
        return epilogue()

    return both


class Held(Enum):
    """What a pass finds in a channel."""

    FRONT = "front"  # the channel's own front cell
    GONE = "taken from"
    PENDING = "put to"  # in this pass


class Traffic:
    """What a program has done with one channel so far: in each stage one take, then one put.

    A later stage, and the next layer's same one, finds what was put before.
    """

    __slots__ = ("held", "since")

    def __init__(self) -> None:
        self.held = Held.FRONT
        self.since: Stage | None = None

    def take(self, stage: Stage) -> None:
        if self.held is Held.GONE or (self.held is Held.PENDING and self.since is stage):
            raise EtaError(f"this channel was already {self.held.value} in this pass: take once, before put")
        self.held = Held.GONE

    def put(self, stage: Stage) -> None:
        if self.held is Held.PENDING and (self.since is stage or not stage.layered):
            raise EtaError("this channel was already put to in this pass: put once")
        self.held, self.since = Held.PENDING, stage
