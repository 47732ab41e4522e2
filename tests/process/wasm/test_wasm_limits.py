"""Hostile programs hurt only themselves."""

from __future__ import annotations

import json
import threading
import time

import pytest
from wasm_fake_host import FakeHost

from pie_xla.errors import UsageError
from pie_xla.process.wasm import ExitKind, Limits

MIB = 1 << 20
SMALL = Limits(memory_bytes=96 * MIB, cpu_seconds=0.5, output_bytes=MIB)
POLITE = """
import time
def main(input):
    gaps = []
    for _ in range(20):
        before = time.monotonic()
        time.sleep(0.005)
        gaps.append(time.monotonic() - before)
    return max(gaps)
"""


def wait_until(condition, seconds=30.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.002)


def test_endless_loop_is_killed_and_a_polite_neighbour_is_not(guests):
    spinner = guests.start("def main(input):\n    while True:\n        pass", limits=SMALL)
    polite = guests.start(POLITE, limits=SMALL)
    ended = polite.exit()
    assert ended.kind is ExitKind.RETURNED
    assert ended.cpu_seconds < 0.4
    ended = spinner.exit()
    assert ended.kind is ExitKind.CPU_TIME
    assert ended.message.startswith("the program used more than 0.5 s of processor time")
    assert 0.5 <= ended.cpu_seconds < 0.7


def test_endless_loop_that_catches_everything(guests):
    loop = "while True:\n        try:\n            while True: pass\n        except BaseException: pass"
    assert guests.run(f"def main(input):\n    {loop}", limits=SMALL).kind is ExitKind.CPU_TIME


@pytest.mark.parametrize(
    "source",
    [
        "import re\ndef main(input):\n    re.match('(a+)+$', 'a' * 60 + 'b')",
        "def main(input):\n    return len(str(pow(3, 10**8)))",
        "import asyncio\nasync def main(input):\n    while True: await asyncio.sleep(0)",
    ],
    ids=["regular expression", "big number", "asyncio"],
)
def test_computing_without_end(guests, source):
    assert guests.run(source, limits=SMALL).kind is ExitKind.CPU_TIME


def test_waiting_is_free(guests):
    ended = guests.run("import time\ndef main(input):\n    time.sleep(0.6)", limits=SMALL)
    assert ended.kind is ExitKind.RETURNED and ended.cpu_seconds < 0.3


@pytest.mark.parametrize(
    "body",
    [
        "b.append(bytearray(1 << 20))",
        "b.append(str(len(b)) * 1000)",
        "b.extend(b or [0])",
        "bytearray(1 << 30)",
    ],
)
def test_memory_bomb(guests, body):
    ended = guests.run(f"def main(input):\n    b = []\n    while True:\n        {body}\n", limits=SMALL)
    assert ended.kind is ExitKind.MEMORY
    assert ended.message == "main.py:4: the program used more than 96 MiB, its memory limit.\nMemoryError"


def test_memory_error_can_be_caught(guests):
    source = "def main(input):\n    try:\n        bytearray(1 << 30)\n    except MemoryError:\n        return 'caught'"
    assert json.loads(guests.run(source, limits=SMALL).result) == {"result": "caught"}


def test_memory_limit_below_the_component(guests):
    with pytest.raises(UsageError, match="at least 64 MiB"):
        guests.run("def main(input): pass", limits=Limits(memory_bytes=8 * MIB))
    assert guests.run("def main(input): pass", limits=Limits(memory_bytes=64 * MIB)).kind is ExitKind.RETURNED


def test_deep_recursion_is_pythons_own_error(guests):
    ended = guests.run("def f(n):\n    return f(n + 1)\ndef main(input):\n    return f(0)")
    assert ended.kind is ExitKind.FAILED
    assert "RecursionError: maximum recursion depth exceeded" in ended.message
    assert "Previous line repeated" in ended.message


def test_recursion_past_the_stack(guests):
    source = (
        "import sys\nsys.setrecursionlimit(10**7)\ndef f(n):\n    return f(n + 1)\ndef main(input):\n    return f(0)"
    )
    ended = guests.run(source)
    assert ended.kind is ExitKind.STACK
    assert ended.message.startswith("the program's calls are nested too deeply")


def test_source_nested_too_deeply(guests):
    ended = guests.run("x = " + "[" * 20000 + "]" * 20000)
    assert ended.kind is ExitKind.FAILED and "too complex" in ended.message


def test_crash_of_the_interpreter(guests):
    ended = guests.run("import os\ndef main(input):\n    os.abort()")
    assert ended.kind is ExitKind.CRASHED and "unreachable" in ended.message


@pytest.mark.parametrize(
    "body",
    [
        "print('x' * 10_000)",
        "session.send('x' * 10_000)",
        "session.log(20, 'x' * 10_000)",
        "os.write(1, b'x' * 4096)",
    ],
)
def test_ten_megabytes_of_output(guests, body):
    host = FakeHost()
    source = "import os\nfrom wit_world.imports import session\n"
    source += f"def main(input):\n    for _ in range(3000):\n        {body}\n"
    ended = guests.run(source, host=host, limits=SMALL)
    assert ended.kind is ExitKind.OUTPUT
    assert ended.message == "the program sent, printed and returned more than 1 MiB, its output limit"
    received = sum(map(len, host.sent)) + sum(len(text) for _, text in host.logs)
    assert 0.9 * MIB < received <= MIB


