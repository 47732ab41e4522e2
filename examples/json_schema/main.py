"""JSON that a schema allows, whatever the model would rather say."""

import json

from inferlet import generate, grammar, sample, session

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "population": {"type": "integer", "minimum": 0, "maximum": 99999999},
    },
    "required": ["city", "population"],
    "additionalProperties": False,
}


async def main(input: dict) -> dict:
    pattern = input.get("regex")
    compiled = await (grammar.json_schema(input.get("schema", SCHEMA)) if pattern is None else grammar.regex(pattern))
    messages = [{"role": "user", "content": input.get("prompt", "Name a large city as JSON.")}]
    sampler = sample.temperature(float(input.get("temperature", 0)))
    made = generate(
        messages, grammar=compiled.matcher(), sampler=sampler, max_tokens=int(input.get("max_tokens", 96)), seed=1
    )
    async for item in made:
        session.send(item.text)
    session.send("\n")
    return {"value": json.loads(made.text) if pattern is None else made.text, "reason": made.reason.value}
