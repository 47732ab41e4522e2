"""Text completion at the device's own pace: the host never sits between two tokens.

Each pass embeds the Output of the pass before, so a token goes from the sampler to the next embedding without
visiting the host. The program stays a few passes ahead and reads tokens as they arrive.
"""

from inferlet import chat, model, sample, session
from inferlet.eta import ForwardPass, Pipeline, StateGeometry, WorkingSet

STORY = "Once upon a time, in a village by the sea, there lived a clockmaker who"


async def main(input: dict) -> dict:
    prompt = input.get("prompt", STORY)
    tokens = chat.prefix() + model.encode(prompt)
    max_tokens = min(int(input.get("max_tokens", 64)), model.context_length() - len(tokens))
    if max_tokens < 1:
        raise ValueError(
            f"the prompt has {len(tokens)} tokens; the context of {model.name()} is {model.context_length()}"
        )
    sampler = sample.sampler(
        temperature=float(input.get("temperature", 0.0)),
        top_p=float(input.get("top_p", 1.0)),
    )

    text, stop, answer = model.TextStream(), set(model.stop_tokens()), []
    session.send(prompt)
    async with Pipeline(input.get("seed")) as pipe:
        fwd = ForwardPass()
        fwd.embed(tokens)  # of any length: the engine computes a long prompt in chunks, beside everybody else's tokens
        fwd.state([WorkingSet()], StateGeometry.folding())
        out = fwd.epilogue(sampler)
        first = pipe.submit(fwd)

        fwd.embed(out)  # from now on: the token of the submit before, still on the device
        ahead = pipe.run_ahead(fwd, max_tokens - 1, depth=int(input.get("depth", 4)))
        token = await first
        while token is not None and token not in stop:
            answer.append(token)
            session.send(text.push(token))
            token = await anext(ahead, None)
        pipe.cancel()  # passes that ran ahead of a stop token
    session.send(text.finish() + "\n")
    return {"prompt_tokens": len(tokens), "tokens": len(answer), "stopped": token is not None}
