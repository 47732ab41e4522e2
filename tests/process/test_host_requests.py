"""A guest's JSON is hostile: every odd request is refused by name, and what is right arrives exactly."""

from __future__ import annotations

import contextlib
import json
import math
import time
from typing import Any

import numpy as np
import pytest
from fake_engine import FACTS, Bytes, FakeEngine
from hypothesis import given
from hypothesis import strategies as st

from pie_xla.engine.api import FromChannel, Geometry, PassError
from pie_xla.engine.packing import words_of
from pie_xla.errors import PieError
from pie_xla.eta.types import DType, TensorType
from pie_xla.process.events import encode_events
from pie_xla.process.host import InferletHost, nth_seed
from pie_xla.process.limits import HostLimits
from pie_xla.process.requests import ProgramCache, RequestError, parse_pass, parse_value
from pie_xla.process.wasm.hostapi import Pending


class Program:
    key = "made by hand"
    rows = 1
    reads = ()
    params = (TensorType(DType.F32), TensorType(DType.I32, (2,)))
    channels = ()
    results = (TensorType(DType.I32, (3,)),)

    def apply(self, reads: Any, params: Any, cells: Any, key: Any, ordinal: Any) -> Any:
        return [np.array([4, 5, 6], np.int32)], []


PROGRAM: Any = Program()
GOOD: dict[str, Any] = {
    "rows": [{"set": 3, "tokens": [1, 2]}],
    "geometry": "read",
    "readout": [[0, 1]],
    "program": "p",
    "params": [0.5, [1, -2]],
    "channels": [],
    "line": "main.py:14",
    "drop": [],
}


class Ears:
    def __init__(self) -> None:
        self.heard: list[Any] = []

    def sent(self, text: str) -> None:
        self.heard.append(text)

    def logged(self, level: int, text: str) -> None:
        self.heard.append((level, text))


def parse(request: Any) -> Any:
    return parse_pass(request, lambda text: PROGRAM, 100)[0]


def make(engine: FakeEngine, limits: HostLimits | None = None) -> tuple[InferletHost, Ears]:
    ears = Ears()
    host = InferletHost(
        lambda on_event: engine.client("test", on_event),
        FACTS,
        Bytes(),
        ProgramCache(lambda text: PROGRAM),
        ears,
        limits,
        5,
    )
    return host, ears


def wait(host: InferletHost) -> Any:
    found = host.wait(5000)
    if isinstance(found, Pending):
        for _ in range(500):
            if found.woken:
                break
            time.sleep(0.01)
        found = found.collect()
    return json.loads(found)


def test_a_good_request_arrives_exactly() -> None:
    parsed = parse(GOOD)
    assert parsed.rows[0].set == 3 and parsed.rows[0].tokens == (1, 2)
    assert parsed.geometry is Geometry.READ and parsed.readout == ((0, 1),) and parsed.line == "main.py:14"
    assert parsed.params[0].dtype == np.float32 and parsed.params[0].shape == () and parsed.params[0] == 0.5
    assert parsed.params[1].dtype == np.int32 and parsed.params[1].tolist() == [1, -2]
    assert parse({"rows": [{"set": 1, "channel": 4}], "program": None}).rows[0].tokens == FromChannel(4)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rows": []}, "at least one row"),
        ({"rows": {}}, "at least one row"),
        ({"rows": [{"set": 3, "tokens": []}]}, "no tokens"),
        ({"rows": [{"set": 3, "tokens": [1, 100]}]}, "entry 1 is 100"),
        ({"rows": [{"set": 3, "tokens": [True]}]}, "entry 0 is True"),
        ({"rows": [{"set": 3, "tokens": [1.0]}]}, "entry 0 is 1.0"),
        ({"rows": [{"set": 3, "tokens": "12"}]}, "not a list"),
        ({"rows": [{"set": -1, "tokens": [1]}]}, "set of row 0 is -1"),
        ({"rows": [{"set": 2**32, "tokens": [1]}]}, "set of row 0"),
        ({"rows": [{"set": 3, "ticket": [1]}]}, "[ticket, result]"),
        ({"rows": [{"set": 3, "tokens": [1], "channel": 2}]}, "one of tokens, ticket, channel"),
        ({"rows": [{"set": 3, "other": [1]}]}, "one of tokens, ticket, channel"),
        ({"rows": [GOOD["rows"][0], GOOD["rows"][0]]}, "readout needs one list per row"),
        ({"geometry": "sideways"}, "geometry 'sideways'"),
        ({"geometry": ["fold"]}, "geometry"),
        ({"readout": [[-1]]}, "entry 0 is -1"),
        ({"params": [0.5]}, "2 parameters, the submit gives 1"),
        ({"params": [0.5, [1]]}, "does not have shape [2]"),
        ({"params": ["x", [1, 2]]}, "parameter 0 is not f32"),
        ({"params": [True, [1, 2]]}, "parameter 0 is not f32"),
        ({"params": [0.5, [1, 2**31]]}, "cannot hold"),
        ({"params": [0.5, [1, 2.0]]}, "parameter 1 is not i32"),
        ({"channels": [1]}, "uses 0 channels, the submit gives 1"),
        ({"line": "x" * 513}, "line is a short string"),
        ({"extra": 1}, "no field 'extra'"),
    ],
)
def test_odd_requests_are_refused_by_name(change: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError) as refused:
        parse({**GOOD, **change})
    assert words in str(refused.value)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["set", "tokens", "ticket", "x"]), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(st.sampled_from(sorted(GOOD)), json_values)
