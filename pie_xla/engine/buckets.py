"""The one owner of padded sizes. Scheduler, warm-up and compiler all ask here, so a size nobody planned cannot arise."""

from __future__ import annotations

from dataclasses import dataclass

from pie_xla.engine.api import EngineOptions
from pie_xla.errors import PieError


@dataclass(frozen=True, order=True)
class Bucket:
    """The padded shape of a launch: B rows of at most Q new tokens, R readout positions; `masked`: with a mask bit per token and
    cell."""

    rows: int
    tokens: int
    readouts: int
    masked: bool = False

    def __str__(self) -> str:
        readouts = "" if self.readouts == self.rows else f"r{self.readouts}"
        return f"{self.rows}x{self.tokens}{readouts}{'m' if self.masked else ''}"

    @property
    def area(self) -> int:
        return self.rows * self.tokens


class Buckets:
    """Every bucket this engine may launch."""

    def __init__(self, options: EngineOptions) -> None:
        decode = sorted(set(options.decode_rows))
        prefill = sorted({s for s in options.prefill if s[1] > 1}, key=lambda s: (s[0] * s[1], s))
        if not decode or not any(b == 1 for b, _ in prefill):
            raise PieError(
                "the engine needs a row count for one-token launches and a launch of one row of at least 2 tokens",
                "raise [engine] max_rows and max_tokens",
            )
        if options.strict:
            decode, prefill = decode[-1:], [max((s for s in prefill if s[0] == 1), key=lambda s: s[1])]
        self.decode = tuple(Bucket(b, 1, b) for b in decode)
        self.prefill = tuple(Bucket(b, q, b) for b, q in prefill)
        self.max_rows = decode[-1]
        self.chunk = max(q for b, q in prefill if b == 1)

    @property
    def all(self) -> tuple[Bucket, ...]:
        return self.decode + self.prefill

    def fitting(self, rows: int, tokens: int, readouts: int, masked: bool = False) -> list[Bucket]:
        """Buckets that hold the launch, best (least padded) first. More readouts than rows double R from the row count."""
        family = self.decode if tokens == 1 else self.prefill
        found = []
        for bucket in family:
            if bucket.rows >= rows and bucket.tokens >= tokens:
                r = bucket.readouts
                while r < readouts:
                    r *= 2
                found.append(Bucket(bucket.rows, bucket.tokens, r, masked))
        return sorted(found, key=lambda b: (b.area, b))
