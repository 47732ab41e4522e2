"""What a process's host needs of the rooms around it: an engine client, a tokenizer, a listener."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from pie_xla.engine.api import FromTicket, PassError, PassRequest
from pie_xla.eta.types import TensorType


class Client(Protocol):
    """What the engine gives one process (`Engine.client`)."""

    def new_set(self, model: str | None = None) -> int: ...
    def fork_set(self, ws: int) -> int: ...
    def truncate_set(self, ws: int, n: int | FromTicket) -> None: ...
    def commit_set(self, ws: int, n: int | FromTicket) -> None: ...
    def evict_set(self, ws: int, spans: Sequence[tuple[int, int]]) -> None: ...
    def publish_set(self, ws: int, name: str) -> None: ...
    def open_set(self, name: str, model: str | None = None) -> int | None: ...
    def withdraw_set(self, name: str, model: str | None = None) -> bool: ...
    def set_length(self, ws: int) -> int: ...
    def drop_set(self, ws: int) -> None: ...
    def new_pipeline(self, seed: int | None) -> int: ...
    def close_pipeline(self, pipeline: int) -> None: ...
    def cancel_pipeline(self, pipeline: int) -> None: ...
    def new_channel(self, kind: TensorType, capacity: int) -> int: ...
    def put_channel(self, channel: int, words: np.ndarray) -> None: ...
    def set_channel(self, channel: int, words: np.ndarray) -> None: ...
    def take_channel(self, channel: int) -> int: ...
    def read_channel(self, channel: int) -> int: ...
    def drop_channel(self, channel: int) -> None: ...
    def submit(self, pipeline: int, request: PassRequest) -> int: ...
    def number(self) -> int:
        """The number that the next pass would have; no pass will have it."""

    def release(self, ticket: int) -> None: ...
    def close(self) -> None: ...


Value = tuple[np.ndarray, ...] | PassError
OpenClient = Callable[[Callable[[int, Value], None]], Client]


class Language(Protocol):
    """The model's tokenizer and chat template."""

    def encode(self, text: str, specials: bool) -> Sequence[int]: ...
    def decode(self, ids: Sequence[int], skip_specials: bool) -> str: ...
    def chat(
        self, messages: list[dict[str, Any]], tools: list[Any] | None, add_generation_prompt: bool
    ) -> Sequence[int]: ...


class Sink(Protocol):
    """Where a process's words go; called on the process's thread."""

    def sent(self, text: str) -> None: ...
    def logged(self, level: int, text: str) -> None: ...


@dataclass(frozen=True)
class ModelFacts:
    """What an inferlet can ask about the model.

    Args:
        outputs: name -> (shape of one position, eta dtype).
        attention: (layers, heads, head_dim) that layer stages see; None: none.
    """

    name: str
    vocab_size: int
    max_context: int
    page_size: int
    outputs: dict[str, tuple[tuple[int, ...], str]]
    stop_tokens: tuple[int, ...]
    prefix: tuple[int, ...]
    attention: tuple[int, int, int] | None = None


@dataclass(frozen=True)
class HostModel:
    """A model as processes know it."""

    facts: ModelFacts
    language: Language
