"""Locally typical sampling in plain `jax.numpy`, its threshold found by a `lax.while_loop`. Natively only: `pie-xla run --native`.

The draw is eta's, so the same seed gives the tokens of `inferlet.sample.typical`.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from inferlet import generate, sample, session
from inferlet.eta import param
from jax import lax


@dataclass(frozen=True)
class Typical(sample.Step):
    mass: float

    def change(self, logits: jax.Array, past: Any) -> jax.Array:
        logs = jax.nn.log_softmax(logits)
        p = jnp.exp(logs)
        entropy = -jnp.sum(jnp.where(p > 0, p * logs, 0.0))
        distance = jnp.abs(logs + entropy)
        wanted = param(self.mass)  # an input; bare it would be compiled in

        def is_wide(bounds):
            low, high = bounds
            middle = (low + high) * 0.5
            return (middle > low) & (middle < high)  # until no f32 lies between

        def halve(bounds):
            low, high = bounds
            middle = (low + high) * 0.5
            enough = jnp.sum(jnp.where(distance <= middle, p, 0.0)) >= wanted
            return jnp.where(enough, low, middle), jnp.where(enough, middle, high)

        high = jnp.max(jnp.where(jnp.isfinite(distance), distance, 0.0))
        _, bound = lax.while_loop(is_wide, halve, (jnp.zeros_like(high), high))
        return jnp.where(distance <= bound, logits, -jnp.inf)


async def main(input: dict) -> dict:
    mass = float(input.get("mass", 0.9))
    sampler = sample.typical(mass) if input.get("eta") else sample.chain(Typical(mass))
    made = generate(
        input.get("prompt", "Once upon a time"),
        sampler=sampler,
        max_tokens=int(input.get("max_tokens", 32)),
        seed=int(input.get("seed", 1)),
    )
    async for item in made:
        session.send(item.text)
    session.send("\n")
    return {"tokens": made.tokens}
