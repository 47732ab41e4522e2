"""What the SDK promises its author, on the fake engine."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_engine import FakeEngine, greedy

from pie_xla.errors import PieError

Run = Callable[..., Any]
HEAD = """
from inferlet import PassError, UsageError, chat, model, sample, session
from inferlet.eta import *
FOLD, READ = StateGeometry.folding(), StateGeometry.reading()
def forward(tokens, sets, geometry=FOLD):
    fwd = ForwardPass()
    fwd.embed(tokens)
    fwd.state(sets, geometry)
    return fwd
pick = lambda row=0: reduce_argmax(intrinsics.output(row, "logits"))
"""
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
PROMPT = [1, *(byte + 3 for byte in b"The capital of France is")]


def text_of(ids: list[int]) -> str:
    return bytes(token - 3 for token in ids if 3 <= token < 259).decode("utf-8", "replace")


def test_the_contract_runs_unmodified(run: Run, engine: FakeEngine) -> None:
    assert run(CONTRACT) == {"text": text_of(greedy(PROMPT, 8))}
    client = engine.clients[0]
    assert len(client.submits) == 8
    assert client.released[:6] == sorted(client.released[:6])  # Outputs that were let go ride on later submits
    assert len({request.program for request in client.submits}) == 1


def test_device_carried_decoding_and_run_ahead(run: Run) -> None:
    result = run(
        HEAD
        + """
async def main(input):
    ws, pipe = WorkingSet(), Pipeline()
    fwd = forward(input["prompt"], [ws])
    out = fwd.epilogue(pick)
    first = pipe.submit(fwd)
    fwd.embed(out)
    tokens = [await first]
    async for token in pipe.run_ahead(fwd, 6, depth=3):
        tokens.append(token)
    again = [await first, await first, await out]
    return {"tokens": tokens, "again": again, "len": len(ws)}
""",
        prompt=PROMPT,
    )
    expected = greedy(PROMPT, 7)
    assert result == {"tokens": expected, "again": [expected[0], expected[0], expected[-1]], "len": len(PROMPT) + 6}


def test_run_ahead_is_few_calls_and_stops_at_the_context(run: Run, engine: FakeEngine) -> None:
    result = run(
        HEAD
        + """
async def main(input):
    ws, pipe = WorkingSet(), Pipeline()
    fwd = forward([5] * 40, [ws])
    out = fwd.epilogue(pick)
    first = pipe.submit(fwd)
    fwd.embed(out)
    calls = []
    submit = pipe._runtime.transport.submit
    pipe._runtime.transport.submit = lambda *args: (calls.append(args[-1]), submit(*args))[1]
    tokens = [await first]
    try:
        async for token in pipe.run_ahead(fwd, 40, depth=8):
            tokens.append(token)
    except Exception as error:
        return {"tokens": tokens, "calls": calls, "error": str(error), "len": len(ws)}
""",
    )
    # 64 tokens fit: 24 after the prompt; eight at first, then four for each four that came, then one by one
    assert result["calls"] == [8, 4, 4, 4, 4]
    assert result["len"] == 64 and "context" in result["error"]
    assert result["tokens"] == greedy([5] * 40, 25)  # what is underway still arrives


def test_values_have_the_authors_types(run: Run) -> None:
    result = run(
        HEAD
        + """
async def main(input):
    ws, pipe = WorkingSet(), Pipeline()
    fwd = forward([5], [ws])
    a, b, c, d = fwd.epilogue(lambda: (pick(), reduce_max(intrinsics.output(0, "logits")) > 0.0,
                                       log(intrinsics.output(0, "logits")[0:2] * 0.0), top_k(intrinsics.output(0,
                                       "logits"), 3)[1]))
    outs = pipe.submit(fwd)
    got = [await out for out in outs]
    got[2].append(1)
    assert await c == [float("-inf")] * 2, await c
    assert [type(x).__name__ for x in got] == ["int", "bool", "list", "list"]
    assert got[3][0] == got[0]
    return [repr(out) for out in (a, outs[3])]
""",
    )
    assert result == ["Output(i32[], here)", "Output(u32[3], here)"]


def test_rows_forks_and_reading(run: Run) -> None:
    result = run(
        HEAD
        + """
