"""What an epilogue can read of its pass."""

from __future__ import annotations

from typing import Any

from inferlet.eta._recorder import recorder


def output(row: int, name: str) -> Any:
    """The model's output `name` (`logits`, `hidden`, ...) at row `row` of this pass.

    Its shape is that of one position, `[V]` for logits and `[D]` for hidden, with R in front when `readout` names R
    positions.
    """
    return recorder("intrinsics.output").output(row, name)


def vocab() -> int:
    """V, the width of `logits`: a Python int, known when recorded."""
    return recorder("intrinsics.vocab").vocab_size


def page_size() -> int:
    """Positions per page of the model's state."""
    return recorder("intrinsics.page_size").page_size
