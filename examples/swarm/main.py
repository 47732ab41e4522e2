"""A swarm: programs that this one starts talk with the model, and with it, by messages; a judge puts their views together."""

from inferlet import generate, process, session

MEMBER = """
from inferlet import generate, session

async def main(input):
    views = []
    while (question := await session.receive()) is not None:
        ask = [{"role": "system", "content": f"You are {input['role']}. Answer in one sentence."}, {"role": "user", "content": question}]
        views.append((await generate(ask, max_tokens=input["max_tokens"]).all_text()).strip())
        session.send(views[-1])
        if len(views) == input["rounds"]:
            return len(views)
"""
ROLES = ["a careful engineer", "a hurried salesman", "a curious child"]


async def main(input: dict) -> dict:
    topic, most, rounds = (
        input.get("topic", "Should we build a bridge?"),
        int(input.get("max_tokens", 40)),
        int(input.get("rounds", 2)),
    )
    roles = input.get("roles", ROLES)
    members = [
        process.spawn(MEMBER, {"role": role, "max_tokens": most, "rounds": rounds}, file="member.py") for role in roles
    ]
    views: list[str] = []
    for _ in range(rounds):
        heard = "\n".join(f"{role}: {view}" for role, view in zip(roles, views, strict=False))
        for member in members:
            member.send(f"{topic}\n\nWhat was said before:\n{heard}" if heard else topic)
        views = [await member.receive() for member in members]
        session.send("\n".join(f"{role}: {view}" for role, view in zip(roles, views, strict=True)) + "\n\n")
    answered = [await member for member in members]
    told = "\n".join(views)
    ask = [
        {
            "role": "user",
            "content": f"{topic}\n\nViews:\n{told}\n\nGive the answer that fits them best, in one sentence.",
        }
    ]
    verdict = (await generate(ask, max_tokens=most).all_text()).strip()
    session.send(verdict + "\n")
    return {"views": views, "answered": answered, "verdict": verdict}
