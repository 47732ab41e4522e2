"""Quest: each token looks only at the pages of the cache that its query could care about most, chosen anew in every layer.

Tang et al. 2024, "Quest: Query-Aware Sparsity for Efficient Long-Context LLM Inference", arXiv:2406.10774.
"""

from inferlet import model, session
from inferlet.eta import ForwardPass, Pipeline, StateGeometry, WorkingSet, intrinsics, reduce_argmax, top_k


def best_pages(count: int):
    """A layer stage: keep the `count` pages whose keys can score highest against the query; the one being written always stays."""

    def select():
        bounds = intrinsics.page_bounds()  # f32[J]: of each page, the most that any of its keys can score
        kept = min(count, bounds.shape[0])
        intrinsics.keep_pages(0, bounds >= top_k(bounds, kept)[0][kept - 1])

    return select


async def main(input: dict) -> dict:
    prompt = input.get("prompt", "Once upon a time, in a village by the sea, there lived a")
    max_tokens, pages = int(input.get("max_tokens", 24)), int(input.get("pages", 3))
    tokens = model.encode(prompt)
    fwd = ForwardPass()
    fwd.embed(tokens)
    fwd.state([WorkingSet()], StateGeometry.folding())
    fwd.on_attn_proj(best_pages(pages), width=len(tokens) + max_tokens)
    out = fwd.epilogue(lambda: reduce_argmax(intrinsics.output(0, "logits")))
    made = []
    async with Pipeline() as pipe:
        made.append(await pipe.submit(fwd))
        fwd.embed(out)  # from here on no token visits the host
        async for token in pipe.run_ahead(fwd, max_tokens - 1):
            made.append(token)
    session.send(prompt + model.decode(made) + "\n")
    return {"tokens": made, "pages": pages}
