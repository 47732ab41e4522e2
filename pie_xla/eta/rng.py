"""Randomness as a pure function: threefry-2x32 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3").

The words of one stream of one pass are `threefry(threefry(seed, (ordinal, stream)), (0, j))`: word 2j and word 2j+1.
In iteration i of a loop the seed is `threefry(seed, (i, 2**31))`. A program's own keys are u32[2]: the words of a key are
`threefry(key, (0, j))`, and keys are derived from keys by counters whose second word no word's counter has.
Nothing depends on the row, the step, the batch or the backend.
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
_FOLD, _SPLIT, _SEED = 1 << 31, (1 << 31) + 1, (1 << 31) + 2


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


def words(key: Pair, count: int) -> Array:
    """u32[count] words of a key."""
    half = (count + 1) // 2
    low = lax.iota(jnp.uint32, half)
    return jnp.stack(threefry(key, (jnp.zeros_like(low), low)), axis=-1).reshape(2 * half)[:count]


def seeded(seed: Array) -> Pair:
    """The key of u32[] `seed`."""
    zero = jnp.zeros_like(seed)
    return threefry((zero, zero), (seed, jnp.full_like(seed, _SEED)))


def fold_in(key: Pair, data: Array) -> Pair:
    """Another key for each u32[] `data`."""
    return threefry(key, (data, jnp.full_like(data, _FOLD)))


def split(key: Pair, n: int) -> Pair:
    """n keys, as two u32[n]; none is one of `fold_in`."""
    index = lax.iota(jnp.uint32, n)
    return threefry(key, (index, jnp.full_like(index, _SPLIT)))


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
        return words(self.key(stream), count)

    def key(self, stream: int) -> Pair:
        """The key of a stream."""
        return threefry(self._key, (self._ordinal, jnp.full_like(self._ordinal, stream)))

    def iteration(self, index: Array) -> Draw:
        """The draw of loop iteration `index` (u32[])."""
        draw = Draw.__new__(Draw)
        draw._key = fold_in(self._key, index)
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
        return self.words(self.key(stream), count)

    def key(self, stream: int) -> tuple[int, int]:
        return self._threefry(self._key, (self._ordinal, stream))

    @classmethod
    def words(cls, key: tuple[int, int], count: int) -> np.ndarray:
        made = [word for j in range((count + 1) // 2) for word in cls._threefry(key, (0, j))]
        return np.asarray(made[:count], np.uint32)

    @classmethod
    def seeded(cls, seed: int) -> tuple[int, int]:
        return cls._threefry((0, 0), (seed, _SEED))

    @classmethod
    def fold_in(cls, key: tuple[int, int], data: int) -> tuple[int, int]:
        return cls._threefry(key, (data, _FOLD))

    @classmethod
    def split(cls, key: tuple[int, int], index: int) -> tuple[int, int]:
        return cls._threefry(key, (index, _SPLIT))

    def iteration(self, index: int) -> OracleDraw:
        return OracleDraw(self.fold_in(self._key, int(index)), self._ordinal)