async def main(input):
    base, pipe = WorkingSet(), Pipeline()
    pipe.submit(forward([5, 6], [base]))
    sets = [base, base.fork(), base.fork()]
    fwd = forward([[7], [8, 9], [10]], sets)
    outs = fwd.epilogue(lambda: tuple(pick(i) for i in range(3)))
    pipe.submit(fwd)
    fwd.embed([outs[0], outs[1], [11]])
    second = pipe.submit(fwd)
    look = forward([20], [sets[2]], READ)
    seen = look.epilogue(pick)
    pipe.submit(look)
    sets[0].truncate(1)
    tail = forward([30, 31, 32], [sets[0]])
    tail.readout([0, -1])
    both = tail.epilogue(lambda: reduce_argmax(intrinsics.output(0, "logits")))
    pipe.submit(tail)
    return {"second": [await out for out in second], "seen": await seen, "both": await both, "lens": [len(s) for s in
    sets]}
""",
    )
    first = [greedy([5, 6, 7], 1)[0], greedy([5, 6, 8, 9], 1)[0]]
    assert result == {
        "second": [
            greedy([5, 6, 7, first[0]], 1)[0],
            greedy([5, 6, 8, 9, first[1]], 1)[0],
            greedy([5, 6, 10, 11], 1)[0],
        ],
        "seen": greedy([5, 6, 10, 11, 20], 1)[0],
        "both": [greedy([5, 30], 1)[0], greedy([5, 30, 31, 32], 1)[0]],
        "lens": [4, 5, 4],
    }


def test_channels_carry_tokens_and_control(run: Run) -> None:
    result = run(
        HEAD
        + """
async def main(input):
    ws, pipe = WorkingSet(), Pipeline()
    token, seen, bonus = Channel((), i32), Channel((), i32, capacity=8), Channel.of([0.0] * 300)
    def step():
        chosen = reduce_argmax(intrinsics.output(0, "logits") + bonus.read())
        token.put(chosen)
        seen.put(chosen)
    first = forward(input["prompt"], [ws])
    first.epilogue(step)
    pipe.submit(first)
    fwd = forward(token, [ws])
    fwd.epilogue(step)
    for _ in range(3):
        pipe.submit(fwd)
    tokens = [await seen.take() for _ in range(3)]
    tokens += [await seen.read(), await seen.take()]
    bonus.set([1000.0 if i == 77 else 0.0 for i in range(300)])
    pipe.submit(fwd)
    tokens.append(await seen.take())
    return tokens
""",
        prompt=PROMPT,
    )
    expected = greedy(PROMPT, 4)
    assert result == [*expected[:3], expected[3], expected[3], 77]


def test_a_failure_reaches_its_await_and_what_depends_on_it(run: Run, engine: FakeEngine) -> None:
    result = run(
        HEAD
        + """
import asyncio
async def main(input):
    ws, pipe = WorkingSet(), Pipeline()
    await pipe.submit(forward([5], [ws]))
    return await second(ws, pipe)
async def second(ws, pipe):
    session.send("now")
    fwd = forward([6], [ws])
    out = fwd.epilogue(pick)
    bad = pipe.submit(fwd)
    fwd.embed(bad)
    worse = pipe.submit(fwd)
    errors = []
    for one in (bad, worse, worse):
        try:
            await one
        except PassError as error:
            errors.append([error.cause, error.line])
    fwd.embed([6])
    return {"errors": errors, "len": len(ws), "then": await pipe.submit(fwd)}
