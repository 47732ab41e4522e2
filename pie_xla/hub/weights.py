"""A checkpoint's tensors as the parameters of its Poem family, planned before a byte is read."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from pie_xla.errors import PieError

if TYPE_CHECKING:
    from pie_xla.hub.origin import Checkpoint
    from poem.spec import KV, Leaf
    from poem.weights import Assignment

DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Item:
    """One parameter to store: where it comes from, and how it is made."""

    assignment: Assignment
    dtype: str

    @property
    def path(self) -> str:
        """Dotted parameter path."""
        return self.assignment.target

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the parameter."""
        return self.assignment.leaf.shape

    @property
    def nbytes(self) -> int:
        """As stored."""
        return math.prod(self.shape) * _numpy_dtype(self.dtype).itemsize

    def read(self, checkpoint: Checkpoint) -> np.ndarray[Any, Any]:
        """The value, in the stored dtype."""
        a = self.assignment
        value = a.transform.apply(checkpoint.read(a.source), a.leaf.shape, a.source)
        return np.ascontiguousarray(value, _numpy_dtype(self.dtype))


@dataclass(frozen=True)
class Plan:
    """What an import will store."""

    model_type: str
    param_count: int
    items: tuple[Item, ...]
    unused: dict[str, str]


class Shapes:
    """Kernels for a lowering that is never run: pages hold nothing."""

    views = False
    taps = False

    def kv_page(self, kv: KV, heads: int) -> dict[str, Leaf]:
        return {}

    def attend(self, *args: Any) -> Any:
        raise AssertionError("an import traces no step")

    rotate = rms_norm = scores = page_bounds = attend


def plan_weights(checkpoint: Checkpoint, dtype: str) -> Plan:
    """Which tensor becomes which parameter, names and shapes checked.

    Raises:
        PieError: unknown architecture, a missing or unexpected tensor, a shape that contradicts the config.
    """
    from poem.lower import lower
    from poem.spec import PoemError
    from poem.weights import assign

    try:
        model = lower(checkpoint.config, ops=Shapes())
        assignments = assign(model.weight_rules, model.stored, checkpoint.shapes)
    except PoemError as error:
        raise PieError(error.message, error.hint) from error
    except KeyError as error:
        raise PieError(f"config.json lacks {error}", "the checkpoint's config is incomplete") from error
    for a in assignments.used:
        found, expected = checkpoint.shapes[a.source], a.transform.source_shape(a.leaf.shape)
        if found != expected:
            raise PieError(
                f"tensor {a.source} has shape {list(found)}, but the config says {list(expected)}",
                "the checkpoint and its config.json do not belong together",
            )
    items = tuple(Item(a, dtype) for a in assignments.used)
    return Plan(model.facts.model_type, model.facts.param_count, items, dict(assignments.unused))


def _numpy_dtype(name: str) -> np.dtype[Any]:
    import ml_dtypes

    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)
