"""Stop strings in text that comes in pieces."""

from __future__ import annotations

from collections.abc import Iterable


class StopStrings:
    """Gives text on as long as no stop string can be in it.

    Attributes:
        found: the stop string that was met first, None so far.
        rest: the text that came after it in the same piece.
    """

    def __init__(self, strings: Iterable[str]) -> None:
        self._strings = list(strings)
        self._held = ""
        self.found: str | None = None
        self.rest = ""

    def push(self, piece: str) -> str:
        """Text that is certain now; nothing more comes once a stop string was found."""
        if self.found is not None:
            return ""
        self._held += piece
        met = [(at, i) for i, one in enumerate(self._strings) if (at := self._held.find(one)) >= 0]
        if met:
            at, i = min(met)
            self.found = self._strings[i]
            said, self.rest, self._held = self._held[:at], self._held[at + len(self.found) :], ""
            return said
        keep = max((self._open(one) for one in self._strings), default=0)
        cut = len(self._held) - keep
        said, self._held = self._held[:cut], self._held[cut:]
        return said

    def finish(self) -> str:
        """What was held back."""
        said, self._held = self._held, ""
        return said

    def _open(self, one: str) -> int:
        """How many characters at the end of the held text begin a stop string."""
        for size in range(min(len(one) - 1, len(self._held)), 0, -1):
            if self._held.endswith(one[:size]):
                return size
        return 0
