"""Beam search: the beams are rows of one pass, and each goes on in a fork of its parent's state."""

from inferlet import beam, model, session


async def main(input: dict) -> dict:
    found = await beam.search(
        input.get("prompt", "The capital of France is"),
        width=int(input.get("width", 4)),
        max_tokens=int(input.get("max_tokens", 24)),
        length_penalty=float(input.get("length_penalty", 1.0)),
    )
    for one in found:
        session.send(f"{one.score:8.3f} {model.decode(one.tokens)!r}\n")
    return {"tokens": list(found[0].tokens), "logprob": found[0].logprob}
