"""What the stand-in can do."""

PROGRAM = """
import asyncio
from inferlet._host import ticket
from wit_world.imports import engine


async def main(input):
    for _ in range(24):
        await ticket(engine.submit(0, '{"times": 1}'))
    print("warm")
"""
