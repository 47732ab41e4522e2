"""Attention on TPU: JAX's Pallas ragged paged attention, and what it takes to feed it.

The kernel wants the launch's real tokens packed without gaps, K and V of a head side by side in one page array,
head_dim in multiples of 128 lanes, and a tileable number of heads per device. So this module packs, interleaves and
pads; `PaddingCost` says what the padding costs.

Letters: B rows, Q tokens per row, T = B*Q, H query heads, K kv heads, G = H/K, d head_dim, N pages per row, P pages
of the pool; Kp and dp are K and d padded.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention
from jax.sharding import Mesh, PartitionSpec

from pie_xla.errors import PieError
from poem.plain import rms_norm, rotate
from poem.spec import KV, Attention, Batch, Leaf, NormScale

LANES = 128  # width of a TPU vector register: head_dim comes in multiples of it
SUBLANES = 8  # its height, in 32-bit rows
# The kernel's own default. Its tuned table asks for the host's device, which is no TPU when compiling ahead.
QUERIES_PER_BLOCK = 32
PAGES_PER_BLOCK = 32  # each page is one DMA in unrolled code
BUFFER_BYTES = 4 << 20  # the double buffer of pages; VMEM scoped to a kernel is 16 MB


@dataclass(frozen=True)
class PaddingCost:
    """What a layer's true heads become on TPU, and the price.

    Args:
        heads, kv_heads, head_dim: the model's.
        padded_heads, padded_kv_heads, padded_head_dim: the kernel's, over all devices.
    """

    heads: int
    kv_heads: int
    head_dim: int
    padded_heads: int
    padded_kv_heads: int
    padded_head_dim: int

    @property
    def bytes_factor(self) -> float:
        """KV bytes kept and read, against the unpadded model's."""
        return self.padded_kv_heads * self.padded_head_dim / (self.kv_heads * self.head_dim)

    @property
    def flops_factor(self) -> float:
        """Attention FLOPs (scores and values; projections are not padded), against the unpadded model's."""
        return self.padded_heads * self.padded_head_dim / (self.heads * self.head_dim)

    def __str__(self) -> str:
        if self.bytes_factor == 1 and self.flops_factor == 1:
            return f"{self.heads}/{self.kv_heads} heads of {self.head_dim}: no padding"
        return (
            f"{self.heads}/{self.kv_heads} heads of {self.head_dim} padded to "
            f"{self.padded_heads}/{self.padded_kv_heads} of {self.padded_head_dim}: "
            f"KV bytes x{self.bytes_factor:.2f}, attention FLOPs x{self.flops_factor:.2f}"
        )


