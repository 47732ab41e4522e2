"""Tree of thought: several next thoughts for each of the best so far, weighed by the model itself."""

import math

from inferlet import chat, generate, generate_many, model, sample, session

TASK = "Write a story of three sentences about a lost key."


async def worth(task: str, text: str) -> float:
    """How much likelier the model finds it that this is a good beginning than that it is not."""
    content = f"{task}\n\nAn answer begins like this: {text}\n\nIs it a good beginning? Answer yes or no."
    item = await anext(generate([{"role": "user", "content": content}], max_tokens=1, logprobs=20))
    found = {"yes": -math.inf, "no": -math.inf}
    for token, logprob in item.top:
        word = model.decode([token]).strip().lower()
        if word in found:
            found[word] = max(found[word], logprob)
    return max(found["yes"], -99.0) - max(found["no"], -99.0)


async def main(input: dict) -> dict:
    task, width, breadth = input.get("task", TASK), int(input.get("width", 2)), int(input.get("breadth", 3))
    prompt = chat.render([{"role": "user", "content": task}])
    best = [(0.0, "")]
    for depth in range(int(input.get("depth", 3))):
        options: dict[str, float] = {}
        for at, (_, text) in enumerate(best):
            made = generate_many(
                prompt + model.encode(text),
                breadth,
                sampler=sample.top_p(0.9),
                max_tokens=int(input.get("max_tokens", 32)),
                stop=[". ", "\n"],
                seed=1 + 100 * depth + 10 * at,
            )
            for one in made:
                thought = text + (await one.all_text()).strip("\n") + (". " if one.stop is not None else "")
                options.setdefault(thought, await worth(task, thought))
        best = sorted(((value, text) for text, value in options.items()), reverse=True)[:width]
    session.send(best[0][1] + "\n")
    return {"text": best[0][1], "worth": round(best[0][0], 2), "left": len(best)}
