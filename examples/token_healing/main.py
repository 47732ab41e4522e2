"""Token healing: the prompt's last token is taken back and drawn again under the condition that its text comes first."""

import re

from inferlet import chat, generate, grammar, model, session


async def main(input: dict) -> dict:
    prompt = input.get("prompt", "The address is https:")
    tokens = model.encode(prompt)
    kept, cut = tokens[:-1], model.decode(tokens[-1:], skip_specials=False)
    start = chat.prefix() + kept
    if not start or input.get("heal") is False:
        made = generate(chat.prefix() + tokens, max_tokens=int(input.get("max_tokens", 16)))
        text = await made.all_text()
    else:
        healed = await grammar.regex(re.escape(cut) + r"(.|\n)*")
        made = generate(start, grammar=healed.matcher(), max_tokens=int(input.get("max_tokens", 16)) + 1)
        text = (await made.all_text())[len(cut) :]
    session.send(prompt + text + "\n")
    return {"text": text, "tokens": made.tokens}
