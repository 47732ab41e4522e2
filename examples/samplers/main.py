"""The samplers of `inferlet.sample` by name, on one prompt."""

from inferlet import UsageError, generate, sample, session

SAMPLERS = {
    "greedy": sample.greedy,
    "temperature": sample.temperature,
    "top_k": sample.top_k,
    "top_p": sample.top_p,
    "min_p": sample.min_p,
    "top_a": sample.top_a,
    "typical": sample.typical,
    "tail_free": sample.tail_free,
    "epsilon": sample.epsilon,
    "eta": sample.eta,
    "top_n_sigma": sample.top_n_sigma,
    "xtc": sample.xtc,
    "entropy_temperature": sample.entropy_temperature,
    "dynamic_temperature": sample.dynamic_temperature,
    "mirostat": sample.mirostat,
    "penalties": sample.penalties,
    "dry": sample.dry,
    "no_repeat": sample.no_repeat,
}
DEFAULTS = {"temperature": [0.8], "top_k": [40], "top_p": [0.9], "min_p": [0.05], "top_a": [0.2], "typical": [0.9], "tail_free": [0.95],
            "epsilon": [3e-4], "eta": [2e-3], "top_n_sigma": [1.0], "penalties": [1.1, 0.2, 0.2], "no_repeat": [3]}  # fmt: skip


async def main(input: dict) -> dict:
    names = input.get("sampler", "min_p").split("|")  # "penalties|min_p": one after another
    if unknown := [name for name in names if name not in SAMPLERS]:
        raise UsageError(f"there is no sampler {unknown[0]!r}; there is {', '.join(SAMPLERS)}")
    values = input.get("values")
    chosen = sample.chain(
        *(SAMPLERS[name](*(DEFAULTS.get(name, []) if values is None or len(names) > 1 else values)) for name in names)
    )
    made = generate(
        input.get("prompt", "Once upon a time"),
        sampler=chosen,
        max_tokens=int(input.get("max_tokens", 48)),
        seed=int(input.get("seed", 1)),
    )
    async for item in made:
        session.send(item.text)
    session.send("\n")
    return {"tokens": made.tokens, "reason": made.reason.value}
