"""The HTTP routes around a stand-in for the model."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient

from pie_xla.errors import PieError
from pie_xla.launch import Failed, Launch, Listener, Logged, Returned, Sent
from pie_xla.server.app import BODY_LIMIT, Backend, create_app


class Echo:
    """Says hello from another thread, then returns its launch; the source "fail" fails, "full" is refused."""

    def __init__(self) -> None:
        self.launches: list[Launch] = []
        self.killed: list[str] = []

    def launch(self, launch: Launch, listener: Listener) -> Echo:
        if launch.source == "full":
            raise PieError("64 inferlets run already", "try again later")
        self.launches.append(launch)
        threading.Thread(target=self._say, args=(launch, listener)).start()
        return self

    def _say(self, launch: Launch, listener: Listener) -> None:
        listener(Sent("hel"))
        listener(Logged(20, "log\n"))
        listener(Sent("lo\n\ndata: x"))
        if launch.source == "fail":
            listener(Failed("Traceback\nValueError: no"))
        else:
            listener(Returned({"input": launch.input, "seed": launch.seed, "source": launch.source}))

    def kill(self, reason: str) -> None:
        self.killed.append(reason)


@pytest.fixture
def service() -> Echo:
    return Echo()


@pytest.fixture
def backend(service: Echo) -> Backend:
    return Backend("tiny", {"hello": "named source"}, service)


@pytest.fixture
def client(backend: Backend) -> Iterator[TestClient]:
    with TestClient(create_app(backend, ["localhost", "127.0.0.1"]), base_url="http://localhost") as client:
        yield client


def events(text: str) -> list[tuple[str, Any]]:
    blocks = [block.split("\n") for block in text.strip().split("\n\n")]
    return [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in blocks]


def test_a_posted_program_streams_every_event(client: TestClient, service: Echo) -> None:
    answer = client.post("/v1/generate", json={"source": "posted text", "input": {"a": 1}, "seed": 3})
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert events(answer.text) == [
        ("sent", {"text": "hel"}),
        ("log", {"level": 20, "text": "log\n"}),
        ("sent", {"text": "lo\n\ndata: x"}),
        ("result", {"result": {"input": {"a": 1}, "seed": 3, "source": "posted text"}}),
    ]
    assert service.killed == ["the client went away"]  # harmless after the end; frees what a client left behind


def test_a_named_program_answers_at_once_without_streaming(client: TestClient) -> None:
    answer = client.post("/v1/generate", json={"inferlet": "hello", "stream": False, "model": "tiny"})
    assert answer.json() == {
        "result": {"input": {}, "seed": None, "source": "named source"},
        "text": "hello\n\ndata: x",
        "log": [{"level": 20, "text": "log\n"}],
    }


def test_a_failed_program_says_why_in_both_forms(client: TestClient) -> None:
    streamed = client.post("/v1/generate", json={"source": "fail"})
    assert events(streamed.text)[-1] == ("error", {"type": "inferlet_failed", "message": "Traceback\nValueError: no"})
    whole = client.post("/v1/generate", json={"source": "fail", "stream": False})
    assert whole.status_code == 422
    assert whole.json()["error"] == {"type": "inferlet_failed", "message": "Traceback\nValueError: no", "hint": None}


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (b"{", 400, "the body is not JSON"),
        (b"[" * 100_000, 400, "the body is not JSON"),
        (b"\xff", 400, "the body is not JSON"),
        (b"[]", 400, "must be an object, not a list"),
        (b"null", 400, "must be an object, not null"),
        (b"{}", 400, "either 'inferlet' (a name) or 'source'"),
        (b'{"source": "x", "inferlet": "hello"}', 400, "either 'inferlet' (a name) or 'source'"),
        (b'{"source": 3}', 400, "'source' must be a string, not a number"),
        (b'{"source": "x", "input": []}', 400, "'input' must be an object, not a list"),
        (b'{"source": "x", "stream": 1}', 400, "'stream' must be true or false, not a number"),
        (b'{"source": "x", "seed": true}', 400, "'seed' must be a whole number, not a boolean"),
        (b'{"source": "x", "seed": -1}', 400, "'seed' must be from 0 to"),
        (b'{"source": "x", "inptu": {}}', 400, "unknown field 'inptu'"),
        (b'{"inferlet": "helo"}', 404, "there is no inferlet 'helo'"),
        (b'{"source": "x", "model": "huge"}', 404, "'huge' is not served here"),
        (b'{"source": "full"}', 503, "64 inferlets run already"),
        (b'"' + b"x" * BODY_LIMIT + b'"', 413, "the body is over"),
    ],
)
def test_wrong_requests_are_refused_by_name(client: TestClient, body: bytes, status: int, message: str) -> None:
    answer = client.post("/v1/generate", content=body, headers={"content-type": "application/json; charset=utf-8"})
    assert answer.status_code == status
    assert message in answer.json()["error"]["message"]


def test_an_unknown_field_is_told_its_nearest(client: TestClient) -> None:
    assert client.post("/v1/generate", json={"inptu": {}}).json()["error"]["hint"] == "did you mean 'input'?"


def test_a_page_of_another_origin_can_start_nothing(client: TestClient, service: Echo) -> None:
    body = b'{"source": "x"}'
    assert client.post("/v1/generate", content=body, headers={"content-type": "text/plain"}).status_code == 415
    assert client.post("/v1/generate", json={"source": "x"}, headers={"host": "evil.example"}).status_code == 400
    assert service.launches == []


def test_health_and_readiness_before_and_after_loading(client: TestClient, backend: Backend, service: Echo) -> None:
    assert client.get("/readyz").json() == {"status": "ready", "model": "tiny"}
    backend.service = None
    assert client.get("/healthz").json() == {"status": "ok"}
    waiting = client.get("/readyz")
    assert (waiting.status_code, waiting.json()["error"]["type"]) == (503, "loading")
    assert client.post("/v1/generate", json={"source": "x"}).status_code == 503
    assert client.get("/v1/models").json()["data"] == [{"id": "tiny", "object": "model", "ready": False}]


def test_unknown_routes_and_methods_answer_in_json(client: TestClient) -> None:
    assert client.get("/v2").json()["error"]["message"] == "GET /v2: Not Found"
    assert client.get("/v1/generate").status_code == 405
    assert client.get("/v1/inferlets").json()["data"] == [{"id": "hello"}]