def test_nonsense_never_raises_anything_else(field: str, value: Any) -> None:
    with contextlib.suppress(PieError):
        parse({**GOOD, field: value})


def test_named_floats_and_ranges() -> None:
    kind = TensorType(DType.F32, (4,))
    floats = parse_value(["nan", "inf", "-inf", 3], kind, "it")
    assert math.isnan(floats[0]) and floats[1:].tolist() == [math.inf, -math.inf, 3.0]
    for value, kind, words in [
        ([True, False], TensorType(DType.BOOL, (2,)), [1, 0]),
        (-1, TensorType(DType.I32), [-1]),
        (2**32 - 1, TensorType(DType.U32), [-1]),
        (1.0, TensorType(DType.F32), [0x3F800000]),
    ]:
        assert words_of(parse_value(value, kind, "it"), kind).tolist() == words
    with pytest.raises(RequestError):
        parse_value("12", TensorType(DType.F32), "it")


def test_events_carry_every_float() -> None:
    events = [(2, 0, [[1.5, math.inf, -math.inf]]), (4, 0, [math.nan]), (6, 0, [3, True])]
    assert json.loads(encode_events(events)) == [[2, 0, [[1.5, "inf", "-inf"]]], [4, 0, ["nan"]], [6, 0, [3, True]]]


