"""Programs in the sandbox: what they return, how they fail, and that asyncio works."""

from __future__ import annotations

import json
import time

from wasm_fake_host import FakeHost

from pie_xla.errors import PieError
from pie_xla.process.wasm import ExitKind

HOST = "from wit_world.imports import engine, model, session\nfrom componentize_py_types import Err\n"
TICKETS = HOST + "import asyncio\nfrom inferlet._host import ticket\n"


def result(ended):
    assert ended.kind is ExitKind.RETURNED, ended.message
    return json.loads(ended.result)["result"]


def failure(ended, kind=ExitKind.FAILED):
    assert ended.kind is kind, (ended.kind, ended.message, ended.result)
    assert ended.result is None
    return ended.message


# -- returning ---------------------------------------------------------------------------------------------------------


def test_echo_async(guests):
    value = {"x": [1, 2.5, None, True, "é\u2028😀"], "": {}}
    assert result(guests.run("async def main(input):\n    return {'got': input}", value)) == {"got": value}


def test_echo_sync(guests):
    assert result(guests.run("def main(input):\n    return input", "text")) == "text"


def test_source_is_a_module_of_its_own(guests):
    source = """
import dataclasses, sys
@dataclasses.dataclass
class Point:
    x: int
def main(input):
    return [dataclasses.asdict(Point(3)), __name__, __file__, sys.modules[__name__].Point is Point]
"""
    assert result(guests.run(source)) == [{"x": 3}, "main", "main.py", True]


def test_two_runs_share_nothing(guests):
    source = "import random, uuid, json\ndef main(input):\n    json.mark = getattr(json, 'mark', 0) + 1\n"
    source += "    return [json.mark, random.random(), str(uuid.uuid4())]"
    first, second = result(guests.run(source)), result(guests.run(source))
    assert first[0] == second[0] == 1
    assert first[1] != second[1] and first[2] != second[2]


def test_print_is_logged_as_written(guests):
    host = FakeHost()
    source = "import sys\ndef main(input):\n    print('one', 'é')\n    print('half', end='')\n"
    source += "    print('bad', file=sys.stderr)"
    assert result(guests.run(source, host=host)) is None
    assert host.text(20) == "one é\nhalf"
    assert host.text(30) == "bad\n"


# -- failing -----------------------------------------------------------------------------------------------------------


def test_traceback_has_the_authors_lines_and_nothing_of_ours(guests):
    source = "def deep(n):\n    return 1 / n\n\nasync def main(input):\n    return deep(0)\n"
    assert failure(guests.run(source)).splitlines() == [
        "Traceback (most recent call last):",
        '  File "main.py", line 5, in main',
        "    return deep(0)",
        '  File "main.py", line 2, in deep',
        "    return 1 / n",
        "           ~~^~~",
        "ZeroDivisionError: division by zero",
    ]


def test_task_group_error_is_trimmed_too(guests):
    source = """import asyncio
async def bad():
    raise ValueError("in task")
async def main(input):
    async with asyncio.TaskGroup() as group:
        group.create_task(bad())
"""
    message = failure(guests.run(source))
    assert 'File "main.py", line 3, in bad' in message and "ValueError: in task" in message
    assert "taskgroups.py" not in message and "pie_component" not in message and "base_events" not in message


def test_syntax_error_has_a_caret(guests):
    message = failure(guests.run("def main(input):\n    x = = 3\n"))
    assert message.splitlines() == [
        '  File "main.py", line 2',
        "    x = = 3",
        "        ^",
        "SyntaxError: invalid syntax",
    ]


def test_no_main(guests):
    assert failure(guests.run("x = 1")).startswith("main.py defines no `main`")


def test_main_is_no_function(guests):
    assert "`main` in main.py is an int, not a function" in failure(guests.run("main = 3"))


def test_main_with_wrong_signature(guests):
    message = failure(guests.run("\nasync def main(a, b):\n    pass"))
    assert message.startswith("main.py:2: main(a, b) cannot be called") and "'b'" in message
    assert "main()" in failure(guests.run("def main():\n    pass"))


def test_generator_main(guests):
    assert "is a generator" in failure(guests.run("async def main(input):\n    yield 1"))


def test_result_without_json_form_is_named(guests):
    cases = {
        "{'a': [1, {2}]}": "result['a'][1] is a set",
        "{'a': float('nan')}": "result['a'] is nan",
        "{(1, 2): 3}": "result has the key (1, 2), a tuple",
        "[print]": "result[0] is a builtin_function_or_method",
        "(lambda a: a.append(a) or a)([])": "result[0] contains itself",
    }
    for expression, words in cases.items():
        message = failure(guests.run(f"\nasync def main(input):\n    return {expression}"))
        assert message.startswith("main.py:2: what `main` returned has no JSON form: " + words), message


