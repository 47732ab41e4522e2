"""The least a program can do."""


async def main(input: dict) -> dict:
    return {"hello": input["i"]}