def test_large_result_counts_as_output(guests):
    assert guests.run("def main(input):\n    return 'x' * (10 << 20)", limits=SMALL).kind is ExitKind.OUTPUT


def test_output_under_the_limit_arrives_whole(guests):
    host = FakeHost()
    source = "def main(input):\n    for n in range(10_000):\n        print(n)"
    assert guests.run(source, host=host).kind is ExitKind.RETURNED
    assert host.text(20) == "".join(f"{n}\n" for n in range(10_000))


def test_sleep_blocks_only_its_own_guest(guests):
    started = time.monotonic()
    runs = [guests.start("import time\ndef main(input):\n    time.sleep(0.3)") for _ in range(10)]
    assert all(run.exit().kind is ExitKind.RETURNED for run in runs)
    assert time.monotonic() - started < 1.5  # one after the other they take 3 s


def test_wasi_sleep_is_refused(guests):
    ended = guests.run("import select\ndef main(input):\n    select.select([], [], [], 5)")
    assert ended.kind is ExitKind.FAILED and "use time.sleep or asyncio.sleep" in ended.message


# -- killing -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "source",
    [
        "import asyncio\nfrom inferlet._host import ticket\nasync def main(input):\n    await ticket(99)",
        "import time\ndef main(input):\n    time.sleep(1000)",
        "def main(input):\n    while True: pass",
        "def main(input):\n    while True:\n        try:\n            while True: pass\n        finally: continue",
    ],
    ids=["waiting", "sleeping", "spinning", "stubborn"],
)
def test_kill(guests, source):
    run = guests.start(source)
    time.sleep(0.05)
    started = time.monotonic()
    run.handle.kill("enough")
    ended = run.exit()
    assert (ended.kind, ended.message) == (ExitKind.KILLED, "enough")
    assert time.monotonic() - started < 0.5
    run.handle.kill("again")  # changes nothing
    assert run.exits.empty()


def test_kill_before_it_began(guests):
    run = guests.start("def main(input):\n    while True: pass")
    run.handle.kill("enough")
    assert run.exit().kind is ExitKind.KILLED


def test_late_wake_of_a_killed_guest(guests):
    run = guests.start("from inferlet._host import ticket\nasync def main(input):\n    await ticket(1)")
    assert run.host.waiting.wait(30)
    run.handle.kill()
    assert run.exit().kind is ExitKind.KILLED
    run.host.finish(1, None)
    assert json.loads(guests.run("def main(input):\n    return 1").result) == {"result": 1}


# -- the scheduler -----------------------------------------------------------------------------------------------------


def test_idle_means_nobody_has_anything_to_do(guests, sandbox):
    wait_until(lambda: sandbox.idle)
    run = guests.start("from inferlet._host import ticket\nasync def main(input):\n    return await ticket(1)")
    assert not sandbox.idle  # from the moment of the call
    assert run.host.waiting.wait(30)
    wait_until(lambda: sandbox.idle)
    assert sandbox.guests == 1
    run.host.finish(1, "v")
    assert not sandbox.idle or not run.exits.empty()
    assert json.loads(run.exit().result) == {"result": "v"}
    wait_until(lambda: sandbox.idle and sandbox.guests == 0)


def test_a_guest_that_computes_does_not_hold_up_idle(guests, sandbox):
    run = guests.start("def main(input):\n    while True: pass")
    wait_until(lambda: sandbox.idle)
    assert run.exits.empty()
    run.handle.kill()
    run.exit()


def test_hundred_concurrent_guests(guests):
    source = """
import asyncio
from wit_world.imports import engine
from inferlet._host import ticket
async def main(input):
    total = 0
    for step in range(5):
        total += await ticket(engine.submit(0, str(input)))
    return total
"""
    hosts = [FakeHost() for _ in range(100)]
    runs = [guests.start(source, number, host=host) for number, host in enumerate(hosts)]
    for step in range(1, 6):  # in lock step, as the engine drives them
        for number, host in enumerate(hosts):
            assert host.waiting.wait(60)
            host.waiting.clear()
            host.finish(step, number)
    assert [json.loads(run.exit().result)["result"] for run in runs] == [5 * number for number in range(100)]


def test_wakes_from_many_threads(guests):
    source = """
from wit_world.imports import engine
from inferlet._host import ticket
import asyncio
async def main(input):
    return sorted(await asyncio.gather(*(ticket(engine.submit(0, "")) for _ in range(200))))
"""
    run = guests.start(source)
    assert run.host.waiting.wait(30)
    threads = [
        threading.Thread(target=lambda part=part: [run.host.finish(number, number) for number in range(part, 201, 4)])
        for part in (1, 2, 3, 4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert json.loads(run.exit().result) == {"result": list(range(1, 201))}
