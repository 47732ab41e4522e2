"""The engine end to end on a tiny model: tokens equal the bare step's, whatever the batch and however the token travels."""

from __future__ import annotations

import numpy as np
import pytest
from tiny import OPTIONS, Greedy, Listener, Scaled, engine, load, reference_greedy

from pie_xla.engine.api import FromChannel, FromTicket, Geometry, PassError, PassRequest, Row
from pie_xla.errors import PieError
from pie_xla.eta.types import DType, TensorType

PROMPT = [5, 17, 80, 3, 3, 41]
LONG = [int(x) for x in np.random.default_rng(1).integers(0, 97, 61)]


@pytest.fixture(scope="module")
def model():
    return load()


@pytest.fixture(scope="module")
def served(model):
    made = engine(model)
    yield made
    made.close()


@pytest.fixture
def account(served):
    listener = Listener()
    client = served.client("test", listener)
    yield client, listener
    client.close()
    served.settle()
    for free, used, total in served.stats()["memory"].values():
        assert used == 0 and free == total
    assert served.stats()["words used"] == 0


def decode(client, listener, prompt, n, program=None):
    ws, pipe = client.new_set(), client.new_pipeline()
    tokens, done = list(prompt), 0
    for _ in range(n):
        ticket = client.submit(pipe, PassRequest((Row(ws, tuple(tokens[done:])),), program=program or Greedy()))
        done = len(tokens)
        tokens.append(int(listener.wait(ticket)[0]))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("prompt", [PROMPT, LONG], ids=["short", "chunked"])
def test_host_loop_equals_bare_step(account, model, prompt):
    assert decode(*account, prompt, 6) == reference_greedy(model.lowered, model.params, prompt, 6)


def test_tokens_carried_by_output(account, model):
    client, listener = account
    ws, pipe = client.new_set(), client.new_pipeline()
    tickets = [client.submit(pipe, PassRequest((Row(ws, tuple(PROMPT)),), program=Greedy()))]
    for _ in range(9):
        tickets.append(client.submit(pipe, PassRequest((Row(ws, FromTicket(tickets[-1])),), program=Greedy())))
    got = [int(listener.wait(t)[0]) for t in tickets]
    assert got == reference_greedy(model.lowered, model.params, PROMPT, 10)
    assert client.set_length(ws) == len(PROMPT) + 9


def test_tokens_carried_by_channel(account, model):
    client, listener = account
    ws, pipe = client.new_set(), client.new_pipeline()
    channel = client.new_channel(TensorType(DType.I32, ()))
    program = Greedy(feedback=True)
    tickets = [client.submit(pipe, PassRequest((Row(ws, tuple(PROMPT)),), program=program, channels=(channel,)))]
    for _ in range(9):
        tickets.append(
            client.submit(pipe, PassRequest((Row(ws, FromChannel(channel)),), program=program, channels=(channel,)))
        )
    got = [int(listener.wait(t)[0]) for t in tickets]
    expected = reference_greedy(model.lowered, model.params, PROMPT, 10)
    assert got == expected
    assert int(listener.wait(client.take_channel(channel))[0]) == expected[-1]


def test_many_processes_at_once_equal_alone(served, model):
    prompts = [LONG[i : i + 3 + 5 * (i % 4)] for i in range(11)]
    listeners = [Listener() for _ in prompts]
    clients = [served.client(f"p{i}", listener) for i, listener in enumerate(listeners)]
    last = []
    for client, prompt in zip(clients, prompts, strict=True):
        ws, pipe = client.new_set(), client.new_pipeline()
        tickets = [client.submit(pipe, PassRequest((Row(ws, tuple(prompt)),), program=Greedy()))]
        for _ in range(7):
            tickets.append(client.submit(pipe, PassRequest((Row(ws, FromTicket(tickets[-1])),), program=Greedy())))
        last.append(tickets)
    for client, listener, tickets, prompt in zip(clients, listeners, last, prompts, strict=True):
        got = [int(listener.wait(t)[0]) for t in tickets]
        assert got == reference_greedy(model.lowered, model.params, prompt, 8)
        client.close()
    served.settle()
    assert served.stats()["words used"] == 0


def test_fork_copies_on_write(account, model):
    client, listener = account
    ws, pipe = client.new_set(), client.new_pipeline()
    first = client.submit(pipe, PassRequest((Row(ws, tuple(PROMPT)),), program=Greedy()))
    child = client.fork_set(ws)  # of a set with a pass in flight: it is the set after it
    assert client.set_length(child) == len(PROMPT)
    a = client.submit(pipe, PassRequest((Row(ws, (11, 12, 13)),), program=Greedy()))
    b = client.submit(pipe, PassRequest((Row(child, (50, 51)),), program=Greedy()))
    listener.wait(first)
    expected_a = reference_greedy(model.lowered, model.params, [*PROMPT, 11, 12, 13], 1)
    expected_b = reference_greedy(model.lowered, model.params, [*PROMPT, 50, 51], 1)
    assert [int(listener.wait(a)[0])] == expected_a
    assert [int(listener.wait(b)[0])] == expected_b