def test_exit_is_reported_as_such(guests):
    message = failure(guests.run("import sys\nasync def main(input):\n    sys.exit(3)"))
    assert message.startswith("main.py:3: the program called sys.exit(3).")
    assert failure(guests.run("raise SystemExit")).startswith("main.py:1: the program called sys.exit().")
    assert "ended its own process" in failure(guests.run("import os\ndef main(input):\n    os._exit(0)"))


def test_missing_module_says_what_there_is(guests):
    message = failure(guests.run("import numpy\n"))
    assert "No module named 'numpy'" in message and "--native" in message


def test_odd_exceptions(guests):
    assert failure(guests.run("def main(input):\n    raise KeyboardInterrupt")).endswith("KeyboardInterrupt")
    source = "class E(Exception):\n    def __str__(self):\n        raise KeyError\ndef main(input):\n    raise E"
    assert "E: <exception str() failed>" in failure(guests.run(source))
    message = failure(guests.run("def main(input):\n    raise ValueError('x' * 5_000_000)"))
    assert "characters left out" in message and len(message) < 50_000


# -- asyncio -----------------------------------------------------------------------------------------------------------


def test_asyncio_pieces(guests):
    source = (
        TICKETS
        + """
async def worker(queue, out):
    while (item := await queue.get()) is not None:
        await asyncio.sleep(0.001)
        out.append(item * 2)

async def main(input):
    queue, out = asyncio.Queue(2), []
    async with asyncio.TaskGroup() as group:
        group.create_task(worker(queue, out))
        for item in (1, 2, 3, None):
            await queue.put(item)
    gathered = await asyncio.gather(asyncio.sleep(0.01, "a"), asyncio.sleep(0.001, "b"))
    try:
        await asyncio.wait_for(asyncio.sleep(10), 0.01)
        late = False
    except TimeoutError:
        late = True
    async with asyncio.timeout(1), asyncio.Lock():
        threaded = await asyncio.to_thread(lambda: 5)
    return [out, gathered, late, threaded]
"""
    )
    assert result(guests.run(source)) == [[2, 4, 6], ["a", "b"], True, 5]


def test_tickets_overlap(guests):
    source = (
        TICKETS
        + """
async def main(input):
    tickets = [engine.submit(ms, "x" * ms) for ms in (120, 100, 80)]
    return await asyncio.gather(*map(ticket, tickets), asyncio.sleep(0.1, "slept"))
"""
    )
    started = time.monotonic()
    assert result(guests.run(source)) == [120, 100, 80, "slept"]
    assert time.monotonic() - started < 0.35  # one after the other they take 0.4 s


def test_events_arrive_while_the_loop_is_never_quiet(guests):
    source = (
        TICKETS
        + """
async def main(input):
    future = ticket(engine.submit(20, "abc"))
    while not future.done():
        await asyncio.sleep(0)
    return future.result()
"""
    )
    assert result(guests.run(source)) == 3


def test_a_failed_ticket_raises_at_the_await(guests):
    run = guests.start(TICKETS + "async def main(input):\n    await ticket(engine.submit(0, ''))\n")
    assert run.host.waiting.wait(30)
    run.host.finish(1, "the pass failed", failed=True)
    message = failure(run.exit())
    assert 'File "main.py", line 6, in main' in message and "the pass failed" in message


def test_deadlock_names_the_places(guests):
    source = """import asyncio
async def worker(event):
    await event.wait()
async def main(input):
    event = asyncio.Event()
    await asyncio.gather(worker(event))
"""
    message = failure(guests.run(source))
    assert message.startswith("DeadlockError: every task waits")
    assert "waiting: main.py:3 in worker" in message and "waiting: main.py:6 in main" in message


def test_a_sync_main_may_run_a_loop_of_its_own(guests):
    source = """import asyncio, time
async def work():
    await asyncio.sleep(0.001)
    return 7
def main(input):
    try:
        time.sleep(-1)
    except ValueError as error:
        return [asyncio.run(work()), str(error)]
"""
    assert result(guests.run(source)) == [7, "sleep length must be non-negative"]


def test_tasks_left_behind_are_cancelled(guests):
    source = "import asyncio\nasync def main(input):\n    asyncio.create_task(asyncio.sleep(100))\n    return 2"
    assert result(guests.run(source)) == 2


