"""Speculative decoding with two models: a draft proposes, the target checks all proposals at once, and nothing of it visits the host.

Leviathan et al. 2023, "Fast Inference from Transformers via Speculative Decoding", arXiv:2211.17192; Chen et al. 2023, arXiv:2302.01318.
Greedy here: a proposed token stays if it is what the target would have said, so the text is the target's own.
"""

from collections import deque

from inferlet import chat, model, session
from inferlet.eta import (
    Channel,
    ForwardPass,
    Pipeline,
    StateGeometry,
    WorkingSet,
    broadcast,
    cast,
    cumprod,
    gather,
    intrinsics,
    iota,
    reduce_argmax,
    reduce_sum,
    where,
)

ROUNDS_IN_FLIGHT = 2


async def main(input: dict) -> dict:
    tokens = chat.prefix() + model.encode(input.get("prompt", "The capital of France is"))
    name, width = input.get("draft", "draft"), int(input.get("width", 4))
    most, stops = int(input.get("max_tokens", 32)), set(model.stop_tokens())
    target, draft, pipe = WorkingSet(), WorkingSet(model=name), Pipeline()
    block = Channel((width,), "i32")  # what the target checks: the token it said last, and what the draft says follows

    def best():
        return reduce_argmax(intrinsics.output(0, "logits"))

    def begin():
        token = best()
        block.put(broadcast(token, (width,)))
        return token

    def propose(place):
        def step():
            token = best()
            block.put(where(iota(width) == place, token, block.take()))
            return token

        return step

    def verify():
        said, proposed = best(), block.read()  # said[i]: the target's next token after proposed[: i + 1]
        right = cast(said[:-1] == proposed[1:], "i32")
        kept = 1 + reduce_sum(cumprod(right))  # tokens of the block that stay
        token = gather(said, kept - 1)
        block.put(broadcast(token, (width,)))
        return kept, token, proposed

    first = ForwardPass().embed(tokens).state([target], StateGeometry.folding())
    last = first.epilogue(begin)
    pipe.submit(first)
    pipe.submit(ForwardPass(model=name).embed(tokens).state([draft], StateGeometry.folding()))

    said = [await last]
    session.send(model.decode(tokens) + model.decode(said))
    steps = [ForwardPass(model=name).embed(last).state([draft], StateGeometry.buffering()) for _ in range(width)]
    for place, step in enumerate(steps, start=1):
        step.epilogue(propose(place))  # the last one only lets the draft read the last proposal
    check = ForwardPass().embed(block).state([target], StateGeometry.buffering()).readout(range(width))
    check.epilogue(verify)
    rounds, flying = 0, deque()
    while len(said) < most and said[-1] not in stops:
        while len(flying) < ROUNDS_IN_FLIGHT:
            token = last
            for step in steps:
                token = pipe.submit(step.embed(token))
            flying.append(pipe.submit(check))
            kept, last, _ = flying[-1]
            target.commit(kept)
            draft.commit(kept)
        kept, token, proposed = flying.popleft()
        new = [*(await proposed)[1 : await kept], await token]
        new = new[: next((i for i, one in enumerate(new, start=1) if one in stops), most - len(said))]
        session.send(model.decode(new))
        said += new
        rounds += 1
    pipe.cancel()
    session.send("\n")
    return {"tokens": said, "rounds": rounds}