def test_truncate_goes_back(account, model):
    client, listener = account
    ws, pipe = client.new_set(), client.new_pipeline()
    client.submit(pipe, PassRequest((Row(ws, tuple(LONG)),)))
    client.truncate_set(ws, 20)
    ticket = client.submit(pipe, PassRequest((Row(ws, (9,)),), program=Greedy()))
    assert [int(listener.wait(ticket)[0])] == reference_greedy(model.lowered, model.params, [*LONG[:20], 9], 1)


def test_reading_leaves_nothing(account, model):
    client, listener = account
    ws, pipe = client.new_set(), client.new_pipeline()
    client.submit(pipe, PassRequest((Row(ws, tuple(PROMPT)),)))
    probe = client.submit(pipe, PassRequest((Row(ws, (7, 8)),), geometry=Geometry.READ, program=Greedy()))
    after = client.submit(pipe, PassRequest((Row(ws, (9,)),), program=Greedy()))
    assert [int(listener.wait(probe)[0])] == reference_greedy(model.lowered, model.params, [*PROMPT, 7, 8], 1)
    assert [int(listener.wait(after)[0])] == reference_greedy(model.lowered, model.params, [*PROMPT, 9], 1)
    assert client.set_length(ws) == len(PROMPT) + 1


def test_two_rows_of_one_pass(account, model):
    client, listener = account
    a, b, pipe = client.new_set(), client.new_set(), client.new_pipeline()
    rows = (Row(a, tuple(PROMPT)), Row(b, tuple(LONG[:30])))
    zero = client.submit(pipe, PassRequest(rows, program=Greedy(rows=2, row=0)))
    one = client.submit(pipe, PassRequest((Row(a, (1,)), Row(b, (2,))), program=Greedy(rows=2, row=1)))
    assert [int(listener.wait(zero)[0])] == reference_greedy(model.lowered, model.params, PROMPT, 1)
    assert [int(listener.wait(one)[0])] == reference_greedy(model.lowered, model.params, [*LONG[:30], 2], 1)


def test_parameters_seed_and_ordinal(account):
    client, listener = account
    ws, pipe = client.new_set(), client.new_pipeline(seed=(7 << 32) | 9)
    make = lambda scale: PassRequest(  # noqa: E731
        (Row(ws, (4,)),), geometry=Geometry.READ, program=Scaled(), params=(np.float32(scale), np.int32(3))
    )
    one, words = listener.wait(client.submit(pipe, make(1.0)))
    half, later = listener.wait(client.submit(pipe, make(0.5)))
    assert half == pytest.approx(one / 2)
    assert list(words) == [7, 9, 0] and list(later) == [7, 9, 1]


def test_bad_device_token_is_a_fault_of_its_pass_alone(account, model):
    client, listener = account
    ws, pipe = client.new_set(), client.new_pipeline()
    good = client.submit(pipe, PassRequest((Row(ws, tuple(PROMPT)),), program=Greedy()))
    channel = client.new_channel(TensorType(DType.I32, ()))
    client.put_channel(channel, np.array([5000], np.uint32))
    bad = client.submit(pipe, PassRequest((Row(ws, FromChannel(channel)),), program=Greedy(), line="main.py:7"))
    after = client.submit(pipe, PassRequest((Row(ws, FromTicket(bad)),), program=Greedy(), line="main.py:8"))
    listener.wait(good)
    with pytest.raises(PassError, match=r"token id outside.*main.py:7"):
        listener.wait(bad)
    with pytest.raises(PassError, match=r"token id outside.*main.py:8"):
        listener.wait(after)
    assert client.set_length(ws) == len(PROMPT)
    again = client.submit(pipe, PassRequest((Row(ws, (9,)),), program=Greedy()))
    assert [int(listener.wait(again)[0])] == reference_greedy(model.lowered, model.params, [*PROMPT, 9], 1)


def test_a_failure_reaches_forks_and_lengths_called_after_it(account, model):
    client, listener = account
    ws, pipe = client.new_set(), client.new_pipeline()
    listener.wait(client.submit(pipe, PassRequest((Row(ws, tuple(PROMPT)),))))
    channel = client.new_channel(TensorType(DType.I32, ()))
    bad = client.submit(pipe, PassRequest((Row(ws, FromChannel(channel)),), program=Greedy()))
    child = client.fork_set(ws)
    client.truncate_set(ws, 3)
    client.put_channel(channel, np.array([5000], np.uint32))
    lost = client.submit(pipe, PassRequest((Row(child, (1,)),), program=Greedy()))
    for ticket in (bad, lost):
        with pytest.raises(PassError, match="token id outside"):
            listener.wait(ticket)
    assert client.set_length(ws) == 3
    again = client.submit(pipe, PassRequest((Row(ws, (9,)),), program=Greedy()))
    assert [int(listener.wait(again)[0])] == reference_greedy(model.lowered, model.params, [*PROMPT[:3], 9], 1)


