"""Skeleton of thought: an outline first, then all of its points written side by side."""

import asyncio
import re

from inferlet import generate, grammar, session


async def main(input: dict) -> dict:
    question = input.get("prompt", "How do I stay healthy?")
    points, most = int(input.get("points", 3)), int(input.get("max_tokens", 48))
    outline = await grammar.regex("\n".join(rf"{i}\. [A-Za-z ]{{3,30}}" for i in range(1, points + 1)))
    ask = f"Answer with an outline of {points} short points, nothing else: {question}"
    made = generate([{"role": "user", "content": ask}], grammar=outline.matcher(), max_tokens=40 * points)
    skeleton = await made.all_text()
    session.send(skeleton + "\n\n")

    async def write(point: str) -> str:
        content = (
            f"{question}\n\nThe outline of the answer:\n{skeleton}\n\nWrite one or two sentences on the point: {point}"
        )
        return (await generate([{"role": "user", "content": content}], max_tokens=most).all_text()).strip()

    names = re.findall(r"^\d+\. (.*)$", skeleton, re.MULTILINE)
    texts = await asyncio.gather(*map(write, names))
    session.send("\n".join(f"{name}: {text}" for name, text in zip(names, texts, strict=True)) + "\n")
    return {"points": names, "texts": texts}
