"""What the sandbox takes for granted of wasmtime's unofficial fiber interface, tried once for each build."""

from __future__ import annotations

import queue
import threading

from wasmtime.component import Component

from pie_xla.errors import PieError
from pie_xla.process.wasm.guest import Guest, run_request
from pie_xla.process.wasm.hostapi import Pending
from pie_xla.process.wasm.limits import ExitKind, GuestExit, Limits
from pie_xla.process.wasm.scheduler import FiberScheduler
from pie_xla.process.wasm.world import World

_TIMEOUT_SECONDS = 60.0

# Suspends in `wait` (woken by another thread), in `sleep-ms`, and calls with lists, options and an err string.
_SUSPEND = """
import time
from wit_world.imports import engine, model, session
from componentize_py_types import Err
def main(value):
    time.sleep(0.001)
    ids = list(model.encode("abc", True))
    try:
        engine.fork_set(7)
        refused = None
    except Err as error:
        refused = error.value
    return [session.wait(None), ids, model.decode(ids, False), engine.new_pipeline(1 << 40), refused]
"""
_EXPECTED = '{"result":["[[1,0,5]]",[97,98,99],"abc",40,"no set 7"]}'

# WASI's own sleep has to be the sandbox's refusal; another version of the interface would block every guest.
_SLEEP = """
import select
def main(value):
    select.select([], [], [], 0.5)
    return "slept"
"""


class _Host:
    """As little of a process as the programs above need."""

    def facts(self) -> str:
        return "{}"

    def new_set(self) -> int:
        return 1

    def fork_set(self, ws: int) -> int:
        raise PieError(f"no set {ws}")

    def truncate_set(self, ws: int, n: int) -> None:
        return None

    def drop_set(self, ws: int) -> None:
        return None

    def new_pipeline(self, seed: int | None) -> int:
        return 0 if seed is None else seed.bit_length() - 1

    def close_pipeline(self, p: int, cancel: bool) -> None:
        return None

    def new_channel(self, spec: str) -> int:
        return 1

    def channel(self, ch: int, op: str, value: str) -> int:
        return 0

    def submit(self, pipe: int, request: str) -> int:
        return 1

    def wait(self, timeout_ms: int | None) -> Pending[str]:
        pending = Pending(lambda: "[[1,0,5]]", timeout_ms)
        threading.Timer(0.002, pending.wake).start()
        return pending

    def send(self, text: str) -> None:
        return None

    def receive(self) -> int:
        return 1

    def log(self, level: int, text: str) -> None:
        return None

    def encode(self, text: str, specials: bool) -> list[int]:
        return list(text.encode())

    def decode(self, ids: list[int], skip_specials: bool) -> str:
        return bytes(ids).decode()

    def chat(self, request: str) -> list[int]:
        return []

    def call(self, name: str, request: str) -> str:
        return request

    def start(self, name: str, request: str) -> int:
        return 1


def self_test(scheduler: FiberScheduler, world: World, component: Component) -> None:
    """Raises:
    PieError: this wasmtime does not behave as the sandbox needs it to.
    """
    ended = _run(scheduler, world, component, _SUSPEND)
    if ended.result != _EXPECTED:
        raise _failure(f"a suspended program came back with {ended.result or ended.message}")
    ended = _run(scheduler, world, component, _SLEEP)
    if ended.kind is not ExitKind.FAILED or "way of sleeping" not in ended.message:
        raise _failure(f"WASI's sleep is not refused: {ended.result or ended.message}")
    if world.functions.suspended:
        raise _failure(f"{world.functions.suspended} host calls were left suspended")


def _run(scheduler: FiberScheduler, world: World, component: Component, source: str) -> GuestExit:
    exits: queue.SimpleQueue[GuestExit] = queue.SimpleQueue()
    limits = Limits()
    request = run_request(source, "selftest.py", None, limits)
    guest = Guest(world, component, request, _Host(), limits, exits.put, scheduler)
    scheduler.start(guest)
    try:
        return exits.get(timeout=_TIMEOUT_SECONDS)
    except queue.Empty:
        scheduler.kill(guest, "the self test timed out")
        raise _failure("a program did not come back") from None


def _failure(what: str) -> PieError:
    return PieError(
        f"the sandbox failed its self test: {what}",
        "pie-xla needs the very wasmtime that it asks for: `pip install --force-reinstall wasmtime==50.0.1`",
    )
