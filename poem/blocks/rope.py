"""Rotary position embeddings (Su et al. 2021), halves rotated against each other as in transformers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from poem.spec import PoemError


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1's frequency scaling: long wavelengths are stretched by `factor`, short ones kept, smooth between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class Rope:
    """Rotation of the first `dim` numbers of a head by position * theta^(-2i/dim)."""

    dim: int
    theta: float
    scaling: Llama3Scaling | None = None
    linear_factor: float = 1.0  # positions are divided by this

    def frequencies(self) -> np.ndarray[Any, Any]:
        """f32[dim / 2], radians per position."""
        freq = 1.0 / self.theta ** (np.arange(0, self.dim, 2, dtype=np.float32) / np.float32(self.dim))
        freq = freq / self.linear_factor
        if self.scaling is not None:
            s = self.scaling
            turns = s.original_max_position_embeddings * freq / (2 * math.pi)
            smooth = (turns - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)
            smooth = np.clip(smooth, 0.0, 1.0)
            freq = smooth * freq + (1.0 - smooth) * freq / s.factor
        return freq.astype(np.float32)

    def table(self, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        """cos and sin, f32[B, Q, dim / 2], of positions i32[B, Q]. Computed once a step, before the layer loop."""
        angle = positions.astype(jnp.float32)[..., None] * jnp.asarray(self.frequencies())[None, None]
        return jnp.cos(angle), jnp.sin(angle)


def read_rope(parameters: Mapping[str, Any], dim: int) -> Rope:
    """A `rope_parameters` entry ({"rope_theta", "rope_type", ...}) as a Rope; other types are refused by name.

    Args:
        parameters: the entry.
        dim: numbers of a head that are rotated.
    """
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    theta = float(parameters["rope_theta"])
    match kind:
        case "default" | None:
            return Rope(dim, theta)
        case "llama3":
            return Rope(
                dim,
                theta,
                Llama3Scaling(
                    float(parameters["factor"]),
                    float(parameters["low_freq_factor"]),
                    float(parameters["high_freq_factor"]),
                    int(parameters["original_max_position_embeddings"]),
                ),
            )
        case "linear":
            return Rope(dim, theta, linear_factor=float(parameters["factor"]))
        case _:
            raise PoemError(f"rope type {kind!r} is not supported", "supported: default, linear, llama3")


def rope_parameters(config: Mapping[str, Any], default_theta: float) -> dict[str, Any]:
    """The rope entry in either spelling: `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling`."""
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return {"rope_theta": config.get("rope_theta", default_theta), **scaling}
