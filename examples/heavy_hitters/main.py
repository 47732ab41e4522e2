"""H2O: the cache keeps the positions that later tokens have looked at most, and the latest ones; all others are evicted.

Zhang et al. 2023, "H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language Models", arXiv:2306.14048.
"""

from inferlet import model, session
from inferlet.eta import Channel, ForwardPass, Pipeline, StateGeometry, WorkingSet, intrinsics, reduce_argmax


async def main(input: dict) -> dict:
    prompt = input.get("prompt", "Once upon a time, in a village by the sea, there lived a")
    max_tokens, budget = int(input.get("max_tokens", 40)), int(input.get("budget", 24))
    recent = int(input.get("recent", budget // 2))
    tokens = model.encode(prompt)
    width = len(tokens) + max_tokens
    ws, scores = WorkingSet(), Channel(width, "f32")
    scores.put([0.0] * width)
    fwd = ForwardPass()
    fwd.state([ws], StateGeometry.folding())
    fwd.embed(tokens[:1])  # one by one, so that every token of the prompt casts its vote
    # Summed over layers and tokens: the channel is what one layer hands to the next, and one pass to the next.
    fwd.on_attn(lambda: scores.put(scores.take() + intrinsics.attn_scores()), width=width)
    fwd.epilogue(lambda: reduce_argmax(intrinsics.output(0, "logits")))
    live, at = [], 0
    async with Pipeline() as pipe:
        while at < width - 1:
            fwd.embed([tokens[at]])
            token = await pipe.submit(fwd)
            live.append(at)
            at += 1
            if at == len(tokens):
                tokens.append(token)
            if len(live) > budget:  # the weakest of those that are not recent
                total = await scores.take()
                scores.put(total)
                weakest = min(live[: len(live) - recent], key=lambda position: total[position])
                ws.evict([(weakest, weakest + 1)])
                live.remove(weakest)
    made = tokens[width - max_tokens :]
    session.send(prompt + model.decode(made) + "\n")
    return {"tokens": made, "kept": live}
