"""The bare loop: greedy decoding as one `jax.jit` function over the lowered step, and nothing else.

    python benchmarks/bare_loop.py --rows 1 8 16 32 --cached 64 512

No server, no scheduler, no program: tokens are fed back on the device, the state is donated, steps are queued without a
sync. It is what every other figure is compared with. Parts are timed by leaving them out of the same step.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pie_xla.hub.load import load_params
from pie_xla.hub.store import Store
from pie_xla.kernels.build import library
from pie_xla.kernels.cpu import load
from pie_xla.kernels.ops import Kernel, ops_for
from pie_xla.progress import SILENT
from poem.lower import Loop, LoweredModel, lower
from poem.spec import KV, Attention, Batch, Leaf, Ops, State

SMOLLM2: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "rope_theta": 100000.0,
}


@dataclass(frozen=True)
class NoAttention:
    """The kernels of a model that does not attend: what is left is weights and head."""

    ops: Ops

    views = False

    def kv_page(self, kv: KV, heads: int) -> dict[str, Leaf]:
        """The same pages."""
        return self.ops.kv_page(kv, heads)

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
        """Uses key and value, so that their projections stay."""
        share = query.shape[2] // key.shape[2]
        return query + jnp.repeat(key + value, share, axis=2), pool


def random_params(model: LoweredModel) -> dict[str, jax.Array]:
    """Normal weights of the usual size, seeded."""
    rng = np.random.default_rng(0)
    return {
        name: jnp.asarray(
            np.ones(leaf.shape, leaf.dtype)
            if "norm" in name
            else rng.standard_normal(leaf.shape, np.float32).astype(leaf.dtype) * np.asarray(0.03, leaf.dtype)
        )
        for name, leaf in model.params.items()
    }


def decode_loop(model: LoweredModel, rows: int, cached: int, steps: int) -> tuple[Callable[..., Any], State, Any]:
    """The jitted step (params, state, tokens, starts) -> (state, tokens, starts), a pool and a first input."""
    (group,) = model.groups
    page = group.page_size
    used = -(-(cached + steps) // page)
    table = np.zeros((rows, -(-model.facts.max_context // page)), np.int32)
    table[:, :used] = 1 + np.random.default_rng(1).permutation(rows * used).reshape(rows, used)
    pool = {
        name: jax.random.normal(jax.random.key(2), leaf.shape, leaf.dtype)
        for name, leaf in group.arrays(rows * used + 1).items()
    }
    pages = jnp.asarray(table)
    ones, zeros = jnp.ones(rows, jnp.int32), jnp.zeros(rows, jnp.int32)

    def step(
        params: dict[str, jax.Array], pages: jax.Array, state: State, tokens: jax.Array, starts: jax.Array
    ) -> tuple[State, jax.Array, jax.Array]:
        batch = Batch(
            tokens=tokens[:, None],
            positions=starts[:, None],
            starts=starts,
            counts=ones,
            pages={group.name: pages},
            slots_in=zeros,
            slots_out=zeros,
            readout=jnp.arange(rows, dtype=jnp.int32),
        )
        state, values = model.step(params, state, batch, ("logits",))
        return state, jnp.argmax(values["logits"], axis=-1).astype(jnp.int32), starts + 1

    jitted = jax.jit(step, donate_argnums=(2, 3, 4))
    first = (jnp.arange(rows, dtype=jnp.int32), jnp.full(rows, cached, jnp.int32))
    return lambda params, state, tokens, starts: jitted(params, pages, state, tokens, starts), {group.name: pool}, first


def milliseconds(
    model: LoweredModel, params: dict[str, jax.Array], rows: int, cached: int, steps: int
) -> tuple[float, float]:
    """Milliseconds a step, of the clock and of all cores' work (which neighbours disturb less).

    `steps` are queued, then waited for; the median of three runs after one to compile.
    """
    clock, work = [], []
    step, state, (tokens, starts) = decode_loop(model, rows, cached, 4 * steps)
    for _ in range(4):
        begin, busy = time.perf_counter(), time.process_time()
        for _ in range(steps):
            state, tokens, starts = step(params, state, tokens, starts)
        tokens.block_until_ready()
        clock.append((time.perf_counter() - begin) / steps * 1e3)
        work.append((time.process_time() - busy) / steps * 1e3)
        starts = jnp.full(rows, cached, jnp.int32)
    return statistics.median(clock[1:]), statistics.median(work[1:])


def memory_bandwidth(threads: int) -> float:
    """GB/s at which all cores together read 512 MB of float32."""
    parts = np.array_split(np.ones(128 << 20, np.float32), threads)
    best = 0.0
    for _ in range(3):
        workers = [threading.Thread(target=np.dot, args=(part, part)) for part in parts]
        begin = time.perf_counter()
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        best = max(best, 512e6 * 1.048576 / (time.perf_counter() - begin) / 1e9)
    return best


def peak_flops() -> float:
    """GFLOP/s of a 1024 x 1024 x 1024 float32 product in XLA."""
    x = jnp.ones((1024, 1024))
    product = jax.jit(lambda a: a @ a)
    product(x).block_until_ready()
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        product(x).block_until_ready()
        times.append(time.perf_counter() - begin)
    return 2 * 1024**3 / min(times) / 1e9


def main() -> None:
    """One line per number of rows and cached positions."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 16, 32])
    parser.add_argument("--cached", type=int, nargs="+", default=[64, 512])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--loop", type=Loop, choices=list(Loop), default=Loop.UNROLLED)
    parser.add_argument("--kernel", type=Kernel, choices=[Kernel.XLA, Kernel.CPU], default=Kernel.CPU)
    parser.add_argument(
        "--cache", type=Path, default=Path.home() / ".cache" / "pie-xla", help="where kernels are built"
    )
    parser.add_argument("--store", type=Path, help="directory of imported models: real weights of --model")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--parts", action="store_true", help="also time the step without attention")
    arguments = parser.parse_args()

    if arguments.kernel is Kernel.CPU:
        load(library(arguments.cache, SILENT))
    ops = ops_for(arguments.kernel)
    entry = None if arguments.store is None else Store(arguments.store).open(arguments.model)
    config = SMOLLM2 if entry is None else entry.config
    model = lower(config, ops=ops, loop=arguments.loop)
    bare = lower(config, ops=NoAttention(ops), loop=arguments.loop)
    params = random_params(model) if entry is None else model.pack(load_params(entry, model.stored))
    weights = sum(leaf.nbytes for leaf in model.params.values())
    print(f"memory {memory_bandwidth(2):.1f} GB/s, product {peak_flops():.0f} GFLOP/s, weights {weights / 1e6:.0f} MB")
    print(f"{'rows':>4} {'cached':>6} {'ms/step':>8} {'tokens/s':>9} {'weights GB/s':>12} {'GFLOP/s':>8}", end=" ")
    print(f"{'core ms':>8}  of it attention")
    for rows in arguments.rows:
        rest = milliseconds(bare, params, rows, 0, arguments.steps)[1] if arguments.parts else None
        for cached in arguments.cached:
            ms, work = milliseconds(model, params, rows, cached, arguments.steps)
            flops = 2 * rows * model.facts.param_count
            attention = "" if rest is None else f"{work - rest:.1f}"
            print(
                f"{rows:4} {cached:6} {ms:8.1f} {rows / ms * 1e3:9.1f} {weights / ms / 1e6:12.1f}"
                f" {flops / ms / 1e6:8.0f} {work:8.1f}  {attention}",
                flush=True,
            )


if __name__ == "__main__":
    main()
