"""What most programs do, as a program: the language component runs it while it is built (`pie_component.warmup`)."""

from __future__ import annotations

PROGRAM = """
import asyncio

from inferlet import chat, model, session
from inferlet.eta import (
    Channel, ForwardPass, Pipeline, StateGeometry, WorkingSet, exp, intrinsics, reduce_argmax, reduce_max, reduce_sum, where
)


def greedy():
    return reduce_argmax(intrinsics.output(0, "logits"))


def scaled():
    logits = intrinsics.output(0, "logits") / 0.7
    weights = exp(logits - reduce_max(logits))
    kept = where(weights > 0.1, weights, 0.0)
    return reduce_argmax(kept / reduce_sum(kept))


async def step_by_step(prompt, count):
    ws, pipe, tokens, done = WorkingSet(), Pipeline(), list(prompt), 0
    for _ in range(count):
        fwd = ForwardPass()
        fwd.embed(tokens[done:])
        fwd.state([ws], StateGeometry.folding())
        out = fwd.epilogue(greedy)
        pipe.submit(fwd)
        done = len(tokens)
        tokens.append(await out)
        session.send(model.decode(tokens[-1:]))
    pipe.close()
    return tokens


async def ahead(prompt, count, fn):
    tokens = []
    async with Pipeline() as pipe:
        fwd = ForwardPass()
        fwd.embed(prompt)
        fwd.state([WorkingSet().fork()], StateGeometry.folding())
        out = fwd.epilogue(fn)
        first = pipe.submit(fwd)
        fwd.embed(out)
        rest = pipe.run_ahead(fwd, count, depth=4)
        tokens.append(await first)
        async for token in rest:
            tokens.append(token)
            session.send(model.decode([token]))
    return tokens


async def queue(count):
    channel = Channel((), "i32", capacity=4)
    for i in range(count):
        channel.put(i)
        await channel.take()


async def main(input):
    prompt = chat.prefix() + model.encode("The capital")
    tokens = await step_by_step(prompt, 24)
    both = await asyncio.gather(ahead(prompt, 24, greedy), ahead(prompt, 24, scaled))
    await queue(12)
    await asyncio.sleep(0)
    print("warm")
    return {"text": model.decode(tokens), "tokens": both, "score": 0.5}
"""