""",
        lambda event: (
            engine.fail.append("NaN") if engine.fail == engine.fail.__class__() and "Sent" in repr(event) else None
        ),
    )
    assert result == {
        "errors": [["NaN", "main.py:21"], ["NaN", "main.py:21"], ["NaN", "main.py:21"]],
        "len": 1,
        "then": greedy([5, 6], 1)[0],
    }


@pytest.mark.parametrize(
    ("body", "line", "words"),
    [
        ("forward([], [ws])", "", "no tokens"),
        ("forward([[1], []], [ws])", "", "row 1 has no tokens"),
        ("forward([1, 300], [ws])", "", "row 0, token 1 is 300: the vocabulary of fake is 0 to 299"),
        ("forward([-1], [ws])", "", "token 0 is -1"),
        ("forward(['a'], [ws])", "", "tokens are ints"),
        ("forward('text', [ws])", "", "model.encode"),
        ("forward([1, [2]], [ws])", "", "ints mixed with list (entry 1)"),
        ("forward([True], [ws])", "", "tokens are ints"),
        ("pipe.submit(forward([[1], [2]], [ws]))", "", "2 rows, but state gives 1 sets"),
        ("forward([[1], [2]], [ws, ws])", "", "set 1 is given twice"),
        ("forward([1], ws)", "", "state takes a list"),
        ("forward([1], [ws], 'fold')", "", "StateGeometry"),
        ("pipe.close(); pipe.submit(forward([1], [ws]))", "", "closed pipeline"),
        ("fwd = ForwardPass(); fwd.embed([1]); pipe.submit(fwd)", "", "has no state"),
        ("fwd = ForwardPass(); fwd.state([ws], FOLD); pipe.submit(fwd)", "", "embeds nothing"),
        ("ForwardPass().epilogue(pick)", "", "call embed"),
        ("forward([1], [ws]).epilogue(lambda: pick(1))", "", "this pass has rows 0 to 0"),
        ("forward([1], [ws]).epilogue(lambda: intrinsics.output(0, 'logit'))", "", "it has: logits, hidden"),
        ("forward([1], [ws]).readout([1])", "", "position 1 of row 0, which has 1 new tokens"),
        ("forward([1, 2], [ws]).readout([1, 0])", "", "increasing order"),
        (
            "pipe.submit(forward([1] * 65, [ws]))",
            "",
            "would be 65 tokens long (0 in the set and 65 new), but the context of fake is 64",
        ),
        ("await forward([1], [ws]).epilogue(pick)", "", "never submitted"),
        ("fwd = forward([1], [ws]); fwd.embed(fwd.epilogue(pick)); pipe.submit(fwd)", "", "never submitted"),
        ("out = forward([1], [ws]).epilogue(pick); bool(out)", "", "await"),
        ("out = forward([1], [ws]).epilogue(pick); out == 3", "", "await"),
        ("ws.truncate(1)", "", "truncate(1) of a set of 0 tokens"),
        ("forward([1], [ws]).media(pick)", "", "ForwardPass.media is not in this version"),
        ("forward([1], [ws]).on_attn(pick)", "", "on_attn: fake shows no attention layers"),
        ("Channel((2,), 'f64')", "", "f64"),
        ("Channel((2,), f32, 0)", "", "at least 1"),
        ("Channel.of([1, 2.0])", "", "one kind of number"),
        ("Channel(2, i32).put([1, 2, 3])", "", "shape [3] does not fit"),
        ("Channel(2, i32).put([1.5, 2.5])", "", "dtype f32 does not fit"),
        ("Channel.of(2 ** 40)", "", "i32 cannot hold"),
        ("Pipeline(seed=-1)", "", "seed -1"),
        ("reduce_argmax([1.0])", "", "inside an epilogue only"),
        ("model.decode([1, 300])", "", "entry 1 is 300"),
        ("sample.top_p(0.0)", "", "top_p 0.0"),
        ("session.log('x', level='loud')", "", "level 'loud'"),
    ],
)
def test_misuse_is_named_at_the_authors_line(run: Run, body: str, line: str, words: str) -> None:
    source = HEAD + f"async def main(input):\n    ws, pipe = WorkingSet(), Pipeline()\n    {body}\n"
    with pytest.raises(PieError) as failed:
        run(source)
    text = str(failed.value)
    assert words in text
    last = re.findall(r'File "(.*?)", line (\d+)', text)[-1]
    assert last[0] == "main.py" and int(last[1]) in (7, 8, 10, 13), text  # main's line, or the author's own helper's


def test_random_draws_repeat_with_the_seed(run: Run) -> None:
    source = (
        HEAD
        + """
