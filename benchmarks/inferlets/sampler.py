"""One lane of the samplers' benchmark: so many tokens with a sampler, and when each came."""

import time

from inferlet import generate, sample, watermark

SAMPLERS = {
    "greedy": sample.greedy,
    "temperature": lambda: sample.temperature(0.8),
    "usual": lambda: sample.sampler(0.8, 40, 0.95, 0.02),
    "typical": lambda: sample.typical(0.9),
    "tail_free": lambda: sample.tail_free(0.95),
    "eta": lambda: sample.eta(2e-3),
    "xtc": lambda: sample.xtc(0.1, 0.5),
    "mirostat": lambda: sample.mirostat(5.0),
    "entropy_temperature": lambda: sample.entropy_temperature(),
    "penalties": lambda: sample.penalties(1.1, 0.2, 0.2),
    "dry": lambda: sample.dry(),
    "greenlist": lambda: watermark.Greenlist(1).sampler(),
    "gumbel": lambda: watermark.Gumbel(1).sampler(),
    "tournament": lambda: watermark.Tournament(1).sampler(),
}


async def main(input: dict) -> list[float]:
    tokens = [1 + (input["lane"] * 131 + i * 17) % 1000 for i in range(input["prompt"])]
    made = generate(
        tokens, sampler=SAMPLERS[input["sampler"]](), max_tokens=input["tokens"], model_stops=False, seed=input["lane"]
    )
    return [time.time() async for _ in made]
