"""A sampler of one's own: temperature and nucleus (top-p) sampling written in eta, compiled into the model's step.

Holtzman et al. 2019, "The Curious Case of Neural Text Degeneration", arXiv:1904.09751.
"""

from inferlet import chat, model, session
from inferlet.eta import (
    ForwardPass,
    Pipeline,
    StateGeometry,
    WorkingSet,
    gumbel,
    intrinsics,
    mask_apply,
    pivot_cummass_le,
    reduce_argmax,
    softmax,
)


def nucleus(temperature: float, top_p: float):
    """An epilogue that draws one token. The two numbers are inputs of the program: other values compile nothing."""

    def draw():
        logits = intrinsics.output(0, "logits") / temperature  # f32[V]
        keep = pivot_cummass_le(softmax(logits), top_p)  # the likeliest tokens that together have mass top_p
        noise = gumbel(intrinsics.vocab())  # keyed by the pipeline's seed and the pass, not by the batch
        return reduce_argmax(mask_apply(logits + noise, keep))  # the Gumbel trick: a draw from the softmax

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
