"""TOVA: when the cache is full, the position that the newest token looks at least is evicted.

Oren et al. 2024, "Transformers are Multi-State RNNs", arXiv:2401.06104.
"""

from inferlet import model, session
from inferlet.eta import (
    Channel,
    ForwardPass,
    Pipeline,
    StateGeometry,
    WorkingSet,
    broadcast,
    intrinsics,
    reduce_argmax,
)


async def main(input: dict) -> dict:
    prompt = input.get("prompt", "Once upon a time, in a village by the sea, there lived a")
    max_tokens, budget = int(input.get("max_tokens", 40)), int(input.get("budget", 24))
    tokens = model.encode(prompt)
    width = len(tokens) + max_tokens
    ws, scores = WorkingSet(), Channel(width, "f32")
    fwd = ForwardPass()
    fwd.state([ws], StateGeometry.folding())
    fwd.embed(tokens[:1])
    fwd.prologue(lambda: scores.put(broadcast(0.0, (width,))))  # each token's vote counts alone
    fwd.on_attn(lambda: scores.put(scores.take() + intrinsics.attn_scores()), width=width)
    out, vote = fwd.epilogue(lambda: (reduce_argmax(intrinsics.output(0, "logits")), scores.take()))
    live = []
    async with Pipeline() as pipe:
        for at in range(width - 1):
            fwd.embed([tokens[at]])
            pipe.submit(fwd)
            live.append(at)
            if at + 1 == len(tokens):
                tokens.append(await out)
            if len(live) > budget:
                seen = await vote
                weakest = min(live, key=lambda position: seen[position])
                ws.evict([(weakest, weakest + 1)])
                live.remove(weakest)
    made = tokens[width - max_tokens :]
    session.send(prompt + model.decode(made) + "\n")
    return {"tokens": made, "kept": live}
