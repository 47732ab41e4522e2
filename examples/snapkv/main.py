"""SnapKV: the prompt's last tokens say which of its positions matter; the others are evicted before the answer begins.

Li et al. 2024, "SnapKV: LLM Knows What You are Looking for Before Generation", arXiv:2404.14469.
"""

from inferlet import model, session
from inferlet.eta import Channel, ForwardPass, Pipeline, StateGeometry, WorkingSet, intrinsics, reduce_argmax

STORY = (
    "Anna lives in Lisbon and works as a baker. Every morning she walks to the harbour to watch the boats. "
    "Her brother Tom is a doctor in Oslo, and their friend Mia paints houses in Rome. "
    "Question: Where does Anna live? Answer: Anna lives in"
)


def pick():
    return reduce_argmax(intrinsics.output(0, "logits"))


async def main(input: dict) -> dict:
    prompt = input.get("prompt", STORY)
    max_tokens, budget = int(input.get("max_tokens", 12)), int(input.get("budget", 24))
    observers, pool = int(input.get("observers", 8)), int(input.get("pool", 5))
    tokens = model.encode(prompt)
    before = max(1, len(tokens) - observers)
    ws, scores = WorkingSet(), Channel(len(tokens), "f32")
    scores.put([0.0] * len(tokens))
    made = []
    async with Pipeline() as pipe:
        prefix = ForwardPass()
        prefix.embed(tokens[:before])
        prefix.state([ws], StateGeometry.folding())
        pipe.submit(prefix)
        voter = ForwardPass()
        voter.embed(tokens[:1])
        voter.state([ws], StateGeometry.folding())
        voter.on_attn(lambda: scores.put(scores.take() + intrinsics.attn_scores()), width=len(tokens))
        out = voter.epilogue(pick)
        for token in tokens[before:]:  # a stage sees one token of a row: the observers come one by one
            voter.embed([token])
            pipe.submit(voter)
        made.append(await out)
        votes = (await scores.take())[:before]
        half = pool // 2
        smooth = [max(votes[max(0, at - half) : at + half + 1]) for at in range(before)]
        kept = sorted(sorted(range(before), key=lambda at: -smooth[at])[:budget])
        ws.evict([(at, at + 1) for at in range(before) if at not in kept])
        fwd = ForwardPass()
        fwd.embed(made)
        fwd.state([ws], StateGeometry.folding())
        out = fwd.epilogue(pick)
        made.append(await pipe.submit(fwd))
        fwd.embed(out)
        async for token in pipe.run_ahead(fwd, max_tokens - 2):
            made.append(token)
    session.send(prompt + model.decode(made) + "\n")
    return {"tokens": made, "kept": kept, "of": before}
