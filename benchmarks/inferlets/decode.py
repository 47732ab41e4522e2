"""Greedy decoding that never waits for the host: every pass embeds the Output of the one before. Reports when tokens came."""

import time

from inferlet import model
from inferlet.eta import ForwardPass, Pipeline, StateGeometry, WorkingSet, intrinsics, reduce_argmax


async def main(input: dict) -> dict:
    prompt = [1 + (i * 37 + input["stream"] * 11) % 1000 for i in range(input["prompt"])]
    times, tokens = [], []
    async with Pipeline() as pipe:
        fwd = ForwardPass()
        fwd.embed(prompt)
        fwd.state([WorkingSet()], StateGeometry.folding())
        out = fwd.epilogue(lambda: reduce_argmax(intrinsics.output(0, "logits")))
        first = pipe.submit(fwd)
        fwd.embed(out)
        ahead = pipe.run_ahead(fwd, input["tokens"] - 1, depth=input["depth"])
        tokens.append(await first)
        times.append(time.time())
        async for token in ahead:
            tokens.append(token)
            times.append(time.time())
    return {"times": times, "tokens": tokens, "model": model.name()}
