"""Keys that a program derives itself, and draws by such a key: the same key gives the same values, wherever it is used.

A draw `keyed_x` is what the SDKs call `x(..., key=key)`.
"""

from __future__ import annotations

from math import prod
from typing import Any

import jax.numpy as jnp
import numpy as np

from pie_xla.eta import rng
from pie_xla.eta.op import Op, family
from pie_xla.eta.ops.random import GUMBEL, NORMAL, UNIFORM, Law, pick, pick_oracle
from pie_xla.eta.rules import MAX_STREAM, Attr

Array = Any
_op = family("keyed random")

_SHAPE = Attr("shape", "shape", "extents of the result")
_STREAM = Attr("stream", "int", "which independent stream of the pass; set when traced", 0, MAX_STREAM - 1)
_KEYED = "key: u32[2] -> f32[*shape]"
_BITS = Law(lambda words: words, lambda words: words)


def _word(x: Array) -> Array:
    return x.astype(jnp.uint32)


def _fold_in(key: Array, data: Array) -> Array:
    return jnp.stack(rng.fold_in((key[0], key[1]), _word(data)))


def _split(key: Array, n: int) -> Array:
    return jnp.stack(rng.split((key[0], key[1]), n), axis=-1)


def _u32(pairs: Any) -> Array:
    return np.asarray(pairs, np.uint32)


def _ints(key: np.ndarray) -> tuple[int, int]:
    return int(key[0]), int(key[1])


def _word_oracle(x: np.ndarray) -> int:
    return int(x) & 0xFFFFFFFF


OPS: tuple[Op, ...] = (
    _op(
        "pass_key", "-> u32[2]", "A key of this pass: another one for each seed, pass, stream and iteration of a loop.",
        lambda draw, stream: jnp.stack(draw.key(stream)), lambda draw, stream: _u32(draw.key(stream)),
        attrs=(_STREAM,), random=True,
    ),
    _op(
        "seed_key", "seed: int[] -> u32[2]", "The key of a number.",
        lambda seed: jnp.stack(rng.seeded(_word(seed))), lambda seed: _u32(rng.OracleDraw.seeded(_word_oracle(seed))),
    ),
    _op(
        "fold_in", "key: u32[2], data: int[] -> u32[2]", "Another key for each number.",
        _fold_in, lambda key, data: _u32(rng.OracleDraw.fold_in(_ints(key), _word_oracle(data))),
    ),
    _op(
        "split_key", "key: u32[2] -> u32[n, 2]", "n keys that no `fold_in` gives.",
        _split, lambda key, n: _u32([rng.OracleDraw.split(_ints(key), i) for i in range(n)]),
        attrs=(Attr("n", "int", "how many", 1, 1 << 20, 2),), cost="64 * n",
    ),
    _op(
        "random_bits", "key: u32[2] -> u32[*shape]", "Random words of a key.", _BITS.keyed, _BITS.keyed_oracle,
        attrs=(_SHAPE,), cost="64 * elements",
    ),
    _op(
        "keyed_uniform", _KEYED, "As uniform, by a key.", UNIFORM.keyed, UNIFORM.keyed_oracle,
        attrs=(_SHAPE,), cost="64 * elements",
    ),
    _op(
        "keyed_gumbel", _KEYED, "As gumbel, by a key.", GUMBEL.keyed, GUMBEL.keyed_oracle,
        attrs=(_SHAPE,), cost="80 * elements",
    ),
    _op(
        "keyed_normal", _KEYED, "As normal, by a key.", NORMAL.keyed, NORMAL.keyed_oracle,
        attrs=(_SHAPE,), cost="200 * elements",
    ),
    _op(
        "keyed_categorical", "key: u32[2], x: f32[*s, n] -> i32[*s]", "As categorical, by a key.",
        lambda key, x: pick(rng.words((key[0], key[1]), prod(x.shape[:-1])), x),
        lambda key, x: pick_oracle(rng.OracleDraw.words(_ints(key), prod(x.shape[:-1])), x), cost="16 * elements",
    ),
)  # fmt: skip
