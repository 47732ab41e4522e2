"""Says that it is there, and waits for an hour."""

import asyncio

from inferlet import session


async def main(input: dict) -> None:
    session.send("here")
    await asyncio.sleep(3600)
