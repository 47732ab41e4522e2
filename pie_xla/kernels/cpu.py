"""Paged attention, rope and norms for CPUs, compiled from `native/`: keys and values are read where they lie, and new ones are written in place.

What they do not do is XlaOps' work, by one rule in each method.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from pie_xla.kernels.xla import XlaOps
from poem.spec import KV, Attention, Batch, Leaf, NormScale

ATTEND, ROTATE, NORM = "pie_attend", "pie_rotate", "pie_rms_norm"
BLOCK = 64  # cells the kernel scores at once; longer pages are whole multiples
_LOADED: dict[Path, ctypes.CDLL] = {}


def load(library: Path) -> str:
    """Make the kernel known to XLA in this process, before executables that call it are loaded or compiled.

    Returns:
        The instruction set it uses here: "avx512", "avx2" or "base".
    """
    if library not in _LOADED:
        found = ctypes.CDLL(str(library))
        found.pie_kernel_name.restype = ctypes.c_char_p
        if not _LOADED:
            for target in (ATTEND, ROTATE, NORM):
                jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(getattr(found, target)), platform="cpu")
        _LOADED[library] = found
    name: bytes = _LOADED[library].pie_kernel_name()
    return name.decode()


@dataclass(frozen=True)
class CpuOps:
    """Attention in C++ where it is float32, else in plain XLA. The kernel has been loaded."""

    reference: XlaOps = field(default_factory=XlaOps)

    @property
    def views(self) -> bool:
        return True

    @property
    def taps(self) -> bool:
        return True

    def kv_page(self, kv: KV, heads: int) -> dict[str, Leaf]:
        """As the reference: one head's cells of a page lie together."""
        return self.reference.kv_page(kv, heads)

    def rotate(self, x: jax.Array, table: tuple[jax.Array, ...]) -> jax.Array:
        """See `poem.spec.Ops.rotate`.

        XLA:CPU works out the table's sines again in each layer, where a call takes them as they are; and the call is one instruction instead
        of forty, of which each executable keeps 3 KB.
        """
        if any(array.dtype != jnp.float32 for array in (x, *table)):
            return self.reference.rotate(x, table)
        turned: jax.Array = jax.ffi.ffi_call(ROTATE, jax.ShapeDtypeStruct(x.shape, x.dtype))(x, *table)
        return turned

    def rms_norm(self, x: jax.Array, weight: jax.Array, eps: float, scale: NormScale) -> jax.Array:
        """See `poem.spec.Ops.rms_norm`."""
        if x.dtype != jnp.float32 or weight.dtype != jnp.float32:
            return self.reference.rms_norm(x, weight, eps, scale)
        plus = 1.0 if scale is NormScale.ONE_PLUS_WEIGHT else 0.0
        call = jax.ffi.ffi_call(NORM, jax.ShapeDtypeStruct(x.shape, x.dtype))
        normed: jax.Array = call(x, weight, eps=np.float32(eps), plus=np.float32(plus))
        return normed

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
        """See `poem.spec.Ops.attend`."""
        page = pool["key"].shape[2]
        floats = all(array.dtype == jnp.float32 for array in (query, key, value, *pool.values()))
        if not floats or (page > BLOCK and page % BLOCK):
            return self.reference.attend(query, key, value, pool, pages, first, batch, how)
        B, Q = batch.positions.shape
        N, words = pages.shape[1], -(-page // 32)
        view = batch.view
        if view is None:
            bases = jnp.broadcast_to(jnp.arange(N, dtype=jnp.int32) * page, (B, N))
            live = jnp.full((B, N, words), -1, jnp.int32)
            window, sinks = jnp.full(B, 1 << 30, jnp.int32), jnp.zeros(B, jnp.int32)
        else:
            bases, live, window, sinks = view.bases, view.live, view.window, view.sinks
        mask = jnp.zeros((B, Q, 0), jnp.int32) if view is None or view.mask is None else view.mask
        shapes = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in (query, pool["key"], pool["value"])]
        call = jax.ffi.ffi_call(ATTEND, shapes, input_output_aliases={3: 1, 4: 2})
        out, new_key, new_value = call(
            query,
            key,
            value,
            pool["key"],
            pool["value"],
            pages,
            jnp.asarray(first, jnp.int32).reshape(1),
            batch.starts,
            batch.counts,
            batch.positions,
            bases,
            live,
            window,
            sinks,
            mask,
            scale=np.float32(how.scale),
            soft_cap=np.float32(how.soft_cap or 0.0),
            layer_window=np.int64(how.window or 0),
        )
        return out, {"key": new_key, "value": new_value}

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
        """See `poem.spec.Ops.scores`."""
        return self.reference.scores(query, pool, pages, first, batch, how, width)

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
        """See `poem.spec.Ops.page_bounds`."""
        return self.reference.page_bounds(query, pool, pages, first, batch, how, width)
