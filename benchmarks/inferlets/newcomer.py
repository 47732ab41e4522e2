"""A program with an epilogue that depends on its input's `shape`: each is a program nobody has compiled. Reports when tokens came."""

import time

from inferlet.eta import ForwardPass, Pipeline, StateGeometry, WorkingSet, intrinsics, reduce_argmax


async def main(input: dict) -> dict:
    begun = time.time()
    times = []
    async with Pipeline() as pipe:
        fwd = ForwardPass()
        fwd.embed([1 + i for i in range(input["prompt"])])
        fwd.state([WorkingSet()], StateGeometry.folding())

        def pick():
            logits = intrinsics.output(0, "logits")
            for _ in range(input["shape"]):  # another structure, the same token
                logits = logits * 0.5 + logits * 0.5
            return reduce_argmax(logits)

        out = fwd.epilogue(pick)
        pipe.submit(fwd)
        await out
        times.append(time.time())
        fwd.embed(out)
        async for _ in pipe.run_ahead(fwd, input["tokens"] - 1, depth=4):
            times.append(time.time())
    return {"begun": begun, "times": times}
