"""Best of n by a learned verifier: a linear probe of the hidden state, read from a safetensors file. Natively only.

The probe's score comes with each token, from the same pass; only one float more comes to the host.
"""

import asyncio

import jax.numpy as jnp
import numpy as np
from inferlet import chat, model, sample, session
from inferlet.eta import ForwardPass, Pipeline, StateGeometry, WorkingSet, intrinsics
from safetensors.numpy import load_file


async def main(input: dict) -> dict:
    width = model.outputs()["hidden"][0][0]
    if "probe" in input:
        weights = load_file(input["probe"])  # {"weight": f32[D], "bias": f32[]}
    else:
        weights = {"weight": np.random.default_rng(0).normal(size=width).astype(np.float32), "bias": np.float32(0)}
    weight, bias = (np.asarray(weights[name], np.float32) for name in ("weight", "bias"))
    prompt = chat.prefix() + model.encode(input.get("prompt", "The best thing about the sea is"))
    sampler, most = sample.temperature(float(input.get("temperature", 0.8))), int(input.get("max_tokens", 16))
    shared = WorkingSet()
    if len(prompt) > 1:
        Pipeline().submit(ForwardPass().embed(prompt[:-1]).state([shared], StateGeometry.folding()))

    def draw():
        worth = jnp.dot(intrinsics.output(0, "hidden"), weight) + bias  # of the text so far; the arrays become inputs
        return sampler(), worth

    async def candidate(seed: int):
        pipe, tokens, scores = Pipeline(seed), [], []
        fwd = ForwardPass().embed(prompt[-1:]).state([shared.fork()], StateGeometry.folding())
        out, _ = fwd.epilogue(draw)
        first = pipe.submit(fwd)
        fwd.embed(out)
        results = [(await first[0], await first[1])]
        results += [pair async for pair in pipe.run_ahead(fwd, most)]  # the last pass only scores
        for token, score in results:
            tokens.append(token)
            scores.append(score)
        return scores[-1], tokens[:-1]

    found = await asyncio.gather(*(candidate(seed) for seed in range(1, int(input.get("n", 4)) + 1)))
    best = max(found)
    session.send(model.decode(best[1]) + "\n")
    return {"score": best[0], "scores": [score for score, _ in found], "tokens": best[1]}
