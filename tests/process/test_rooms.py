"""Calls by name: what a room offers can be asked for, everything else is refused by name, and answers come as tickets."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest
from fake_engine import FACTS, Bytes, FakeEngine

from pie_xla.errors import PieError
from pie_xla.eta.program import EtaProgram
from pie_xla.process.host import InferletHost
from pie_xla.process.limits import HostLimits
from pie_xla.process.requests import ProgramCache, RequestError
from pie_xla.process.rooms import Answer, Request


class Silent:
    def sent(self, text: str) -> None: ...
    def logged(self, level: int, text: str) -> None: ...


class Sums:
    """A room of the test's own."""

    def __init__(self, host: InferletHost) -> None:
        self.waiting: list[tuple[int, Answer]] = []
        self.closed = False
        self.calls = {"sums.add": self.add}
        self.starts = {"sums.later": self.later}

    def add(self, request: Request) -> int:
        left, right = request.get("left", int), request.get("right", int, 1)
        request.done()
        return left + right

    def later(self, request: Request, answer: Answer) -> None:
        self.waiting.append((request.get("value", int), answer))

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def host() -> Any:
    engine = FakeEngine()
    made = InferletHost(
        lambda on_event: engine.client("p", on_event),
        FACTS,
        Bytes(),
        ProgramCache(EtaProgram.from_json),
        Silent(),
        HostLimits(tickets=3),
        rooms=(Sums,),
    )
    yield made
    made.close()
    engine.close()


def test_a_call_answers_with_json(host: InferletHost) -> None:
    assert host.call("sums.add", json.dumps({"left": 2, "right": 40})) == "42"
    assert host.call("sums.add", json.dumps({"left": 2})) == "3"


@pytest.mark.parametrize(
    ("name", "request_text", "says"),
    [
        ("sums.sub", "{}", "no call 'sums.sub'"),
        ("sums.later", "{}", "the other of call and start"),
        ("sums.add", "{}", "sums.add needs left"),
        ("sums.add", '{"left": "2"}', "left is '2', not int"),
        ("sums.add", '{"left": true}', "left is True, not int"),
        ("sums.add", '{"left": 1, "up": 1}', "has no field 'up'"),
        ("sums.add", "[1]", "takes an object"),
        ("sums.add", "{", "is not JSON"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(host: InferletHost, name: str, request_text: str, says: str) -> None:
    with pytest.raises(RequestError, match=says):
        host.call(name, request_text)


def test_a_started_call_gives_a_ticket_and_later_one_answer(host: InferletHost) -> None:
    room = host._rooms[-1]
    first, second = host.start("sums.later", '{"value": 1}'), host.start("sums.later", '{"value": 2}')
    assert host.collect() == []

    def answer() -> None:
        (one, answer_one), (_, answer_two) = room.waiting  # type: ignore[attr-defined]
        answer_one.value([one])
        answer_one.value("twice")
        answer_two.fail(PieError("no second", "ask once"))

    thread = threading.Thread(target=answer)
    thread.start()
    thread.join()
    events = host.collect()
    assert events[0] == (first, 0, [1])
    assert events[1][:2] == (second, 1)
    assert "no second" in events[1][2]["message"]
    assert len(events) == 2


def test_unanswered_calls_count_as_open_tickets(host: InferletHost) -> None:
    for _ in range(3):
        host.start("sums.later", '{"value": 1}')
    with pytest.raises(RequestError, match="3 results are asked for"):
        host.start("sums.later", '{"value": 1}')
    host._rooms[-1].waiting[0][1].value(0)  # type: ignore[attr-defined]
    host.start("sums.later", '{"value": 1}')


def test_rooms_close_with_their_process(host: InferletHost) -> None:
    room: Any = host._rooms[-1]
    host.close()
    assert room.closed
    with pytest.raises(RequestError, match="has ended"):
        host.call("sums.add", '{"left": 1}')
