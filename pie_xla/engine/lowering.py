"""A recipe lowered; and its outcome remembered from the last start.

Lowering imports flax and builds every module: most of a second, of which a warm start needs only the outcome (facts, leaves, groups),
since its executables are on disk. The modules are built when something must be compiled after all.
"""

from __future__ import annotations

import os
import pickle
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pie_xla.engine.api import Recipe
from pie_xla.errors import PieError

if TYPE_CHECKING:
    import jax

    from poem.lower import LoweredModel
    from poem.spec import Facts, Leaf, StateGroup


def lower_recipe(recipe: Recipe) -> LoweredModel:
    """The model of a recipe, on one device.

    Raises:
        PieError: an architecture or a variant of one that is not supported.
    """
    from pie_xla.kernels.ops import Kernel, ops_for
    from poem.lower import lower
    from poem.spec import Loop, PoemError

    if recipe.library:
        from pie_xla.kernels.cpu import load

        load(Path(recipe.library))
    try:
        return lower(
            recipe.config,
            ops=ops_for(Kernel(recipe.kernel)),
            dtype=recipe.dtype,
            page_size=recipe.page_size,
            loop=Loop(recipe.loop),
        )
    except PoemError as error:
        raise PieError(error.message, error.hint) from error


@dataclass(frozen=True)
class Outline:
    """What is remembered."""

    facts: Facts
    stored: dict[str, Leaf]
    params: dict[str, Leaf]
    groups: tuple[StateGroup, ...]
    views: bool


class RememberedModel:
    """Stands for a `LoweredModel` on one device whose layers are not stacked; lowers it when `step` is first traced."""

    place = None

    def __init__(self, outline: Outline, recipe: Recipe) -> None:
        self.facts, self.stored = outline.facts, outline.stored
        self.params, self.groups, self.views = outline.params, outline.groups, outline.views
        self._recipe = recipe
        self._lowered: LoweredModel | None = None
        self._lock = threading.Lock()

    def pack(self, stored: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """See `LoweredModel.pack`; parameters keep their names when layers are not stacked."""
        return {name: stored[name] for name in self.params}

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """See `LoweredModel.step`."""
        return self._modules().step(*args, **kwargs)

    def tapped_step(self, *args: Any, **kwargs: Any) -> Any:
        """See `LoweredModel.tapped_step`."""
        return self._modules().tapped_step(*args, **kwargs)

    def _modules(self) -> LoweredModel:
        with self._lock:
            if self._lowered is None:
                self._lowered = lower_recipe(self._recipe)
        return self._lowered


def remembered(recipe: Recipe, key: str, cache: Path) -> RememberedModel | LoweredModel:
    """The model of a recipe, from the private folder `cache` if it was lowered before; `key` digests all that lowering depends on.

    A damaged or foreign file costs a lowering.
    """
    path = cache / f"outline-{key[:40]}.pickle"
    outline = _read(path)
    if outline is not None:
        return RememberedModel(outline, recipe)
    lowered = lower_recipe(recipe)
    if lowered.place is None and lowered.params == lowered.stored:
        _write(path, Outline(lowered.facts, lowered.stored, lowered.params, lowered.groups, lowered.views))
    return lowered


def _read(path: Path) -> Outline | None:
    try:
        if path.stat().st_uid != os.getuid() or path.parent.stat().st_mode & 0o022:
            return None  # a pickle runs code: only the user's own
        found = pickle.loads(path.read_bytes())
    except Exception:
        return None
    return found if isinstance(found, Outline) else None


def _write(path: Path, outline: Outline) -> None:
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        temporary.write_bytes(pickle.dumps(outline))
        temporary.replace(path)
    except OSError:  # a full disk costs the next start a lowering
        temporary.unlink(missing_ok=True)
