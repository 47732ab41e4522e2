"""Randomness as a pure function: threefry-2x32 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3").

The words of one stream of one pass are `threefry(threefry(seed, (ordinal, stream)), (0, j))`: word 2j and word 2j+1.
In iteration i of a loop the seed is `threefry(seed, (i, 2**31))`. Nothing depends on the row, the step, the batch or
the backend.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

Array = Any
Pair = tuple[Array, Array]

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA
_LOOP = 1 << 31


def threefry(key: Pair, counter: Pair) -> Pair:
    """Twenty rounds on u32 arrays of JAX or NumPy; written out, so that XLA fuses them into what consumes the words."""
    k0, k1 = key
    dtype = k0.dtype.type
    keys = (k0, k1, k0 ^ k1 ^ dtype(_PARITY))
    x, y = counter[0] + keys[0], counter[1] + keys[1]
    for group in range(5):
        for rotation in _ROTATIONS[group % 2]:
            x = x + y
            y = ((y << dtype(rotation)) | (y >> dtype(32 - rotation))) ^ x
        x = x + keys[(group + 1) % 3]
        y = y + keys[(group + 2) % 3] + dtype(group + 1)
    return x, y


class Draw:
    """The random words of one pass, in JAX.

    Args:
        key: u32[2], the pipeline's seed. ordinal: u32[], the pass's number in its pipeline.
    """

    def __init__(self, key: Array, ordinal: Array) -> None:
        self._key = (key[0], key[1])
        self._ordinal = ordinal

    def bits(self, stream: int, count: int) -> Array:
        """u32[count] words of a stream."""
        sub = threefry(self._key, (self._ordinal, jnp.full_like(self._ordinal, stream)))
        half = (count + 1) // 2
        low = lax.iota(jnp.uint32, half)
        words = threefry(sub, (jnp.zeros_like(low), low))
        return jnp.stack(words, axis=-1).reshape(2 * half)[:count]

    def iteration(self, index: Array) -> Draw:
        """The draw of loop iteration `index` (u32[])."""
        draw = Draw.__new__(Draw)
        draw._key = threefry(self._key, (index, jnp.full_like(index, _LOOP)))
        draw._ordinal = self._ordinal
        return draw


def uniform(words: Array) -> Array:
    """f32 in the open interval (0, 1) from u32 words: odd multiples of 2**-24, so that neither end is ever reached."""
    return ((words >> np.uint32(9)).astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-23)


def gumbel(words: Array) -> Array:
    """f32 standard Gumbel values: -log(E), E = -log(1 - v), with v in (0, 1) fine near 0: the upper tail is right."""
    v = (words.astype(jnp.float32) + np.float32(0.5)) * np.float32(2.0**-32)
    return -jnp.log(-jnp.log1p(-jnp.minimum(v, np.float32(1 - 2.0**-24))))


def normal(words: Array) -> Array:
    """f32[N] standard normal values from u32[2 * N] words: radius from the even ones, fine in the tails, angle from the odd."""
    pairs = words.reshape(-1, 2)
    v = (pairs[:, 0].astype(jnp.float32) + np.float32(0.5)) * np.float32(2.0**-32)
    radius = jnp.sqrt(-2.0 * jnp.log(jnp.minimum(v, np.float32(1 - 2.0**-24))))
    return radius * jnp.cos(uniform(pairs[:, 1]) * np.float32(2 * np.pi))


class OracleDraw:
    """The same words in plain Python integers, from the paper's definition."""

    def __init__(self, key: tuple[int, int], ordinal: int) -> None:
        self._key, self._ordinal = (int(key[0]), int(key[1])), int(ordinal)

    @staticmethod
    def _threefry(key: tuple[int, int], counter: tuple[int, int]) -> tuple[int, int]:
        mask = 0xFFFFFFFF
        schedule = [key[0], key[1], _PARITY ^ key[0] ^ key[1]]
        x, y = (counter[0] + key[0]) & mask, (counter[1] + key[1]) & mask
        for round_ in range(20):
            turn = _ROTATIONS[round_ // 4 % 2][round_ % 4]
            x = (x + y) & mask
            y = ((y << turn | y >> (32 - turn)) & mask) ^ x
            if round_ % 4 == 3:
                step = round_ // 4 + 1
                x = (x + schedule[step % 3]) & mask
                y = (y + schedule[(step + 1) % 3] + step) & mask
        return x, y

    def bits(self, stream: int, count: int) -> np.ndarray:
        sub = self._threefry(self._key, (self._ordinal, stream))
        words = [word for j in range((count + 1) // 2) for word in self._threefry(sub, (0, j))]
        return np.asarray(words[:count], np.uint32)

    def iteration(self, index: int) -> OracleDraw:
        return OracleDraw(self._threefry(self._key, (int(index), _LOOP)), self._ordinal)
