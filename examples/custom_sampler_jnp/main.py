"""The sampler of `../custom_sampler` in plain `jax.numpy`. Runs natively only: `pie-xla run --native`.

The randomness is eta's, so the same seed draws the same tokens as the eta version.
"""

import jax
import jax.numpy as jnp
from inferlet import chat, model, session
from inferlet.eta import ForwardPass, Pipeline, StateGeometry, WorkingSet, gumbel, intrinsics, param


def nucleus(temperature: float, top_p: float):
    """An epilogue in jnp. `param` makes the two numbers inputs of the program; bare they would be compiled in."""

    def draw() -> jax.Array:
        logits = intrinsics.output(0, "logits") / param(temperature)  # f32[V], a tracer: any jnp or lax code may follow
        probabilities = jax.nn.softmax(logits)
        order = jnp.argsort(-probabilities)
        before = jnp.cumsum(probabilities[order]) - probabilities[order]  # mass of the likelier tokens
        keep = jnp.zeros(logits.shape, bool).at[order].set(before < param(top_p))
        noise = gumbel(intrinsics.vocab())
        return jnp.argmax(jnp.where(keep, logits + noise, -jnp.inf)).astype(jnp.int32)

    return draw


async def main(input: dict) -> dict:
    prompt = input.get("prompt", "My favourite thing about winter is")
    max_tokens = int(input.get("max_tokens", 32))
    epilogue = nucleus(float(input.get("temperature", 0.8)), float(input.get("top_p", 0.9)))
    tokens, text = [], model.TextStream()
    session.send(prompt)
    async with Pipeline(seed=int(input.get("seed", 1))) as pipe:
        fwd = ForwardPass()
        fwd.embed(chat.prefix() + model.encode(prompt))
        fwd.state([WorkingSet()], StateGeometry.folding())
        out = fwd.epilogue(epilogue)
        for _ in range(max_tokens):
            tokens.append(await pipe.submit(fwd))
            session.send(text.push(tokens[-1]))
            fwd.embed(out)
    session.send(text.finish() + "\n")
    return {"tokens": tokens}
