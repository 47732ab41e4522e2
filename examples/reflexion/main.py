"""Reflexion: try, see what a check says, tell the model, try again."""

import re

from inferlet import generate, sample, session

TASK = "Write a sentence of exactly five words about the sea. Answer with the sentence only."


def check(text: str, words: int) -> str | None:
    """What is wrong with an attempt, None if nothing is."""
    count = len(re.findall(r"[\w']+", text))
    return None if count == words else f"It has {count} words, not {words}."


async def main(input: dict) -> dict:
    messages = [{"role": "user", "content": input.get("task", TASK)}]
    attempts: list[str] = []
    for attempt in range(int(input.get("attempts", 4))):
        sampler = sample.temperature(float(input.get("temperature", 0.7)))
        made = generate(
            messages, sampler=sampler, max_tokens=int(input.get("max_tokens", 32)), stop=["\n"], seed=attempt + 1
        )
        attempts.append((await made.all_text()).strip())
        problem = check(attempts[-1], int(input.get("words", 5)))
        session.send(f"{attempts[-1]}  [{problem or 'good'}]\n")
        if problem is None:
            return {"text": attempts[-1], "attempts": len(attempts), "is_good": True}
        ask = f"That was wrong: {problem} Think of what to change, then answer with the new sentence only."
        messages += [{"role": "assistant", "content": attempts[-1]}, {"role": "user", "content": ask}]
    return {"text": attempts[-1], "attempts": len(attempts), "is_good": False}