async def main(input):
    draws = []
    for seed in (3, 3, 4, None, None):
        ws, pipe = WorkingSet(), Pipeline(seed)
        fwd = forward([5], [ws], READ)
        fwd.epilogue(sample.temperature(1.0))
        draws.append([await pipe.submit(fwd) for _ in range(6)])
    return draws
"""
    )
    draws = run(source)
    assert draws[0] == draws[1] and len({str(d) for d in draws}) == 4
    assert len(set(draws[0])) > 1  # the ordinal moves the draw
    assert run(source) == draws  # the process's seed was given too


def test_samplers(run: Run) -> None:
    result = run(
        HEAD
        + """
async def main(input):
    pipe, kept = Pipeline(1), {}
    def draw(name, epilogue, n=40):
        return [pipe.submit(fwd) for fwd in [made(epilogue)] for _ in range(n)]
    def made(epilogue):
        fwd = forward([5], [WorkingSet()], READ)
        fwd.epilogue(epilogue)
        return fwd
    best = await pipe.submit(made(sample.greedy()))
    for name, epilogue in {"cold": sample.temperature(0), "k1": sample.top_k(1), "k5": sample.top_k(5, temperature=3.0),
                           "p": sample.top_p(0.02), "min_p": sample.min_p(0.8), "all": sample.sampler(0.5, 20, 0.9,
                           0.05)}.items():
        kept[name] = sorted({await one for one in draw(name, epilogue)})
    top = made(lambda: top_k(intrinsics.output(0, "logits"), 5)[1])
    return {"best": best, "kept": kept, "top": sorted(await pipe.submit(top))}
""",
    )
    assert result["kept"]["cold"] == result["kept"]["k1"] == [result["best"]]
    assert set(result["kept"]["k5"]) <= set(result["top"]) and len(result["kept"]["k5"]) == 5
    assert result["best"] in result["kept"]["p"] and len(result["kept"]["p"]) < 6
    assert len(result["kept"]["min_p"]) < 6 and len(result["kept"]["all"]) <= 20


def test_text_streams_only_whole_characters(run: Run) -> None:
    pieces = run(
        """
from inferlet import model
async def main(input):
    stream = model.TextStream()
    pieces = [stream.push(token) for token in model.encode("aé€😀b") + [0xC3 + 3]]
    return pieces + [stream.finish(), stream.finish()]
"""
    )
    assert "".join(pieces) == "aé€😀b\ufffd"
    assert pieces == ["a", "", "é", "", "", "€", "", "", "", "😀", "b", "", "\ufffd", ""]


def test_giving_up_on_a_value_leaves_it_to_others(run: Run, engine: FakeEngine) -> None:
    result = run(
        HEAD
        + """
import asyncio
async def main(input):
    ch = Channel((), i32)
    front = ch.read()
    async def waits():
        return await front
    other = asyncio.create_task(waits())
    try:
        await asyncio.wait_for(front, 0.02)
    except TimeoutError:
        ch.put(5)
    return [await other, await front]
"""
    )
    assert result == [5, 5]


def test_another_world_is_refused_by_name() -> None:
    from inferlet import InferletError
    from inferlet._host import Facts

    facts = {
        "name": "m",
        "vocab_size": 9,
        "max_context": 9,
        "page_size": 4,
        "outputs": {},
        "stop_tokens": [],
        "prefix": [],
    }
    assert Facts.from_json({**facts, "seed": 1, "world": "pie:inferlet@0.1.7"}).vocab_size == 9
    for world in ("pie:inferlet@0.2.0", "other:world@0.1.0"):
        with pytest.raises(InferletError, match=f"the host speaks {world}, but inferlet .* needs pie:inferlet@0.1.0"):
            Facts.from_json({**facts, "seed": 1, "world": world})


def test_the_guests_transport_matches_the_others() -> None:
    """`_guest.py` can be imported in the sandbox only; its methods are those of the native transport."""
    from pie_xla.process.native import NativeTransport
    from pie_xla.process.sdk import sdk_folder

    source = Path(sdk_folder() / "inferlet" / "_guest.py").read_text("utf-8")
    named = {name for name in re.findall(r"    def (\w+)\(", source) if not name.startswith("_")}
    assert named == {name for name in vars(NativeTransport) if not name.startswith("_")}
