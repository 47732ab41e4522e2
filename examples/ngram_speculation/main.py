"""Prompt lookup: what followed the last time is guessed to follow again, and one pass checks the whole guess."""

from inferlet import chat, model, session, speculate

PROMPT = """Repeat this list, then stop: red apple, green pear, yellow lemon, red apple, green pear, yellow lemon, red apple,"""
DRAFTERS = {"ngram": speculate.NGram, "jacobi": speculate.Jacobi, "junk": speculate.Junk}


async def main(input: dict) -> dict:
    spoken = speculate.speculate(
        chat.prefix() + model.encode(input.get("prompt", PROMPT)),
        DRAFTERS[input.get("drafter", "ngram")](),
        width=int(input.get("width", 6)),
        max_tokens=int(input.get("max_tokens", 64)),
    )
    text = model.TextStream()
    async for token in spoken:
        session.send(text.push(token))
    session.send(text.finish() + "\n")
    return {"tokens": spoken.tokens, "passes": spoken.passes, "proposed": spoken.proposed, "accepted": spoken.accepted}
