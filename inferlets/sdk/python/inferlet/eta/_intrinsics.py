"""What an epilogue can read of its pass."""

from __future__ import annotations

from typing import Any

from inferlet.eta._errors import EtaError
from inferlet.eta._recorder import recorder
from inferlet.eta._stages import before_the_model


def output(row: int, name: str) -> Any:
    """The model's output `name` (`logits`, `hidden`, ...) at row `row` of this pass.

    Its shape is that of one position, `[V]` for logits and `[D]` for hidden, with R in front when `readout` names R
    positions.
    """
    found = recorder("intrinsics.output")
    if before_the_model():
        raise EtaError(
            f"output({row!r}, {name!r}): the model's outputs are there in the epilogue only, not in prologue"
        )
    return found.output(row, name)


def layer() -> Any:
    """The layer's number among the attention layers, u32[]: in `on_attn_proj` and `on_attn`."""
    return recorder("intrinsics.layer").shown("layer", None)


def query(row: int = 0) -> Any:
    """The query of the row's last token, f32[H, d], rope applied: in `on_attn_proj` and `on_attn`."""
    return recorder("intrinsics.query").shown("query", row)


def attn_scores(row: int = 0) -> Any:
    """How much the row's last token attends to each position, f32[C]: in `on_attn`.

    The mean over the heads of their softmax weights, which sums to 1; 0 where nothing is seen. C is the pass's `width`.
    """
    return recorder("intrinsics.attn_scores").shown("score", row)


def page_bounds(row: int = 0) -> Any:
    """The most that any key of each page can score against the row's last token, f32[J]: in `on_attn_proj`.

    J is the number of pages that C positions take; page j holds positions j * P to (j + 1) * P - 1, P = `page_size()`. It is
    infinite where the pass writes, and minus infinity where there is nothing.
    """
    return recorder("intrinsics.page_bounds").shown("bound", row)


def keep_pages(row: int, keep: Any) -> None:
    """Let the row's last token look only at the pages where `keep` bool[J] is true, in this layer: in `on_attn_proj`.

    Pages that the pass writes to are always seen.
    """
    recorder("intrinsics.keep_pages").keep_pages(row, keep)


def vocab() -> int:
    """V, the width of `logits`: a Python int, known when recorded."""
    return recorder("intrinsics.vocab").vocab_size


def page_size() -> int:
    """Positions per page of the model's state."""
    return recorder("intrinsics.page_size").page_size
