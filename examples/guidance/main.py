"""Classifier-free guidance: two contexts in one pass, and each token drawn from what one says beyond the other."""

from inferlet import chat, model, sample, session
from inferlet.eta import ForwardPass, Pipeline, StateGeometry, WorkingSet, intrinsics, log_softmax, param


async def main(input: dict) -> dict:
    """`mode` guidance: without - strength * difference; context_aware: the same with strength 1 + alpha."""
    question = input.get("prompt", "The weather today is")
    context = input.get("context", "You are a pirate and talk like one. ")
    strength, sampler = float(input.get("strength", 1.5)), sample.temperature(float(input.get("temperature", 0)))
    tokens, text, stops = [], model.TextStream(), model.stop_tokens()

    def guided():
        held = log_softmax(intrinsics.output(0, "logits"))
        free = log_softmax(intrinsics.output(1, "logits"))
        return sampler.pick(held + (held - free) * param(strength - 1.0))

    async with Pipeline(seed=int(input.get("seed", 1))) as pipe:
        rows = [chat.prefix() + model.encode(context + question), chat.prefix() + model.encode(question)]
        fwd = ForwardPass().embed(rows).state([WorkingSet(), WorkingSet()], StateGeometry.folding())
        out = fwd.epilogue(guided)
        first = pipe.submit(fwd)
        fwd.embed([out, out])  # both rows go on with the token that was drawn from both
        ahead = pipe.run_ahead(fwd, int(input.get("max_tokens", 32)) - 1)
        token = await first
        while token is not None and token not in stops:
            tokens.append(token)
            session.send(text.push(token))
            token = await anext(ahead, None)
    session.send(text.finish() + "\n")
    return {"tokens": tokens}
