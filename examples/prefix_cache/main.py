"""A long shared beginning, computed once and found again by name: by this program and by every later one of the tenant."""

from inferlet import chat, generate, model, prefix, session

RULES = "You are a helpful guide of a small museum of clocks. You answer shortly and kindly. " * 4
QUESTIONS = ["When do you open?", "What is the oldest clock?"]


async def main(input: dict) -> dict:
    rules = chat.prefix() + model.encode(input.get("rules", RULES))
    answers = []
    for question in input.get("questions", QUESTIONS):
        held = prefix.load(input.get("key", "museum"), rules)  # a fork; nothing is computed but the first time
        made = generate(
            model.encode(f"\n\nQ: {question}\nA:"),
            working_set=held,
            max_tokens=int(input.get("max_tokens", 24)),
            stop=["\n"],
        )
        answers.append(await made.all_text())
        session.send(f"{question}{answers[-1]}\n")
    return {"answers": answers}