@dataclass(frozen=True)
class TpuOps:
    """`poem.spec.Ops` on TPU.

    Args:
        mesh: the mesh the step runs on, or None for one device. The kernel is no XLA operation, so XLA cannot split it:
            it runs under `shard_map` with heads split over `heads_axis`, as the pool is.
        heads_axis: the mesh axis of heads and kv_heads in the sharding rules, or None where they are whole.
        kernel: the kernel, or a reference of the same signature.
    """

    mesh: Mesh | None = None
    heads_axis: str | None = "tensor"
    kernel: Callable[..., Array] = ragged_paged_attention

    @property
    def shards(self) -> int:
        """Devices the heads are split over."""
        return 1 if self.mesh is None or self.heads_axis is None else int(self.mesh.shape[self.heads_axis])

    def padding(self, kv: KV, heads: int) -> PaddingCost:
        """The heads this layer runs with: kv heads grow until every device has an equal, tileable share."""
        if heads % kv.kv_heads:
            raise PieError(f"{heads} query heads cannot share {kv.kv_heads} kv heads evenly")
        share = -(-kv.kv_heads // self.shards)
        while not _tileable(2 * share, kv.dtype):
            share += 1
        kv_heads = share * self.shards
        head_dim = -(-kv.head_dim // LANES) * LANES
        return PaddingCost(heads, kv.kv_heads, kv.head_dim, heads // kv.kv_heads * kv_heads, kv_heads, head_dim)

    @property
    def views(self) -> bool:
        return False  # the Pallas kernel attends causally to whole tables

    @property
    def taps(self) -> bool:
        return False  # nor does it give scores

    def kv_page(self, kv: KV, heads: int) -> dict[str, Leaf]:
        """One page: [page, 2*K, d], head k's key at 2k and its value at 2k+1, padded."""
        cost = self.padding(kv, heads)
        shape = (kv.page_size, 2 * cost.padded_kv_heads, cost.padded_head_dim)
        return {"kv": Leaf(shape, kv.dtype, (None, "kv_heads", "head_dim"))}

    def rotate(self, x: Array, table: tuple[Array, ...]) -> Array:
        """See `poem.spec.Ops.rotate`."""
        return rotate(x, table)

    def rms_norm(self, x: Array, weight: Array, eps: float, scale: NormScale) -> Array:
        """See `poem.spec.Ops.rms_norm`."""
        return rms_norm(x, weight, eps, scale)

    def attend(
        self,
        query: Array,
        key: Array,
        value: Array,
        pool: dict[str, Array],
        pages: Array,
        first: Array | int,
        batch: Batch,
        how: Attention,
    ) -> tuple[Array, dict[str, Array]]:
        """See `poem.spec.Ops.attend`."""
        kv_pages = pool["kv"]  # [P, page, 2*Kp, dp]
        rows, length, heads, head_dim = query.shape
        kv_heads = key.shape[2]
        page_size, kv_width = kv_pages.shape[1], kv_pages.shape[3]
        extra = ((0, 0), (0, kv_pages.shape[2] // 2 - kv_heads))
        packed = pack(batch.counts, length)

        grouped = query.astype(kv_pages.dtype).reshape(rows * length, kv_heads, heads // kv_heads, head_dim)
        grouped = jnp.pad(grouped[packed.source], (*extra, (0, 0), (0, kv_width - head_dim)))  # [T, Kp, G, dp]
        q = grouped.reshape(rows * length, -1, kv_width)
        pairs = jnp.stack([key, value], axis=3).astype(kv_pages.dtype).reshape(rows * length, kv_heads, 2, head_dim)
        kv = jnp.pad(pairs, (*extra, (0, 0), (0, kv_width - head_dim))).reshape(rows * length, -1, kv_width)

        cells = batch.starts[:, None] + jnp.arange(length, dtype=jnp.int32)[None, :]  # [B, Q]
        held = jnp.take_along_axis(pages, jnp.minimum(cells // page_size, pages.shape[1] - 1), axis=1)
        # A padding token writes outside of the pool, and is dropped.
        target = jnp.where(batch.positions >= 0, held + first, kv_pages.shape[0])
        # Rows without tokens come last and do not count: the kernel's prefetch loses step on an empty row in between.
        lengths = jnp.maximum((batch.starts + batch.counts)[packed.order], 1)
        table = pages[packed.order] + first

        def local(
            q: Array,
            kv: Array,
            kv_pages: Array,
            target: Array,
            offset: Array,
            lengths: Array,
            table: Array,
            bounds: Array,
            live: Array,
        ) -> tuple[Array, Array]:
            kv_pages = kv_pages.at[target, offset].set(kv, mode="drop")
            out = self.kernel(
                q,
                kv_pages,
                lengths,
                table,
                bounds,
                live,
                sm_scale=how.scale,
                sliding_window=how.window,
                soft_cap=how.soft_cap,
                num_kv_pages_per_block=_pages_per_block(kv_pages, table.shape[1]),
                num_queries_per_block=min(QUERIES_PER_BLOCK, q.shape[0]),
            )
            return out, kv_pages

        operands = (target.reshape(-1), (cells % page_size).reshape(-1), lengths, table, packed.bounds, packed.live)
        out, kv_pages = self._split(local)(q, kv, kv_pages, *operands)
        out = out.reshape(rows * length, -1, heads // kv_heads, kv_width)[packed.target, :kv_heads, :, :head_dim]
        out = out.reshape(query.shape).astype(query.dtype)
        # The kernel leaves whatever was in VMEM where no query was.
        return jnp.where((batch.positions >= 0)[:, :, None, None], out, jnp.zeros((), out.dtype)), {"kv": kv_pages}

    def scores(self, *_: Any) -> Array:
        """Refused: models on these kernels say so in `Facts.attention`."""
        raise PieError("the TPU attention kernel gives no scores", 'set [engine] kernels = "xla" for layer stages')

    page_bounds = scores

    def _split(self, local: Callable[..., Any]) -> Callable[..., Any]:
        if self.mesh is None:
            return local
        tokens = PartitionSpec(None, self.heads_axis, None)  # type: ignore[no-untyped-call]
        paged = PartitionSpec(None, None, self.heads_axis, None)  # type: ignore[no-untyped-call]
        whole = PartitionSpec()  # type: ignore[no-untyped-call]
        # check_vma is off: a Pallas call carries no record of how its results vary over the mesh.
        return jax.shard_map(
            local,
            mesh=self.mesh,
            in_specs=(tokens, tokens, paged, *[whole] * 6),
            out_specs=(tokens, paged),
            check_vma=False,
        )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Packed:
    """A [B, Q] grid with `counts` real tokens per row, as one run of tokens.

    Example (Q=3), counts [2, 0, 3]: order [0, 2, 1], bounds [0, 2, 5, 5], live [2],
    source [0, 1, 6, 7, 8, 0, 0, 0, 0] (flat grid index of each packed token), target [0, 1, _, _, _, _, 2, 3, 4].

    Args:
        order: i32[B], rows with tokens first, in their order.
        bounds: i32[B+1], packed tokens before each row of `order`.
        live: i32[1], rows with tokens, at least 1: a launch of padding alone has one query, whose result nobody reads.
        source: i32[T].
        target: i32[T], the packed place of each grid token; 0 for padding.
    """

    order: Array
    bounds: Array
    live: Array
    source: Array
    target: Array


def pack(counts: Array, length: int) -> Packed:
    """The packing of a [B, length] grid with `counts` i32[B] real tokens per row."""
    rows = counts.shape[0]
    first_only = jnp.arange(rows, dtype=jnp.int32) == 0
    counts = jnp.where(jnp.any(counts > 0), counts, first_only.astype(jnp.int32))
    order = jnp.argsort(counts == 0, stable=True).astype(jnp.int32)
    bounds = jnp.concatenate([jnp.zeros((1,), jnp.int32), jnp.cumsum(counts[order]).astype(jnp.int32)])
    start = jnp.zeros((rows,), jnp.int32).at[order].set(bounds[:-1])
    column = jnp.arange(length, dtype=jnp.int32)[None, :]
    real = column < counts[:, None]
    target = start[:, None] + column  # [B, Q]
    outside = rows * length
    grid = jnp.arange(outside, dtype=jnp.int32)
    source = jnp.zeros((outside,), jnp.int32).at[jnp.where(real, target, outside).reshape(-1)].set(grid, mode="drop")
    live = jnp.sum(counts > 0, dtype=jnp.int32)[None]
    return Packed(order, bounds, live, source, jnp.where(real, target, 0).reshape(-1))


def _tileable(combined: int, dtype: str) -> bool:
    """Whether `combined` (keys and values) heads fill the kernel's tiles: its own rule, `can_be_xla_fully_tiled`."""
    packing = 4 // jnp.dtype(dtype).itemsize  # values per 32-bit word
    words = combined // packing
    return combined % packing == 0 and (words in (1, 2, 4, SUBLANES) or words % SUBLANES == 0)


def _pages_per_block(kv_pages: Array, pages_per_row: int) -> int:
    """Pages the kernel holds at once: as many as the double buffer's share of VMEM allows."""
    page_bytes = math.prod(kv_pages.shape[1:]) * kv_pages.dtype.itemsize
    return max(1, min(pages_per_row, PAGES_PER_BLOCK, BUFFER_BYTES // (2 * page_bytes)))
