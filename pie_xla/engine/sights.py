"""What the new tokens of a row see, turned from positions into the cells of its set's table."""

from __future__ import annotations

from typing import Any

import numpy as np

from pie_xla.engine.api import Sight
from pie_xla.engine.records import PassRow
from pie_xla.engine.state import SetState

NO_WINDOW = 1 << 30  # beyond any position


def ancestors(tree: tuple[int, ...]) -> np.ndarray:
    """bool[T, T]: token t sees itself and the tokens it follows.

    >>> ancestors((-1, 0, 0)).astype(int).tolist()
    [[1, 0, 0], [1, 1, 0], [1, 0, 1]]
    """
    seen = np.eye(len(tree), dtype=bool)
    for token, parent in enumerate(tree):  # parents come before their children
        if parent >= 0:
            seen[token] |= seen[parent]
    return seen


def depths(tree: tuple[int, ...]) -> tuple[int, ...]:
    """Each token's distance from the end of the set: what its position is after the set's length."""
    found: list[int] = []
    for parent in tree:
        found.append(0 if parent < 0 else found[parent] + 1)
    return tuple(found)


def bad_sight(sight: Sight, length: int, certain: int, total: int, *, windowed: bool) -> str | None:
    """Why `total` new tokens after `length` cannot have this sight, or None.

    Args:
        certain: the least that the length can turn out to be.
        windowed: the model has layers that see a window of positions.
    """
    if sight.window is not None and not 1 <= sight.window < NO_WINDOW:
        return f"a window of {sight.window} positions: at least 1"
    if not 0 <= sight.sinks < NO_WINDOW:
        return f"{sight.sinks} sinks: 0 or more"
    if sight.mask is not None and sight.tree is not None:
        return "a tree is a mask of its own: give one of them"
    if sight.tree is not None:
        if len(sight.tree) != total:
            return f"a tree of {len(sight.tree)} tokens for {total} tokens"
        wrong = next((t for t, parent in enumerate(sight.tree) if not -1 <= parent < t), None)
        if wrong is not None:
            return f"token {wrong} of the tree follows {sight.tree[wrong]}: an earlier token, or -1"
    if sight.mask is not None:
        if length != certain:
            return "a mask over a set whose length is a value on the device: await what decides it first"
        if sight.mask.dtype != bool or sight.mask.shape != (total, length + total):
            wanted = f"bool[{total}, {length + total}]"
            return f"a mask {sight.mask.dtype}{list(sight.mask.shape)} for {total} tokens after {length}: {wanted}"
    if sight.places is not None:
        if len(sight.places) != total:
            return f"{len(sight.places)} positions for {total} tokens"
        if min(sight.places) < -certain:
            return "a position below 0"
    moved = sight.places is not None and sight.places != tuple(range(total))
    if (moved or sight.tree is not None) and (windowed or sight.window is not None):
        return "positions of your own, or a tree, do not go with a window: cells are counted in the order they were written"
    for begin, end in sight.spans or ():
        if not 0 <= begin <= end <= length:
            return f"a span {begin}..{end} of a set of {length} tokens"
    return None


def sight_fields(row: PassRow, state: SetState, page: int, count: int) -> dict[str, Any]:
    """The fields of `RowInput` that a sight decides, for the last `count` of the tokens launched so far; the set has them already.

    Args:
        page: cells per page.
    """
    sight = row.sight
    if sight is None:
        return {"live": tuple(state.live)}
    assert row.start is not None
    done = row.done - count
    fields: dict[str, Any] = {"live": tuple(state.live), "sinks": sight.sinks}
    if sight.window is not None:
        fields["window"] = sight.window
    places = sight.places if sight.places is not None or sight.tree is None else depths(sight.tree)
    if places is not None:
        # told from the pass's first token, needed from this launch's
        fields["places"] = np.array(places[done : row.done], np.int32) - done
    if not row.needs_places:
        return fields
    positions = _positions(state, page)  # of every cell, those of the new tokens included
    if sight.spans is not None:
        seen = positions >= row.start
        for begin, end in sight.spans:
            seen |= (positions >= begin) & (positions < end)
        fields["live"] = [live & bits for live, bits in zip(state.live, _page_bits(seen, page), strict=True)]
    if row.masked:
        total, real = row.start + row.total, positions[: state.cells]
        mask = sight.mask
        if mask is None:
            assert sight.tree is not None
            mask = np.concatenate([np.ones((row.total, row.start), bool), ancestors(sight.tree)], axis=1)
        cells = np.zeros((count, len(positions)), bool)
        cells[:, : state.cells] = mask[done : row.done, np.minimum(real, total - 1)]
        fields["mask"] = _packed(cells)
    return fields


def _positions(state: SetState, page: int) -> np.ndarray:
    """The position of each cell of the table, i64[pages * page]."""
    return (np.asarray(state.bases, np.int64)[:, None] + np.arange(page)[None, :]).reshape(-1)


def _page_bits(seen: np.ndarray, page: int) -> list[int]:
    """Per page, a bit per cell, the lowest first."""
    packed = np.packbits(seen.reshape(-1, page), axis=1, bitorder="little")
    return [int.from_bytes(row.tobytes(), "little") for row in packed]


def _packed(bits: np.ndarray) -> np.ndarray:
    """bool[T, C] as i32[T, ceil(C / 32)], the lowest bit first."""
    fill = -bits.shape[1] % 32
    packed = np.packbits(np.pad(bits, ((0, 0), (0, fill))), axis=1, bitorder="little")
    return np.ascontiguousarray(packed).view(np.int32)