# -- host functions ----------------------------------------------------------------------------------------------------


def test_every_host_function_arrives(guests):
    host = FakeHost()
    source = (
        HOST
        + """
def main(input):
    made = [engine.new_set(), engine.fork_set(1), engine.new_pipeline(None), engine.new_pipeline(2**64 - 1)]
    engine.truncate_set(1, 2**32 - 1); engine.drop_set(2); engine.close_pipeline(3, True)
    made += [engine.new_channel("{}"), engine.channel(5, "put", "[1]"), session.receive()]
    session.send("grüße"); session.log(40, "oops\\n")
    ids = list(model.encode("hé", True))
    return [made, engine.facts(), ids, model.decode([104, 233], False), list(model.chat("abc"))]
"""
    )
    made, facts, ids, text, chat = result(guests.run(source, host=host))
    assert host.calls == [
        ("new_set",), ("fork_set", 1), ("new_pipeline", None), ("new_pipeline", 2**64 - 1),
        ("truncate_set", 1, 2**32 - 1), ("drop_set", 2), ("close_pipeline", 3, True), ("new_channel", "{}"),
        ("channel", 5, "put", "[1]"), ("receive",),
    ]  # fmt: skip
    assert made == [1, 2, 3, 4, 8, 9, 10]
    assert (json.loads(facts), ids, text, chat) == ({"vocab_size": 7}, [1, 104, 195, 169], "hé", [3])
    assert host.sent == ["grüße"] and host.text(40) == "oops\n"


def test_a_refusal_is_an_error_the_program_can_catch(guests):
    source = (
        HOST
        + """
def main(input):
    try:
        engine.fork_set(404)
    except Err as error:
        return error.value
"""
    )
    assert result(guests.run(source)) == "no working set 404\n  hint: make one first"


def test_nonsense_arguments_raise_in_the_guest(guests):
    source = (
        HOST
        + """
def main(input):
    calls = [
        lambda: engine.truncate_set("a", 2), lambda: engine.truncate_set(-1, 2), lambda: engine.truncate_set(1, 2**32),
        lambda: engine.truncate_set(1), lambda: engine.new_pipeline(2**64), lambda: engine.new_pipeline(1.5),
        lambda: model.encode(b"abc", True), lambda: model.encode("\\ud800", True),
        lambda: model.encode("x" * 17_000_000, True), lambda: model.decode([1, None], True),
        lambda: model.decode([-1], True), lambda: model.decode([0] * 1_100_000, True),
        lambda: session.wait("soon"), lambda: session.log(1, None),
    ]
    said = []
    for call in calls:
        try:
            call()
            said.append("accepted")
        except (TypeError, ValueError) as error:
            said.append(type(error).__name__)
    return said
"""
    )
    kinds = result(guests.run(source))
    assert kinds == [
        "TypeError", "ValueError", "ValueError", "TypeError", "ValueError", "TypeError", "TypeError", "ValueError",
        "ValueError", "TypeError", "ValueError", "ValueError", "TypeError", "TypeError",
    ]  # fmt: skip


def test_a_bug_of_the_host_ends_the_guest_and_says_so(guests):
    message = failure(guests.run(HOST + "def main(input):\n    engine.fork_set(500)"), ExitKind.HOST_FAULT)
    assert "KeyError" in message and "a bug of the host" in message


def test_a_refusal_where_there_is_no_err_string_ends_the_guest(guests):
    class Closed(FakeHost):
        def facts(self) -> str:
            raise PieError("the model is being unloaded")

    ended = guests.run(HOST + "def main(input):\n    engine.facts()", host=Closed())
    assert failure(ended) == "the model is being unloaded"


def test_no_files_network_environment_processes(guests):
    source = """
import os, socket, subprocess, threading
def main(input):
    said = []
    for call in (
        lambda: open("/etc/passwd"), lambda: open("x", "w"), lambda: os.listdir("/"), lambda: socket.socket(),
        lambda: socket.create_connection(("127.0.0.1", 80)), lambda: subprocess.run(["ls"]),
        lambda: threading.Thread(target=print).start(),
        input,
    ):
        try:
            call()
            said.append("allowed")
        except Exception as error:
            said.append(type(error).__name__)
    return [said, dict(os.environ), __import__("sys").argv]
"""
    said, environment, argv = result(guests.run(source.replace("        input,\n", "        __builtins__['input'],\n")))
    assert "allowed" not in said, said
    assert environment == {} and argv == []
