"""Tickets as futures of the running loop: what the component calls, and raw access to the imports."""

from __future__ import annotations

import asyncio

from wit_world.imports import engine, model, session  # noqa: F401

_futures: dict[int, asyncio.Future] = {}


def outstanding() -> int:
    return len(_futures)


def deliver(events: list) -> None:
    for ticket, failed, value in events:
        future = _futures.pop(ticket, None)
        if future is None or future.done():
            continue
        if failed:
            future.set_exception(RuntimeError(value))
        else:
            future.set_result(value)


def ticket(number: int) -> asyncio.Future:
    future = _futures[number] = asyncio.get_running_loop().create_future()
    return future


def begin(value: object) -> None:
    return None


world = "pie:inferlet@0.1.0"


def forget() -> None:
    _futures.clear()
