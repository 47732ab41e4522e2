"""The vocabulary of Poem: what a model is, before any array exists.

Letters: B rows, Q tokens per row, D model width, H query heads, K kv heads, d head_dim, V vocab, L layers, N pages per
row, R readouts.

Everything here is abstract: `Leaf` says what an array will be, `StateGroup` what a sequence keeps, `Batch` what one
launch brings, `Ops` which kernels the layers call, `WeightRule` how a checkpoint's tensor becomes a parameter.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import numpy as np

State = dict[str, dict[str, jax.Array]]  # group name -> array name -> pool
Place = Callable[["Leaf"], jax.sharding.Sharding]  # where a leaf lives; made of a mesh and rules outside of Poem


class PoemError(Exception):
    """A model that cannot be built: what was wrong, where, and what to do.

    Args:
        message: what was wrong and where.
        hint: what to do about it, or None.
    """

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return self.message if self.hint is None else f"{self.message}\n  hint: {self.hint}"


@dataclass(frozen=True)
class Leaf:
    """An array to be: a parameter, or a state pool.

    Args:
        shape: sizes.
        dtype: NumPy or ml_dtypes name ("float32", "bfloat16").
        axes: one logical axis per dimension: "vocab", "embed", "heads", "kv_heads", "head_dim", "ffn", "layers",
            "pages", "slots", or None.
    """

    shape: tuple[int, ...]
    dtype: str
    axes: tuple[str | None, ...]

    def __post_init__(self) -> None:
        if len(self.shape) != len(self.axes):
            raise PoemError(f"a leaf of shape {self.shape} has {len(self.axes)} logical axes: {self.axes}")

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole array."""
        return self.size * jax.numpy.dtype(self.dtype).itemsize

    @property
    def struct(self) -> jax.ShapeDtypeStruct:
        """The same for `jax.jit(...).lower`."""
        return jax.ShapeDtypeStruct(self.shape, jax.numpy.dtype(self.dtype))  # type: ignore[no-untyped-call, unused-ignore]


class Loop(enum.Enum):
    """How the layers are run."""

    UNROLLED = "unrolled"  # one array per layer; XLA:CPU copies every layer out of a stack
    SCAN = "scan"  # `lax.scan` over each repeating run of layers, weights stacked; compile time flat in depth


class StateKind(enum.Enum):
    """How a sequence's state grows: page by page, or not at all (one slot)."""

    PAGED = "paged"
    RECURRENT = "recurrent"


@dataclass(frozen=True)
class StateGroup:
    """The layers that share one page table (paged), or one slot per sequence (recurrent).

    Every pool array is flat over layers: `[layers * units, *unit]`, layer l's copy of unit u at row `l * units + u`. So
    one array (and one scan carry) serves all layers, and a page or slot is copied the same way whatever it holds.
    Unit 0 is the dummy: padding writes land there, and a read of it is the zero initial state (recurrent).

    Args:
        name: "full", "window" or "recurrent".
        kind: paged or recurrent.
        layers: layers in this group.
        unit: what ONE layer keeps in ONE unit (page or slot), by array name, without the leading dimension.
        window: positions a window group keeps (a query sees itself and the window - 1 cells before it); None: all.
        page_size: cells per page; 1 for recurrent groups.
    """

    name: str
    kind: StateKind
    layers: int
    unit: Mapping[str, Leaf]
    window: int | None = None
    page_size: int = 1

    @property
    def bytes_per_unit(self) -> int:
        """Bytes of one page or slot, all layers of the group."""
        return self.layers * sum(leaf.nbytes for leaf in self.unit.values())

    def arrays(self, units: int) -> dict[str, Leaf]:
        """The pool's arrays for `units` pages or slots, the dummy included."""
        axis = "pages" if self.kind is StateKind.PAGED else "slots"
        return {
            name: Leaf((self.layers * units, *leaf.shape), leaf.dtype, (axis, *leaf.axes))
            for name, leaf in self.unit.items()
        }

    def copy_units(self, pool: dict[str, jax.Array], source: jax.Array, target: jax.Array) -> dict[str, jax.Array]:
        """The pool with units `target` i32[n] overwritten by units `source` i32[n] in all layers (copy-on-write)."""
        copied = {}
        for name, array in pool.items():
            rows = array.reshape(self.layers, -1, *array.shape[1:])
            copied[name] = rows.at[:, target].set(rows[:, source]).reshape(array.shape)
        return copied


