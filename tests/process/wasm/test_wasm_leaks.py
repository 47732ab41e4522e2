"""What guests held comes back."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
from wasm_fake_host import Guests
from wasmtime._wasi import CUSTOM_OUTPUTS

from pie_xla.errors import PieError
from pie_xla.process.wasm import ExitKind, Limits, Sandbox, scheduler
from pie_xla.process.wasm.slices import ThreadTimer

SOURCES = {
    ExitKind.RETURNED: "import asyncio\nasync def main(input):\n    await asyncio.sleep(0.001)\n    return input",
    ExitKind.FAILED: "def main(input):\n    raise ValueError",
    ExitKind.KILLED: "import time\ndef main(input):\n    time.sleep(1000)",
    ExitKind.OUTPUT: "import os\ndef main(input):\n    print('x' * 100_000)",
}


def anonymous_bytes() -> int:
    """Memory of this process that no file backs."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no RssAnon")


def launch(guests, count: int) -> list[float]:
    limits = Limits(output_bytes=50_000)
    seconds = []
    for number in range(count):
        kind = list(SOURCES)[number % 4]
        started = time.perf_counter()
        run = guests.start(SOURCES[kind], number, limits)
        if kind is ExitKind.KILLED:
            run.handle.kill()
        assert run.exit().kind is kind
        if kind is ExitKind.RETURNED:
            seconds.append(time.perf_counter() - started - 0.001)
    return seconds


def test_launches_leak_nothing(guests, sandbox):
    launch(guests, 60)  # warm: allocators, caches
    before = anonymous_bytes()
    seconds = sorted(launch(guests, 300))
    after = anonymous_bytes()
    print(f"\nlaunch to result: median {seconds[len(seconds) // 2] * 1e3:.1f} ms, best {seconds[0] * 1e3:.1f} ms")
    print(f"anonymous memory: {(after - before) / 300:.0f} bytes a launch")
    assert after - before < 6 << 20  # a guest that stays alive holds 1 MB: 300 of them
    assert sandbox.guests == 0
    assert sandbox._world.functions.suspended == 0
    assert not sandbox._scheduler._busy
    assert not CUSTOM_OUTPUTS.handles


def test_timers_of_woken_calls_do_not_pile_up(guests, sandbox):
    source = """
import asyncio
from wit_world.imports import engine
from inferlet._host import ticket
async def main(input):
    for _ in range(500):
        await asyncio.wait_for(ticket(engine.submit(1, "")), 1000)
"""
    run = guests.start(source)
    most = 0
    while run.exits.empty():
        most = max(most, len(sandbox._scheduler._timers))
        time.sleep(0.005)
    assert run.exit().kind is ExitKind.RETURNED
    assert 0 < most < 100


def test_idle_costs_no_processor_time(sandbox):
    time.sleep(0.05)
    before = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - before < 0.05


def test_close_ends_every_guest_and_thread(stub_sources, component_cache):
    sandbox = Sandbox(component_cache, sources=stub_sources)
    guests = Guests(sandbox)
    runs = [guests.start(source) for source in (SOURCES[ExitKind.KILLED], "def main(input):\n    while True: pass")]
    time.sleep(0.05)
    sandbox.close()
    assert [run.exit().kind for run in runs] == [ExitKind.KILLED] * 2
    assert not [thread for thread in threading.enumerate() if thread is sandbox._scheduler._thread]
    with pytest.raises(PieError, match="closed"):
        guests.start("def main(input): pass")
    sandbox.close()


def test_quiescence_is_told(stub_sources, component_cache):
    quiet = threading.Event()
    sandbox = Sandbox(component_cache, sources=stub_sources, on_quiescent=quiet.set)
    guests = Guests(sandbox)
    run = guests.start("from inferlet._host import ticket\nasync def main(input):\n    return await ticket(1)")
    assert run.host.waiting.wait(30) and quiet.wait(30)
    quiet.clear()
    run.host.finish(1, None)
    assert run.exit().kind is ExitKind.RETURNED and quiet.wait(30)
    sandbox.close()


def test_slices_without_native_timers(stub_sources, component_cache, monkeypatch):
    monkeypatch.setattr(scheduler, "new_timer", ThreadTimer)
    sandbox = Sandbox(component_cache, sources=stub_sources)
    guests = Guests(sandbox)
    limits = Limits(cpu_seconds=0.3)
    spinner = guests.start("def main(input):\n    while True: pass", limits=limits)
    polite = guests.start("import time\ndef main(input):\n    for _ in range(10): time.sleep(0.005)", limits=limits)
    assert polite.exit().kind is ExitKind.RETURNED
    assert spinner.exit().kind is ExitKind.CPU_TIME
    sandbox.close()
