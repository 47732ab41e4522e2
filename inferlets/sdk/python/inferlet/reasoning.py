"""Thoughts and answers: a model's text between `<think>` and `</think>` told apart from the rest, while it streams."""

from __future__ import annotations

from dataclasses import dataclass

from inferlet._stops import StopStrings


@dataclass(frozen=True)
class Piece:
    """Text that is certain now. Either may be empty."""

    thought: str = ""
    answer: str = ""


class Splitter:
    """Pieces of text in, thoughts and answers out.

    Args:
        begin, end: what thoughts stand between.
        is_thinking: whether the text begins inside a thought (templates that end with the begin mark).
    """

    def __init__(self, begin: str = "<think>", end: str = "</think>", is_thinking: bool = False) -> None:
        self._marks = (begin, end)
        self.is_thinking = is_thinking
        self._watch = StopStrings([self._mark])

    @property
    def _mark(self) -> str:
        return self._marks[self.is_thinking]

    def push(self, text: str) -> Piece:
        """What is certain after this text."""
        said = {True: "", False: ""}
        said[self.is_thinking] += self._watch.push(text)
        while self._watch.found is not None:
            rest = self._watch.rest
            self.is_thinking = not self.is_thinking
            self._watch = StopStrings([self._mark])
            said[self.is_thinking] += self._watch.push(rest)
        return Piece(said[True], said[False])

    def finish(self) -> Piece:
        """What was held back; a thought that never ended stays a thought."""
        text = self._watch.finish()
        return Piece(thought=text) if self.is_thinking else Piece(answer=text)