@dataclass(frozen=True)
class Heads:
    """What taps see of a model: how many attention layers it has, and each one's H query heads of d numbers."""

    layers: int
    heads: int
    head_dim: int


@dataclass(frozen=True)
class Facts:
    """What a user of the model may know before it runs.

    Args:
        model_type: the checkpoint's `model_type`.
        max_context: positions the model was made for.
        outputs: output name -> (shape after the readout axis, dtype): `{"logits": ((V,), "float32"), ...}`.
        param_count: parameters, tied ones once.
        attention: what taps see (`poem.taps`); None: no attention layers, or kernels that cannot show them.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    layers: int
    max_context: int
    page_size: int
    outputs: Mapping[str, tuple[tuple[int, ...], str]]
    param_count: int
    attention: Heads | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Batch:
    """One launch: B rows of at most Q new tokens. Padding rows have count 0 and point at page and slot 0.

    Args:
        tokens: i32[B, Q].
        positions: i32[B, Q]; -1 marks a padding token: it writes nothing.
        starts: i32[B], cells already in the row's set; token i is written to cell starts + i.
        counts: i32[B], real tokens in the row (<= Q). The row attends to cells < starts + counts, causally: token i to
            cells <= starts + i.
        pages: per paged group i32[B, N]; cell c of row b lies in page pages[b, c // page_size]. N covers max_context.
        view: what of these cells a row may see; None: all of them, and cell c holds position c.
        slots_in: i32[B], recurrent slot read (0: the zero initial state).
        slots_out: i32[B], recurrent slot written.
        readout: i32[R], flat index b * Q + i of each position whose outputs are wanted.
    """

    tokens: jax.Array
    positions: jax.Array
    starts: jax.Array
    counts: jax.Array
    pages: dict[str, jax.Array]
    slots_in: jax.Array
    slots_out: jax.Array
    readout: jax.Array
    view: View | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class View:
    """Which cells the tokens of a row attend to, among those that are causal and within a layer's own window.

    Args:
        bases: i32[B, N], the position of the first cell of each page: evicted pages leave gaps.
        live: i32[B, N, ceil(page_size / 32)], a bit per cell, the lowest first: 1 where it is not evicted.
        window: i32[B]; a token at position p sees positions > p - window.
        sinks: i32[B]; positions below it are seen whatever the window.
        mask: i32[B, Q, N * page_size / 32] or None, a bit per token and cell: 1 where it may be seen.
    """

    bases: jax.Array
    live: jax.Array
    window: jax.Array
    sinks: jax.Array
    mask: jax.Array | None = None


@dataclass(frozen=True)
class KV:
    """The key and value geometry of one layer: K kv heads of d numbers, pages of `page_size` cells."""

    kv_heads: int
    head_dim: int
    page_size: int
    dtype: str


@dataclass(frozen=True)
class Attention:
    """How a layer attends: softmax of soft_cap(q . k * scale) over the last `window` cells, own too (None: all)."""

    scale: float
    window: int | None = None
    soft_cap: float | None = None


class NormScale(enum.Enum):
    """What a norm's stored weight multiplies by."""

    WEIGHT = "weight"  # llama, qwen: rounded to x's dtype before the weight
    ONE_PLUS_WEIGHT = "one_plus_weight"  # gemma: all in float32


class Ops(Protocol):
    """The kernels a model's layers call; one implementation per backend, handed to `poem.lower.lower`."""

    @property
    def views(self) -> bool:
        """Whether `attend` heeds `Batch.view`; kernels that cannot are not given one."""
        ...

    @property
    def taps(self) -> bool:
        """Whether attention can be looked at: `scores` and `page_bounds` are there, and `attend` heeds `Batch.view`."""
        ...

    def kv_page(self, kv: KV, heads: int) -> dict[str, Leaf]:
        """What one layer keeps in one page: the arrays without the leading page dimension.

        `heads`: query heads, for kernels that pad.
        """
        ...

    def rotate(self, x: jax.Array, table: tuple[jax.Array, ...]) -> jax.Array:
        """Rope: x [B, Q, H, d] with the first 2r numbers of each head turned by table (cos, sin: f32[B, Q, r])."""
        ...

    def rms_norm(self, x: jax.Array, weight: jax.Array, eps: float, scale: NormScale) -> jax.Array:
        """x [..., D] over its root mean square along D, times what `scale` makes of weight [D]."""
        ...

    def attend(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        pool: dict[str, jax.Array],
        pages: jax.Array,
        first: jax.Array | int,
        batch: Batch,
        how: Attention,
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Write the new keys and values into the pool, then attend.

        Args:
            query: [B, Q, H, d]; key and value: [B, Q, K, d], rope applied.
            pool: the group's flat arrays, `[layers * pages, ...]`.
            pages: i32[B, N], page numbers within one layer.
            first: row of this layer's page 0 in the pool (layer * pages); a traced scalar under scan.

        Returns:
            [B, Q, H, d] and the pool with the new cells. Rows of padding tokens are arbitrary but finite.
        """
        ...

    def scores(
        self,
        query: jax.Array,
        pool: dict[str, jax.Array],
        pages: jax.Array,
        first: jax.Array | int,
        batch: Batch,
        how: Attention,
        width: int,
    ) -> jax.Array:
        """What the last token of each row attends to, after `attend` has written the new cells.

        Args:
            query: [B, H, d], of the row's last token.
            width: C; no set of the launch has a position beyond.

        Returns:
            f32[B, C]: per position, the mean over heads of its weight in the softmax; 0 where nothing is seen. Rows sum to 1.
        """
        ...

    def page_bounds(
        self,
        query: jax.Array,
        pool: dict[str, jax.Array],
        pages: jax.Array,
        first: jax.Array | int,
        batch: Batch,
        how: Attention,
        width: int,
    ) -> jax.Array:
        """The most that any cell of a page can score, before `attend`; the same arguments as `scores`.

        Returns:
            f32[B, J], J = ceil(C / page): per page of positions, the greatest over heads of sum(max(q * least key, q * greatest key)) *
            scale. inf where the launch writes cells, -inf where there is nothing.
        """
        ...


class Transform(enum.Enum):
    """How a checkpoint's tensor becomes a parameter; the source's shape follows from the parameter's."""

    COPY = "copy"  # same shape
    FLAT = "flat"  # source [n] -> any shape of n elements
    SPLIT_OUT = "split_out"  # source [out, in] -> [*out, in]
    SPLIT_IN = "split_in"  # source [out, in] -> [out, *in]
    DEPTHWISE = "depthwise"  # source [C, 1, W] -> [C, W]

    def source_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape the checkpoint's tensor must have for a parameter of `shape`."""
        match self:
            case Transform.COPY:
                return shape
            case Transform.FLAT:
                return (math.prod(shape),)
            case Transform.SPLIT_OUT:
                return (math.prod(shape[:-1]), shape[-1])
            case Transform.SPLIT_IN:
                return (shape[0], math.prod(shape[1:]))
            case Transform.DEPTHWISE:
                return (shape[0], 1, shape[1])

    def apply(self, tensor: np.ndarray[Any, Any], shape: tuple[int, ...], name: str) -> np.ndarray[Any, Any]:
        """`tensor` as a parameter of `shape`; PoemError names the tensor when its own shape is wrong.

        Kernels keep the checkpoint's [out, in] order, the faster one on XLA:CPU from 1 to 32 rows: only reshapes here.
        """
        expected = self.source_shape(shape)
        if tuple(tensor.shape) != expected:
            raise PoemError(
                f"tensor {name} has shape {list(tensor.shape)}, but the config says {list(expected)}",
                "the checkpoint and its config.json do not belong together",
            )
        return tensor.reshape(shape)


@dataclass(frozen=True)
class WeightRule:
    """Checkpoint tensors of one kind -> parameters of one kind.

    Args:
        source: checkpoint name, `{i}` is the layer number: `model.layers.{i}.self_attn.q_proj.weight`. With target
            None it may end in `*`.
        target: parameter path with `{i}`: `layers.{i}.self_attn.q_proj.kernel`; None: known and not used.
        transform: how.
        reason: why an unused tensor is not used, for the reader of the rule and of an import's report.
    """

    source: str
    target: str | None
    transform: Transform = Transform.COPY
    reason: str | None = None
