"""Says that it is there, and waits for a message that may never come."""

from inferlet import session


async def main(input: dict) -> dict:
    session.send("here")
    return {"heard": await session.receive()}
