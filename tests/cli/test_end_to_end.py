"""Programs on real weights, sandboxed and native: right answers, and for every bad input a clear message."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

pytestmark = pytest.mark.model

Run = Callable[..., Any]

# The program of the design, unmodified.
CONTRACT = """
from inferlet import chat, model
from inferlet.eta import ForwardPass, Pipeline, StateGeometry, WorkingSet, intrinsics, reduce_argmax


async def main(input: dict) -> dict:
    tokens = chat.prefix() + model.encode(input.get("prompt", "The capital of France is"))
    max_tokens = int(input.get("max_tokens", 8))
    ws = WorkingSet()  # the sequence's state, whatever the model keeps
    pipe = Pipeline()

    done = 0  # tokens already in the working set
    for _ in range(max_tokens):
        fwd = ForwardPass()
        fwd.embed(tokens[done:])                        # the new tokens
        fwd.state([ws], StateGeometry.folding())        # appended, and final
        out = fwd.epilogue(lambda: reduce_argmax(intrinsics.output(0, "logits")))  # runs on the device
        pipe.submit(fwd)
        done = len(tokens)
        tokens.append(await out)
    pipe.close()

    return {"text": model.decode(tokens[-max_tokens:])}
"""

HEAD = """
import asyncio
from inferlet import chat, model, session
from inferlet.eta import *
from inferlet.eta import intrinsics

def one_pass(fn, tokens=(1, 2, 3)):
    ws, pipe, fwd = WorkingSet(), Pipeline(), ForwardPass()
    fwd.embed(list(tokens))
    fwd.state([ws], StateGeometry.folding())
    out = fwd.epilogue(fn)
    pipe.submit(fwd)
    return out

def logits():
    return intrinsics.output(0, "logits")
"""


@pytest.mark.parametrize("native", [False, True], ids=["sandboxed", "native"])
def test_the_contract_program_says_paris(run_inferlet: Run, native: bool) -> None:
    outcome = run_inferlet(CONTRACT, native=native)
    assert (outcome.failure, outcome.result) == (None, {"text": " Paris.\n\nThe answer is:"})


def test_text_sent_is_heard_and_logs_are_apart(run_inferlet: Run) -> None:
    source = """
from inferlet import session
async def main(input):
    session.send("a\\n")
    print("noted")
    session.send("é😀")
    return input
"""
    outcome = run_inferlet(source, {"x": [1, None, "ü"]})
    assert (outcome.sent, outcome.result, outcome.failure) == ("a\né😀", {"x": [1, None, "ü"]}, None)
    assert "noted" in outcome.log


# name -> (body of the program, what its failure must say)
FAILURES = {
    "syntax error": ("async def main(input)\n    return 1", "SyntaxError"),
    "exception in main": ("async def main(input):\n    return {}['missing']", "KeyError: 'missing'"),
    "exception at import": ("1 / 0\nasync def main(input): ...", "ZeroDivisionError"),
    "main is no function": ("main = 3", "main"),
    "wrong argument": ("async def main(input):\n    return int(input['n'])", "KeyError: 'n'"),
    "a result that is no JSON": ("async def main(input):\n    return {1, 2}", "set"),
    "sys.exit": ("import sys\nasync def main(input):\n    sys.exit(3)", "exit"),
    "os._exit": ("import os\nasync def main(input):\n    os._exit(3)", "exit"),
    "prompt over the context": (
        "async def main(input):\n    await one_pass(lambda: reduce_argmax(logits()), [1] * 9000)",
        "the context of smollm2-135m-instruct is 8192",
    ),
    "token out of range": (
        "async def main(input):\n    await one_pass(lambda: reduce_argmax(logits()), [49152])",
        "49152",
    ),
    "unknown output": (
        "async def main(input):\n    await one_pass(lambda: intrinsics.output(0, 'logit'))",
        "no output 'logit'",
    ),
    "row out of range": (
        "async def main(input):\n    await one_pass(lambda: intrinsics.output(1, 'logits'))",
        "main.py",
    ),
    "shape error in an epilogue": (
        "async def main(input):\n    await one_pass(lambda: add(logits(), intrinsics.output(0, 'hidden')))",
        "main.py",
    ),
    "dtype error in an epilogue": (
        "async def main(input):\n    await one_pass(lambda: add(logits(), reduce_argmax(logits())))",
        "main.py",
    ),
    "a loop in an epilogue that never ends": (
        "async def main(input):\n    await one_pass(lambda: fori(10**9, lambda i, x: x, logits()))",
        "cost",
    ),
    "waiting for nothing": ("async def main(input):\n    await asyncio.Event().wait()", "wait"),
}
NATIVE_TOO = [
    "exception in main",
    "prompt over the context",
    "shape error in an epilogue",
    "sys.exit",
    "wrong argument",
]


@pytest.mark.parametrize("name", FAILURES)
def test_a_sandboxed_failure_says_what_was_wrong(run_inferlet: Run, name: str) -> None:
    body, expected = FAILURES[name]
    outcome = run_inferlet((HEAD if "inferlet" not in body else "") + body)
    assert outcome.failure is not None and expected in outcome.failure, outcome


@pytest.mark.parametrize("name", NATIVE_TOO)
def test_a_native_failure_says_what_was_wrong(run_inferlet: Run, name: str) -> None:
    body, expected = FAILURES[name]
    outcome = run_inferlet(HEAD + body, native=True)
    assert outcome.failure is not None and expected in outcome.failure, outcome


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("async def main(input):\n    while True: pass", "time"),
        ("async def main(input):\n    x = []\n    while True: x.append(bytearray(1 << 20))", "emory"),
        ("async def main(input):\n    while True: session.send('x' * 65536)", "output"),
    ],
    ids=["infinite loop", "memory bomb", "flood of output"],
)
def test_what_passes_a_limit_ends_alone(run_inferlet: Run, body: str, expected: str) -> None:
    with ThreadPoolExecutor(1) as pool:
        neighbour = pool.submit(run_inferlet, CONTRACT)
        outcome = run_inferlet(HEAD + body)
    assert outcome.failure is not None and expected in outcome.failure, outcome.failure
    assert neighbour.result().result == {"text": " Paris.\n\nThe answer is:"}


def test_a_failed_program_leaves_nothing_behind(run_inferlet: Run, engine_runtime: Any) -> None:
    run_inferlet(CONTRACT)
    engine_runtime.engine.settle()
    before = engine_runtime.engine.stats()["memory"]
    for name in ("exception in main", "prompt over the context"):
        run_inferlet(HEAD + FAILURES[name][0])
    body = """
async def main(input):
    await one_pass(lambda: reduce_argmax(logits()))
    one_pass(lambda: reduce_argmax(logits()))
    1 / 0
"""
    assert "ZeroDivisionError" in run_inferlet(HEAD + body).failure
    engine_runtime.engine.settle()
    assert engine_runtime.engine.stats()["memory"] == before
    assert engine_runtime.engine.stats()["clients"] == 0


def test_many_at_once_say_the_same_as_one(run_inferlet: Run) -> None:
    prompts = ["The capital of France is", "Once upon a time", "2 + 2 =", "def fibonacci(n):"] * 2
    alone = {prompt: run_inferlet(CONTRACT, {"prompt": prompt}).result for prompt in set(prompts)}
    with ThreadPoolExecutor(len(prompts)) as pool:
        together = list(pool.map(lambda prompt: run_inferlet(CONTRACT, {"prompt": prompt}).result, prompts))
    assert together == [alone[prompt] for prompt in prompts]
    assert None not in alone.values()
