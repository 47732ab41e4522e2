"""The first token after a long prompt, and what a fork of that state costs. Reports when the token came, and seconds a fork."""

import time

from inferlet.eta import ForwardPass, Pipeline, StateGeometry, WorkingSet, intrinsics, reduce_argmax


async def main(input: dict) -> dict:
    head = 7 if input["shared"] else 100 + input["stream"]  # a prompt that begins otherwise shares nothing
    prompt = (
        [head + input["round"] * 1000] + [1 + (i * 37) % 1000 for i in range(input["prompt"] - 2)] + [input["stream"]]
    )
    ws = WorkingSet()
    async with Pipeline() as pipe:
        fwd = ForwardPass()
        fwd.embed(prompt)
        fwd.state([ws], StateGeometry.folding())
        out = fwd.epilogue(lambda: reduce_argmax(intrinsics.output(0, "logits")))
        pipe.submit(fwd)
        token = await out
    came = time.time()
    begun = time.perf_counter()
    forks = [ws.fork() for _ in range(100)]
    return {"came": came, "fork": (time.perf_counter() - begun) / len(forks), "token": token}
