"""One submit that asks for several passes: the same as so many submits, and each one's fate is its own."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fake_engine import FakeEngine
from test_host_requests import make, wait

from pie_xla.engine.api import FromTicket, PassError
from pie_xla.errors import PieError


def request(rows: list[dict[str, Any]], times: Any) -> str:
    return json.dumps({"rows": rows, "program": "p", "params": [0.5, [1, 2]], "line": "main.py:3", "times": times})


@pytest.fixture
def started(engine: FakeEngine) -> tuple[Any, int, int, int]:
    host, _ = make(engine)
    ws, pipe = host.new_set(), host.new_pipeline(1)
    return host, ws, pipe, host.submit(pipe, request([{"set": ws, "tokens": [7]}], 1))


def test_each_pass_embeds_what_the_one_before_gave(engine: FakeEngine, started: tuple[Any, int, int, int]) -> None:
    host, ws, pipe, first = started
    chain = host.submit(pipe, request([{"set": ws, "ticket": [first, 0], "chain": True}], 3))
    sources = [submit.rows[0].tokens for submit in engine.clients[0].submits[1:]]
    assert sources == [FromTicket(first // 2), FromTicket(chain // 2), FromTicket(chain // 2 + 1)]
    heard: list[int] = []
    while len(heard) < 4:
        heard += [ticket for ticket, failed, _ in wait(host) if not failed]
    assert heard == [first, chain, chain + 2, chain + 4]
    assert host._lengths[ws] == 1 + 3 * 3  # the program gives three tokens

    same = host.submit(pipe, request([{"set": ws, "ticket": [first, 0]}], 2))  # without a chain: the same result again
    assert [s.rows[0].tokens for s in engine.clients[0].submits[-2:]] == [FromTicket(first // 2)] * 2
    assert same == chain + 6


@pytest.mark.parametrize("error", [PassError("the one before has failed", "main.py:3"), PieError("no room")])
def test_what_cannot_be_queued_later_fails_when_awaited(
    engine: FakeEngine, started: tuple[Any, int, int, int], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    host, ws, pipe, _ = started
    client = engine.clients[0]
    submit, calls = client.submit, []

    def second_fails(*args: Any) -> int:
        calls.append(args)
        if len(calls) >= 2:
            raise error
        return submit(*args)

    monkeypatch.setattr(client, "submit", second_fails)
    ticket = host.submit(pipe, request([{"set": ws, "tokens": [1]}], 3))
    heard: dict[int, Any] = {}
    while len(heard) < 4:
        heard |= {number: (failed, value) for number, failed, value in wait(host)}
    assert heard[ticket][0] == 0
    for later in (ticket + 2, ticket + 4):
        assert heard[later][0] == 1 and heard[later][1]["message"] in str(error)
        assert heard[later][1]["undone"] == []
    assert host._lengths[ws] == 2  # the two that were queued


@pytest.mark.parametrize(
    ("rows", "times", "words"),
    [
        ([{"set": 1, "tokens": [1]}], 0, "at least 1"),
        ([{"set": 1, "tokens": [1]}], 65, "times is 65"),
        ([{"set": 1, "tokens": [1]}], True, "times is True"),
        ([{"set": 1, "tokens": [1], "chain": True}], 2, "chain is true, for a row that embeds a ticket"),
        ([{"set": 1, "ticket": [2, 0], "chain": 1}], 2, "chain is true"),
    ],
)
def test_odd_ones_are_refused(
    started: tuple[Any, int, int, int], rows: list[dict[str, Any]], times: Any, words: str
) -> None:
    host, _, pipe, _ = started
    with pytest.raises(PieError, match=words):
        host.submit(pipe, request(rows, times))


def test_the_limit_counts_each(engine: FakeEngine) -> None:
    from pie_xla.process.limits import HostLimits

    host, _ = make(engine, HostLimits(tickets=4))
    ws, pipe = host.new_set(), host.new_pipeline(1)
    with pytest.raises(PieError, match="limit is 4"):
        host.submit(pipe, request([{"set": ws, "tokens": [7]}], 5))
    host.submit(pipe, request([{"set": ws, "tokens": [7]}], 4))
