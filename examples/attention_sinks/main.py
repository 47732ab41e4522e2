"""Endless text in bounded memory: the first tokens and a window of the last ones are kept, all others are forgotten."""

from inferlet import evict, generate, sample, session

POLICIES = {
    "all": lambda sinks, window: evict.Policy(),
    "window": lambda sinks, window: evict.Window(window),
    "sinks": evict.Sinks,
}


async def main(input: dict) -> dict:
    policy = POLICIES[input.get("policy", "sinks")](int(input.get("sinks", 4)), int(input.get("window", 128)))
    made = generate(
        input.get("prompt", "Once upon a time"),
        kv=policy,
        sampler=sample.temperature(float(input.get("temperature", 0))),
        max_tokens=int(input.get("max_tokens", 200)),
        model_stops=False,
        logprobs=0,
        seed=1,
    )
    surprise = 0.0
    async for item in made:
        surprise -= item.logprob
        session.send(item.text)
    session.send("\n")
    return {"tokens": made.tokens, "mean_surprise": surprise / len(made.tokens)}
