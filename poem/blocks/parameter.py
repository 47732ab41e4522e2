"""Parameters with logical axes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx


class Parameter(nnx.Param[jax.Array]):
    """A weight whose logical axes are known; made under `nnx.eval_shape`, so nothing is allocated."""

    axes: tuple[str | None, ...]


def parameter(dtype: str, **shape: int) -> Parameter:
    """A weight: `parameter("float32", heads=9, head_dim=64, embed=576)`; a name that starts with `_` is no axis."""
    axes = tuple(None if name.startswith("_") else name for name in shape)
    return Parameter(jnp.zeros(tuple(shape.values()), jnp.dtype(dtype)), axes=axes)
