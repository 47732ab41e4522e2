"""Parameters that come later: their pass waits, nobody else does; one that never comes fails its pass with the cause."""

from __future__ import annotations

import json
import time
from concurrent.futures import Future

import numpy as np
import pytest
from tiny import Greedy, Listener, V, engine, load, reference_greedy

from pie_xla.engine.api import FromTicket, PassError, PassRequest, Row
from pie_xla.errors import PieError
from pie_xla.eta.program import EtaProgram

PROMPT = [5, 17, 80, 3, 3, 41]
WORDS = -(-V // 32)
MASKED = EtaProgram.from_json(json.dumps({
    "body": {
        "channels": [], "eta": 1, "params": [["u32", [WORDS]]], "reads": [[0, "logits", "f32", [V]]], "rows": 1, "single": True,
        "ops": [["output", [], {"i": 0}], ["param", [], {"i": 0}], ["mask_apply_packed", [0, 1], {}], ["reduce_argmax", [2], {}]],
        "out": [3],
    },
    "lines": ["main.py:1"] * 4, "source": "main.py:1",
}))  # fmt: skip


def only(*tokens: int) -> np.ndarray:
    """A packed mask, u32[WORDS]."""
    bits = np.zeros(WORDS * 32, np.uint8)
    bits[list(tokens)] = 1
    return np.packbits(bits, bitorder="little").view(np.uint32)


@pytest.fixture(scope="module")
def model():
    return load()


@pytest.fixture
def served(model):
    made = engine(model)
    yield made
    made.settle()
    for free, cached, total in made.stats()["memory"].values():
        assert free + cached <= total
    made.close()


def test_a_pass_waits_for_its_parameter_and_others_do_not(served, model):
    slow, other = Listener(), Listener()
    client, neighbour = served.client("", slow), served.client("", other)
    mask: Future[np.ndarray] = Future()
    ws, pipe = client.new_set(), client.new_pipeline()
    waiting = client.submit(pipe, PassRequest((Row(ws, tuple(PROMPT)),), program=MASKED, params=(mask,)))
    behind: Future[np.ndarray] = Future()
    after = client.submit(pipe, PassRequest((Row(ws, FromTicket(waiting)),), program=MASKED, params=(behind,)))
    behind.set_result(only(30))  # its turn has not come all the same
    program, set_, line = Greedy(), neighbour.new_set(), neighbour.new_pipeline()
    tokens = [neighbour.submit(line, PassRequest((Row(set_, tuple(PROMPT)),), program=program))]
    for _ in range(3):
        tokens.append(neighbour.submit(line, PassRequest((Row(set_, FromTicket(tokens[-1])),), program=program)))
    expected = reference_greedy(model.lowered, model.params, PROMPT, 4)
    assert [int(other.wait(t)[0]) for t in tokens] == expected
    assert client.set_length(ws) == len(PROMPT) + 1
    mask.set_result(only(7, 8))
    assert int(slow.wait(waiting)[0]) in (7, 8)
    assert int(slow.wait(after)[0]) == 30
    neighbour.close()
    client.close()


@pytest.mark.parametrize(
    ("failure", "says"),
    [
        (PieError("the grammar is too large"), "the grammar is too large"),
        (RuntimeError("boom"), "never came: RuntimeError: boom"),
        (np.zeros(WORDS + 1, np.uint32), f"parameter 0 is uint32.{WORDS + 1}."),
        (np.zeros(WORDS, np.int32), "parameter 0 is int32"),
        (None, "was cancelled"),
    ],
)
def test_a_parameter_that_never_comes_fails_its_pass(served, failure, says):
    listener = Listener()
    client = served.client("", listener)
    mask: Future[np.ndarray] = Future()
    ws, pipe = client.new_set(), client.new_pipeline()
    ticket = client.submit(
        pipe, PassRequest((Row(ws, tuple(PROMPT)),), program=MASKED, params=(mask,), line="main.py:9")
    )
    behind = client.submit(pipe, PassRequest((Row(ws, (3,)),), program=MASKED, params=(only(4),)))
    match failure:
        case None:
            mask.cancel()
        case Exception():
            mask.set_exception(failure)
        case _:
            mask.set_result(failure)
    for one in (ticket, behind):  # what stands behind it on the set has lost the tokens before it
        with pytest.raises(PassError, match=says):
            listener.wait(one)
    assert client.set_length(ws) == 0
    good = client.submit(pipe, PassRequest((Row(ws, tuple(PROMPT)),), program=MASKED, params=(only(4),)))
    assert int(listener.wait(good)[0]) == 4
    client.close()


def test_closing_cancels_what_is_waited_for(served):
    client = served.client("", Listener())
    mask: Future[np.ndarray] = Future()
    ws, pipe = client.new_set(), client.new_pipeline()
    client.submit(pipe, PassRequest((Row(ws, tuple(PROMPT)),), program=MASKED, params=(mask,)))
    client.close()
    end = time.monotonic() + 10
    while not mask.cancelled() and time.monotonic() < end:
        time.sleep(0.01)
    assert mask.cancelled()


def test_lanes_whose_parameters_come_together_stay_one_launch(model):
    import dataclasses

    from tiny import OPTIONS

    served = engine(model, dataclasses.replace(OPTIONS, gather_seconds=5.0))
    try:
        served.default.programs.build_step(served.default.buckets.decode[2])
        served.default.programs.build(served.default.programs.entry(MASKED), 4)
        listener = Listener()
        clients = [served.client("", listener) for _ in range(4)]
        heard = []
        for client in clients:
            ws, pipe = client.new_set(), client.new_pipeline()
            heard.append(
                (
                    client,
                    ws,
                    pipe,
                    client.submit(pipe, PassRequest((Row(ws, (9,)),), program=MASKED, params=(only(1),))),
                )
            )
        served.settle()
        before = served.stats()["launches"]
        served.default.step_seconds = 100.0  # a launch may be held for five seconds
        masks: list[Future[np.ndarray]] = [Future() for _ in heard]
        for (client, ws, pipe, _), mask in zip(heard, masks, strict=True):
            client.submit(pipe, PassRequest((Row(ws, (9,)),), program=MASKED, params=(mask,)))
        served._wake()
        for i, mask in enumerate(masks):
            time.sleep(0.02)
            mask.set_result(only(i))
        served.settle()
        assert served.stats()["launches"] == before + 1
    finally:
        served.close()
