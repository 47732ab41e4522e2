"""Contrastive decoding: what a large model says beyond what a small one would say too."""

from inferlet import chat, model, session
from inferlet.eta import (
    Channel,
    ForwardPass,
    Pipeline,
    StateGeometry,
    WorkingSet,
    intrinsics,
    log,
    log_softmax,
    mask_apply,
    param,
    reduce_argmax,
    reduce_max,
)


async def main(input: dict) -> dict:
    amateur = input.get("amateur", model.names()[-1])
    alpha, beta = float(input.get("alpha", 0.1)), float(input.get("beta", 0.5))
    prompt = chat.prefix() + model.encode(input.get("prompt", "The most interesting thing about octopuses is"))
    doubts = Channel(model.vocab_size(), "f32")  # from one model's pass to the other's, on the device
    text, tokens, stops = model.TextStream(), [], model.stop_tokens()

    def doubt():
        doubts.put(log_softmax(intrinsics.output(0, "logits")))

    def contrast():
        sure = log_softmax(intrinsics.output(0, "logits"))
        likely = sure >= reduce_max(sure) + log(param(alpha))
        return reduce_argmax(mask_apply(sure + (sure - doubts.take()) * param(beta), likely))

    async with Pipeline() as pipe:
        small = ForwardPass(amateur).embed(prompt).state([WorkingSet(amateur)], StateGeometry.folding())
        large = ForwardPass().embed(prompt).state([WorkingSet()], StateGeometry.folding())
        small.epilogue(doubt)
        out = large.epilogue(contrast)
        for _ in range(int(input.get("max_tokens", 32))):
            pipe.submit(small)
            token = await pipe.submit(large)
            if token in stops:
                break
            tokens.append(token)
            session.send(text.push(token))
            small.embed(out)
            large.embed(out)
    session.send(text.finish() + "\n")
    return {"tokens": tokens}
