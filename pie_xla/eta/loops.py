"""Loops on the device. A batch of passes runs until its slowest is done; one that has finished keeps its values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax

Array = Any
Carried = tuple[Array, ...]


def repeat(n: int, turn: Callable[[Array, Carried], Carried], init: Carried) -> Carried:
    """`carried = turn(i, carried)` for i = 0 ... n - 1, i as i32[]."""
    done: Carried = lax.fori_loop(jnp.int32(0), jnp.int32(n), turn, init)
    return done


def repeat_while(
    n: int, test: Callable[[Array, Carried], Array], turn: Callable[[Array, Carried], Carried], init: Carried
) -> Carried:
    """As `repeat`, while `test(i, carried)`, bool[], holds; n turns at most."""

    def holds(index: Array, carried: Carried) -> Array:
        return (index < n) & test(index, carried)

    def step(state: tuple[Array, Array, Carried]) -> tuple[Array, Array, Carried]:
        index, _, carried = state
        made = turn(index, carried)
        return index + 1, holds(index + 1, made), made

    # The answer is carried: JAX's rule for a batch would ask again in the body, to keep what finished lanes hold.
    start = jnp.int32(0)
    done: Carried = lax.while_loop(lambda state: state[1], step, (start, holds(start, init), init))[2]
    return done
