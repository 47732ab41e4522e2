"""What a family file gives, and pieces that all decoder families share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
from flax import nnx

from poem.context import Context
from poem.spec import KV, Batch, Ops, StateGroup, StateKind, WeightRule


class Config(Protocol):
    """The fields that the lowering reads of every family's config."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def max_position_embeddings(self) -> int: ...
    @property
    def num_attention_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def layer_groups(self) -> tuple[str, ...]:
        """The state group of each layer, first to last."""
        ...


class Layer(Protocol):
    """One layer; its state goes through the context."""

    def __call__(self, x: jax.Array, context: Context) -> jax.Array:
        """x [B, Q, D] -> [B, Q, D]."""
        ...


class Model(Protocol):
    """A decoder apart from its layer loop, which belongs to the lowering."""

    layers: nnx.List[Any]

    def embed(self, batch: Batch) -> tuple[jax.Array, dict[str, tuple[jax.Array, ...]]]:
        """x [B, Q, D], and what all layers share, by group name (rope tables)."""
        ...

    def hidden(self, x: jax.Array) -> jax.Array:
        """The last layer's output [R, D] -> normed hidden states [R, D]."""
        ...

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Normed hidden states [R, D] -> f32[R, V]."""
        ...


class Family(Protocol):
    """A module of `poem.models`."""

    Config: type[Any]  # with a classmethod from_json(config.json as a dictionary) -> Config
    Model: Callable[[Any, str], Model]  # (config, dtype); called under `nnx.eval_shape`

    @staticmethod
    def state_groups(config: Any, ops: Ops, page_size: int, dtype: str) -> tuple[StateGroup, ...]:
        """What a sequence keeps."""
        ...

    @staticmethod
    def weight_map(config: Any) -> tuple[WeightRule, ...]:
        """Checkpoint tensors -> parameters."""
        ...


def paged_group(name: str, layers: int, ops: Ops, kv: KV, heads: int, window: int | None = None) -> StateGroup:
    """A group of `layers` attention layers whose page is whatever `ops` wants it to be; `heads`: query heads."""
    return StateGroup(name, StateKind.PAGED, layers, ops.kv_page(kv, heads), window, kv.page_size)


def window_state(
    layer_groups: Sequence[str], ops: Ops, kv: KV, heads: int, window: int | None
) -> tuple[StateGroup, ...]:
    """The groups "full" and "window", those that have layers."""
    windows = {"full": None, "window": window}
    counts = {name: layer_groups.count(name) for name in windows}
    return tuple(paged_group(name, n, ops, kv, heads, windows[name]) for name, n in counts.items() if n)
