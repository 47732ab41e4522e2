"""JSON of a schema, where the tokens that the schema leaves no choice about cost no pass of their own."""

import json

from inferlet import chat, grammar, model, session, speculate

SCHEMA = {
    "type": "object",
    "properties": {
        "first_name": {"type": "string", "maxLength": 12},
        "favourite_colour": {"enum": ["red", "green", "blue"]},
        "is_a_student": {"type": "boolean"},
    },
    "required": ["first_name", "favourite_colour", "is_a_student"],
    "additionalProperties": False,
}


async def main(input: dict) -> dict:
    messages = [{"role": "user", "content": input.get("prompt", "Describe a person as JSON.")}]
    matcher = (await grammar.json_schema(input.get("schema", SCHEMA))).matcher()
    drafter = speculate.Junk() if input.get("junk") else speculate.Forced(matcher, speculate.NGram())
    spoken = speculate.speculate(
        chat.render(messages),
        drafter,
        grammar=matcher,
        width=int(input.get("width", 6)),
        max_tokens=int(input.get("max_tokens", 96)),
    )
    text = model.decode(await spoken.all_tokens())
    session.send(text + "\n")
    return {
        "value": json.loads(text),
        "tokens": len(spoken.tokens),
        "passes": spoken.passes,
        "accepted": spoken.accepted,
    }