def test_device_tokens_are_taken_all_at_once(account, model):
    """A 5-token cell, while only launches of 16 tokens are compiled, and as one of two rows."""
    client, listener = account
    a, b, pipe = client.new_set(), client.new_set(), client.new_pipeline()
    channel = client.new_channel(TensorType(DType.I32, (5,)), capacity=2)
    for _ in range(2):
        client.put_channel(channel, np.array(PROMPT[:5], np.uint32))
    one = client.submit(pipe, PassRequest((Row(a, FromChannel(channel)),), program=Greedy()))
    two = client.submit(pipe, PassRequest((Row(a, (9,)), Row(b, FromChannel(channel))), program=Greedy(rows=2, row=1)))
    expected = reference_greedy(model.lowered, model.params, PROMPT[:5], 1)
    assert [int(listener.wait(one)[0])] == expected and [int(listener.wait(two)[0])] == expected


def test_a_failure_follows_sets_shared_by_passes(account, model):
    """P fails on S; Q, queued on S and T, fails with it; R, behind Q on T, does too."""
    client, listener = account
    s, t, pipe = client.new_set(), client.new_set(), client.new_pipeline()
    listener.wait(client.submit(pipe, PassRequest((Row(s, tuple(PROMPT)), Row(t, tuple(PROMPT))))))
    channel = client.new_channel(TensorType(DType.I32, ()))
    p = client.submit(pipe, PassRequest((Row(s, FromChannel(channel)),), program=Greedy()))
    q = client.submit(pipe, PassRequest((Row(s, (1,)), Row(t, (2,))), program=Greedy(rows=2)))
    r = client.submit(pipe, PassRequest((Row(t, (3,)),), program=Greedy()))
    client.put_channel(channel, np.array([5000], np.uint32))
    for ticket in (p, q, r):
        with pytest.raises(PassError, match="token id outside"):
            listener.wait(ticket)
    assert client.set_length(s) == client.set_length(t) == len(PROMPT)


def test_a_cancel_after_close_still_cancels(account):
    client, listener = account
    ws, pipe = client.new_set(), client.new_pipeline()
    channel = client.new_channel(TensorType(DType.I32, ()))
    stuck = client.submit(pipe, PassRequest((Row(ws, FromChannel(channel)),), program=Greedy()))
    client.close_pipeline(pipe)
    client.cancel_pipeline(pipe)
    client.cancel_pipeline(pipe)
    with pytest.raises(PassError, match="cancelled"):
        listener.wait(stuck)


def test_a_readout_no_launch_can_hold_is_refused(account):
    client, _ = account
    a, b, pipe = client.new_set(), client.new_set(), client.new_pipeline()
    rows = (Row(a, tuple([1] * 12)), Row(b, tuple([1] * 12)))
    with pytest.raises(PieError, match="12 tokens in each of 2 rows"):
        client.submit(pipe, PassRequest(rows, readout=((0, 11), (11,))))


def test_refusals_name_the_reason(account):
    client, _ = account
    ws, pipe = client.new_set(), client.new_pipeline()
    for rows, text in [
        ((Row(ws, ()),), "no tokens"),
        ((Row(ws, (97,)),), "token id 97"),
        ((Row(ws, (-1,)),), "token id -1"),
        ((Row(ws, (1,)), Row(ws, (2,))), "appears twice"),
        ((Row(None, (1,)),), "no working set"),
        ((Row(ws + 1000, (1,)),), "no working set 1"),
        ((Row(ws, tuple([1] * 257)),), "257 tokens long; the model's context is 256"),
    ]:
        with pytest.raises(PieError, match=text):
            client.submit(pipe, PassRequest(rows))
    client.close_pipeline(pipe)
    with pytest.raises(PieError, match="closed"):
        client.submit(pipe, PassRequest((Row(ws, (1,)),)))


def test_no_step_compiles_after_warm_up(model):
    served = engine(model, OPTIONS)
    try:
        listener = Listener()
        client = served.client("a", listener)
        decode(client, listener, PROMPT, 3)
        before = served.stats()["compiled"]
        assert decode(client, listener, LONG, 12) == reference_greedy(model.lowered, model.params, LONG, 12)
        assert served.stats()["compiled"] == before
        assert served.stats()["misses"] == {}
    finally:
        served.close()
