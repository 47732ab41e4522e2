"""Watermarks: generate marked and unmarked text, and let the detector tell them apart."""

import math

from inferlet import generate, model, sample, session, watermark
from inferlet.watermark import Greenlist, Gumbel, Tournament

MARKS = {"greenlist": Greenlist, "gumbel": Gumbel, "tournament": Tournament}


async def main(input: dict) -> dict:
    mark: watermark.Greenlist | watermark.Gumbel | watermark.Tournament
    mark = MARKS[input.get("mark", "tournament")](key=int(input.get("key", 42)))
    prompt = model.encode(input.get("prompt", "The old lighthouse keeper told us a story about"))
    heat = sample.temperature(float(input.get("temperature", 1.0)))
    found = {}
    for name, sampler in (("marked", heat | mark.sampler()), ("plain", heat)):
        made = generate(prompt, sampler=sampler, max_tokens=int(input.get("max_tokens", 120)), seed=1, logprobs=0)
        surprise = [-item.logprob async for item in made]
        session.send(f"[{name}] {made.text}\n")
        seen = mark.detect(prompt[-mark.context :] + made.tokens)
        found[name] = {
            "z": round(seen.z, 3),
            "counted": seen.counted,
            "perplexity": round(math.exp(sum(surprise) / len(surprise)), 2),
        }
    return found