def test_submit_wait_drop(engine: FakeEngine) -> None:
    host, _ = make(engine)
    client = engine.clients[-1]
    ws, pipe = host.new_set(), host.new_pipeline(None)
    request = {**GOOD, "rows": [{"set": ws, "tokens": [1, 2]}]}
    first = host.submit(pipe, json.dumps(request))
    assert wait(host) == [[first, 0, [[4, 5, 6]]]]
    with pytest.raises(RequestError, match="has 1 results, not a result 1"):
        host.submit(pipe, json.dumps({"rows": [{"set": ws, "ticket": [first, 1]}]}))
    host.submit(pipe, json.dumps({"rows": [{"set": ws, "ticket": [first, 0]}]}))
    host.submit(pipe, json.dumps({"rows": [{"set": ws, "tokens": [3]}], "drop": [first, 999, first + 1]}))
    assert client.released == [first // 2]
    with pytest.raises(RequestError, match="was dropped"):
        host.submit(pipe, json.dumps({"rows": [{"set": ws, "ticket": [first, 0]}]}))


def test_a_dropped_failure_is_logged_and_undone(engine: FakeEngine) -> None:
    host, ears = make(engine)
    ws, pipe = host.new_set(), host.new_pipeline(None)
    engine.post(lambda: time.sleep(0.1))
    engine.fail.append("no luck")
    first = host.submit(pipe, json.dumps({"rows": [{"set": ws, "tokens": [1, 2]}], "line": "main.py:3"}))
    second = host.submit(pipe, json.dumps({"rows": [{"set": ws, "tokens": [3]}], "drop": [first]}))
    events = wait(host)
    if len(events) == 1:
        events += wait(host)
    assert events == [
        [first, 1, {"message": "no luck", "line": "main.py:3", "undone": [[ws, 2]]}],
        [second, 0, []],
    ]
    assert ears.heard == [(30, "a pass submitted at main.py:3 failed, and nothing awaits it: no luck\n")]


def test_what_is_undone_counts_truncations(engine: FakeEngine) -> None:
    host, _ = make(engine)
    ws, pipe = host.new_set(), host.new_pipeline(None)
    host.submit(pipe, json.dumps({"rows": [{"set": ws, "tokens": [1] * 5}]}))
    wait(host)
    engine.post(lambda: time.sleep(0.1))
    engine.fail += ["a", "b", "c"]
    for length in (6, 2):
        host.submit(pipe, json.dumps({"rows": [{"set": ws, "tokens": [1, 2, 3]}]}))
        host.truncate_set(ws, length)
    host.submit(pipe, json.dumps({"rows": [{"set": ws, "tokens": [1]}]}))
    undone: list[Any] = []
    while len(undone) < 3:
        undone += [event[2]["undone"] for event in wait(host)]
    assert undone == [[[ws, 0]], [[ws, 0]], [[ws, 1]]]
    assert host._lengths[ws] == 2


def test_limits_are_named(engine: FakeEngine) -> None:
    host, ears = make(
        engine, HostLimits(request_bytes=200, tickets=2, unread_bytes=20, output_bytes=10, log_bytes=8, text_bytes=5)
    )
    pipe = host.new_pipeline(1)
    with pytest.raises(RequestError, match="the limit is 200"):
        host.submit(pipe, json.dumps({"rows": [{"set": 1, "tokens": [1] * 300}]}))
    with pytest.raises(RequestError, match="not JSON"):
        host.submit(pipe, "{")
    with pytest.raises(RequestError, match="not JSON"):
        host.submit(pipe, "[" * 190)
    host.send("12345")
    with pytest.raises(RequestError, match="limit of 10 bytes"):
        host.send("123456")
    host.log(20, "12345678")
    host.log(20, "9")
    host.log(20, "10")
    assert ears.heard[1:] == [
        (20, "12345678"),
        (30, "this process logged more than 8 characters; the rest is dropped\n"),
    ]
    with pytest.raises(RequestError, match="the limit is 5"):
        host.encode("123456", False)
    with pytest.raises(RequestError, match="not in the vocabulary"):
        host.decode([5, 300], True)
    host.receive()
    host.receive()
    with pytest.raises(RequestError, match="the limit is 2"):
        host.receive()


def test_unread_results_stop_new_ones(engine: FakeEngine) -> None:
    host, _ = make(engine, HostLimits(unread_bytes=20))
    ws, pipe = host.new_set(), host.new_pipeline(1)
    text = json.dumps({**GOOD, "rows": [{"set": ws, "tokens": [1, 2]}]})
    for _ in range(2):
        host.submit(pipe, text)
    for _ in range(500):
        if host._arrived == 24:
            break
        time.sleep(0.01)
    with pytest.raises(RequestError, match="24 bytes of results are unread"):
        host.submit(pipe, text)
    wait(host)
    host.submit(pipe, text)


@pytest.mark.parametrize(
    "spec",
    [
        "[]",
        "{",
        '{"dtype":"f32"}',
        '{"dtype":"f64","shape":[],"capacity":1}',
        '{"dtype":"f32","shape":[0],"capacity":1}',
        '{"dtype":"f32","shape":[1,1,1,1,1],"capacity":1}',
        '{"dtype":"f32","shape":[4194304,4194304],"capacity":1}',
        '{"dtype":"f32","shape":[],"capacity":0}',
        '{"dtype":["f32"],"shape":[],"capacity":1}',
    ],
)
def test_bad_channels(engine: FakeEngine, spec: str) -> None:
    host, _ = make(engine)
    with pytest.raises(PieError):
        host.new_channel(spec)


def test_channels_put_take(engine: FakeEngine) -> None:
    host, _ = make(engine)
    ch = host.new_channel('{"dtype":"f32","shape":[2],"capacity":2}')
    take = host.channel(ch, "take", "")
    host.channel(ch, "put", '[1.5,"-inf"]')
    assert wait(host) == [[take, 0, [[1.5, "-inf"]]]]
    for op, value in (("put", "[1]"), ("put", '"x"'), ("shake", ""), ("put", "")):
        with pytest.raises(PieError):
            host.channel(ch, op, value)
    host.channel(ch, "drop", "")
    with pytest.raises(RequestError, match="not one of this process"):
        host.channel(ch, "take", "")


def test_a_closed_host_refuses(engine: FakeEngine) -> None:
    host, _ = make(engine)
    host.close()
    host.close()
    with pytest.raises(RequestError, match="has ended"):
        host.new_set()
    with pytest.raises(PieError, match="no more messages"):
        host.post("x")


def test_seeds_of_pipelines() -> None:
    assert nth_seed(5, 0) == 5
    assert nth_seed(0, 1) == 0xE220A8397B1DCDAF  # the first output of the published splitmix64 for seed 0
    assert len({nth_seed(5, n) for n in range(100)}) == 100


def test_a_pass_error_says_where() -> None:
    assert str(PassError("x", "main.py:1")) == "x (pass submitted at main.py:1)"


def test_a_megabyte_is_the_most_to_encode(engine: FakeEngine) -> None:
    host, _ = make(engine)
    assert len(host.encode("x" * (1 << 20), False)) == 1 << 20
    with pytest.raises(RequestError, match="the text to encode has 1048577 characters; the limit is 1048576"):
        host.encode("x" * ((1 << 20) + 1), False)
    with pytest.raises(RequestError, match=r"a chat request has .* the limit is 1048576"):
        host.chat(json.dumps({"messages": [{"role": "user", "content": "x" * (1 << 20)}]}))
