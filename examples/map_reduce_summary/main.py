"""Map-reduce: the parts of a long text are summed up side by side, then their summaries."""

import asyncio

from inferlet import generate, session

TEXT = """The lighthouse was built in 1821 after two ships were lost. Its first keeper, a former sailor, lived there for forty years.

In 1905 the oil lamp was replaced by an electric one. The village had no electricity yet, so the lighthouse had its own generator.

Since 1987 nobody has lived in the tower. It is a museum now, and the light is steered from the harbour office."""


async def summary(text: str, max_tokens: int) -> str:
    messages = [{"role": "user", "content": f"Sum this up in one sentence:\n\n{text}"}]
    return (await generate(messages, max_tokens=max_tokens).all_text()).strip()


async def main(input: dict) -> dict:
    most = int(input.get("max_tokens", 48))
    parts = [part for part in input.get("text", TEXT).split("\n\n") if part.strip()]
    summaries = await asyncio.gather(*(summary(part, most) for part in parts))
    whole = await summary("\n".join(summaries), most) if len(parts) > 1 else summaries[0]
    session.send(whole + "\n")
    return {"parts": summaries, "summary": whole}
