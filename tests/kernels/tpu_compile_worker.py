"""Compiles SmolLM2-135M's steps for a v5e:2x2 slice, on a machine without a TPU, and prints what came out as JSON.

Run by test_tpu_compile.py in a process of its own: libtpu reads its environment once, when it is loaded.
"""

from __future__ import annotations

import json
import time
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec

from pie_xla.kernels.tpu import TpuOps
from pie_xla.parallel import ShardingRules, make_mesh, placement
from poem.lower import Loop, lower
from poem.spec import KV, Batch

SMOLLM2_135M: dict[str, Any] = {
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
    "rope_theta": 100000.0,
    "tie_word_embeddings": True,
}
PAGE = 16
PAGES = 8192  # 131072 positions


def main() -> None:
    """Both steps, decode of 16 rows and prefill of 4 x 128 tokens."""
    topology = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2")
    mesh = make_mesh(topology.devices)
    place = placement(mesh, ShardingRules())
    ops = TpuOps(mesh)
    model = lower(SMOLLM2_135M, ops=ops, place=place, dtype="bfloat16", page_size=PAGE, loop=Loop.SCAN)
    whole = NamedSharding(mesh, PartitionSpec())

    def ints(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=whole)

    def struct(leaf: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place(leaf))

    params = {name: struct(leaf) for name, leaf in model.params.items()}
    state = {g.name: {name: struct(leaf) for name, leaf in g.arrays(PAGES).items()} for g in model.groups}
    pool = sum(leaf.nbytes for g in model.groups for leaf in g.arrays(PAGES).values())
    report: dict[str, Any] = {"pool": pool, "padding": str(ops.padding(KV(3, 64, PAGE, "bfloat16"), 9))}
    for name, rows, width in (("decode", 16, 1), ("prefill", 4, 128)):
        batch = Batch(
            tokens=ints(rows, width),
            positions=ints(rows, width),
            starts=ints(rows),
            counts=ints(rows),
            pages={"full": ints(rows, 8192 // PAGE)},
            slots_in=ints(rows),
            slots_out=ints(rows),
            readout=ints(rows),
        )
        began = time.monotonic()
        lowered = jax.jit(model.step, donate_argnums=1, static_argnums=3).lower(params, state, batch, ("logits",))
        executable = lowered.compile()
        memory = executable.memory_analysis()
        text = executable.as_text()
        report[name] = {
            "seconds": time.monotonic() - began,
            "arguments": memory.argument_size_in_bytes,
            "aliased": memory.alias_size_in_bytes,
            "outputs": memory.output_size_in_bytes,
            "temporary": memory.temp_size_in_bytes,
            "kernels": text.count('custom_call_target="tpu_custom_call"'),
            "sums": text.count("all-reduce"),
            "loops": text.count(" while("),
        }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
