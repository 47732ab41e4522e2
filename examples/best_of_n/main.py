"""Self-consistency: n sampled answers of one prompt, and the result that most of them give."""

import asyncio
import re
from collections import Counter

from inferlet import generate_many, sample, session

QUESTION = "A farmer has 3 baskets with 4 eggs each. How many eggs are there? Think, then end with: The answer is N."


async def main(input: dict) -> dict:
    messages = [{"role": "user", "content": input.get("prompt", QUESTION)}]
    made = generate_many(
        messages,
        int(input.get("n", 5)),
        sampler=sample.temperature(float(input.get("temperature", 0.7))),
        max_tokens=int(input.get("max_tokens", 96)),
        logprobs=0,
        seed=int(input.get("seed", 1)),
    )

    async def follow(one):
        logprobs = [item.logprob async for item in one]
        return one.text, sum(logprobs) / len(logprobs)

    texts = await asyncio.gather(*map(follow, made))
    answers = [(re.findall(r"-?\d+", text) or [None])[-1] for text, _ in texts]
    votes = Counter(answer for answer in answers if answer is not None).most_common()
    likeliest = max(texts, key=lambda one: one[1])[0]
    session.send(likeliest + "\n")
    return {
        "answer": votes[0][0] if votes else None,
        "votes": dict(votes),
        "best_of_n": likeliest,
        "texts": [text for text, _ in texts],
    }
