"""Continue a sentence, one forward pass per token; the program chooses each token itself."""

from inferlet import chat, model, session
from inferlet.eta import ForwardPass, Pipeline, StateGeometry, WorkingSet, intrinsics, reduce_argmax


async def main(input: dict) -> dict:
    prompt = input.get("prompt", "The capital of France is")
    new = chat.prefix() + model.encode(prompt)  # tokens that the model has not seen yet
    memory, pipe, text = WorkingSet(), Pipeline(), model.TextStream()
    session.send(prompt)
    for _ in range(int(input.get("max_tokens", 24))):
        step = ForwardPass()
        step.embed(new)
        step.state([memory], StateGeometry.folding())
        likeliest = step.epilogue(lambda: reduce_argmax(intrinsics.output(0, "logits")))
        pipe.submit(step)
        new = [await likeliest]
        if new[0] in model.stop_tokens():
            break
        session.send(text.push(new[0]))
    session.send(text.finish() + "\n")
    return {"model": model.name(), "tokens": len(memory)}
