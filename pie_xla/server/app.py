"""The HTTP application: health, models, and one route that runs an inferlet and streams what it says."""

from __future__ import annotations

import asyncio
import difflib
import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from pie_xla.errors import PieError
from pie_xla.launch import Event, Failed, Launch, Launched, Logged, Returned, Sent, Service

BODY_LIMIT = 4 << 20  # bytes of a request
SEEDS = 1 << 32


@dataclass
class Backend:
    """What the routes serve from. `service` is None until the model is loaded."""

    model_name: str
    inferlets: Mapping[str, str]  # name -> source
    service: Service | None = None
    running: set[Launched] = field(default_factory=set)


class RefusedError(Exception):
    """A request that is answered with an error body."""

    def __init__(self, status: int, kind: str, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.status, self.kind, self.message, self.hint = status, kind, message, hint


def create_app(backend: Backend, allowed_hosts: list[str]) -> Starlette:
    """The application.

    Args:
        allowed_hosts: the Host headers that are answered: no web page may reach a loopback server by a name of its own.
    """

    async def healthz(request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def readyz(request: Request) -> Response:
        if backend.service is None:
            return _error(RefusedError(503, "loading", f"{backend.model_name} is being loaded"))
        return JSONResponse({"status": "ready", "model": backend.model_name})

    async def models(request: Request) -> Response:
        ready = backend.service is not None
        return JSONResponse({"object": "list", "data": [{"id": backend.model_name, "object": "model", "ready": ready}]})

    async def inferlets(request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": name} for name in sorted(backend.inferlets)]})

    async def generate(request: Request) -> Response:
        body = _read(await _body(request), backend)
        if backend.service is None:
            return await readyz(request)
        events: asyncio.Queue[Event] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def on_event(event: Event) -> None:
            loop.call_soon_threadsafe(events.put_nowait, event)

        try:
            launched = backend.service.launch(body.launch, on_event)
        except PieError as error:
            raise RefusedError(503, "refused", error.message, error.hint) from None
        backend.running.add(launched)
        if body.stream:
            stream = _events(events, launched, backend)
            return StreamingResponse(stream, media_type="text/event-stream", headers={"Cache-Control": "no-store"})
        return await _collect(events, launched, backend, request)

    return Starlette(
        routes=[
            Route("/healthz", healthz),
            Route("/readyz", readyz),
            Route("/v1/models", models),
            Route("/v1/inferlets", inferlets),
            Route("/v1/generate", generate, methods=["POST"]),
        ],
        middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=allowed_hosts)],
        exception_handlers={RefusedError: _refused, HTTPException: _http},
    )


@dataclass(frozen=True)
class Body:
    """A checked request to `/v1/generate`."""

    launch: Launch
    stream: bool


KEYS = ("inferlet", "source", "input", "stream", "seed", "model")


async def _body(request: Request) -> bytes:
    # A form or plain text can be posted across origins without asking; JSON cannot.
    if request.headers.get("content-type", "").split(";")[0].strip().lower() != "application/json":
        raise RefusedError(415, "content_type", "the body must be JSON", "send `Content-Type: application/json`")
    data = bytearray()
    async for chunk in request.stream():
        data += chunk
        if len(data) > BODY_LIMIT:
            raise RefusedError(413, "too_large", f"the body is over {BODY_LIMIT} bytes")
    return bytes(data)


def _read(data: bytes, backend: Backend) -> Body:
    try:
        body = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise RefusedError(400, "bad_json", f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise RefusedError(400, "bad_request", f"the body must be an object, not {_kind(body)}")
    for key in body:
        if key not in KEYS:
            close = difflib.get_close_matches(key, KEYS, n=1)
            hint = f"did you mean '{close[0]}'?" if close else "known: " + ", ".join(KEYS)
            raise RefusedError(400, "bad_request", f"unknown field '{key}'", hint)
    name = _field(body, "inferlet", str)
    source = _field(body, "source", str)
    if (name is None) == (source is None):
        raise RefusedError(400, "bad_request", "give either 'inferlet' (a name) or 'source' (a program's text)")
    if name is not None:
        source = backend.inferlets.get(name)
    if source is None:
        known = ", ".join(sorted(backend.inferlets)) or "none"
        raise RefusedError(404, "unknown_inferlet", f"there is no inferlet '{name}'", f"known: {known}")
    model = _field(body, "model", str)
    if model is not None and model != backend.model_name:
        raise RefusedError(404, "unknown_model", f"'{model}' is not served here", f"served: {backend.model_name}")
    stream = _field(body, "stream", bool)
    seed = _field(body, "seed", int)
    if seed is not None and not 0 <= seed < SEEDS:
        raise RefusedError(400, "bad_request", f"'seed' must be from 0 to {SEEDS - 1}")
    launch = Launch(
        source=source,
        file=f"{name or 'posted'}.py",
        input=_field(body, "input", dict) or {},
        seed=seed,
    )
    return Body(launch, stream=True if stream is None else stream)


def _field(body: Mapping[str, Any], key: str, wanted: type) -> Any:
    value = body.get(key)
    if value is not None and type(value) is not wanted:
        names = {str: "a string", bool: "true or false", dict: "an object", int: "a whole number"}
        raise RefusedError(400, "bad_request", f"'{key}' must be {names[wanted]}, not {_kind(value)}")
    return value


def _kind(value: object) -> str:
    names = {bool: "a boolean", int: "a number", float: "a number", str: "a string", list: "a list", dict: "an object"}
    return names.get(type(value), "null")


async def _events(events: asyncio.Queue[Event], launched: Launched, backend: Backend) -> AsyncIterator[str]:
    """Server-sent events: `sent`, `log`, at the end `result` or `error`. A client that goes away ends its inferlet."""
    try:
        while True:
            event = await events.get()
            match event:
                case Sent(text):
                    yield _sse("sent", {"text": text})
                case Logged(level, text):
                    yield _sse("log", {"level": level, "text": text})
                case Returned(value):
                    yield _sse("result", {"result": value})
                    return
                case Failed(message):
                    yield _sse("error", {"type": "inferlet_failed", "message": message})
                    return
    finally:
        launched.kill("the client went away")
        backend.running.discard(launched)


async def _collect(events: asyncio.Queue[Event], launched: Launched, backend: Backend, request: Request) -> Response:
    """One JSON answer with everything the inferlet said."""
    sent: list[str] = []
    log: list[dict[str, Any]] = []
    gone = asyncio.ensure_future(_gone(request))
    try:
        while True:
            getting = asyncio.ensure_future(events.get())
            await asyncio.wait({getting, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not getting.done():
                getting.cancel()
                return Response(status_code=499)
            match getting.result():
                case Sent(text):
                    sent.append(text)
                case Logged(level, text):
                    log.append({"level": level, "text": text})
                case Returned(value):
                    return JSONResponse({"result": value, "text": "".join(sent), "log": log})
                case Failed(message):
                    raise RefusedError(422, "inferlet_failed", message)
    finally:
        gone.cancel()
        launched.kill("the client went away")
        backend.running.discard(launched)


async def _gone(request: Request) -> None:
    while not await request.is_disconnected():
        await asyncio.sleep(0.25)


def _sse(event: str, data: object) -> str:
    return f"event: {event}\ndata: {json.dumps(data)}\n\n"


def _error(refused: RefusedError) -> JSONResponse:
    body = {"type": refused.kind, "message": refused.message, "hint": refused.hint}
    headers = {"Retry-After": "2"} if refused.status == 503 else None
    return JSONResponse({"error": body}, status_code=refused.status, headers=headers)


def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, RefusedError)
    return _error(error)


def _http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return _error(RefusedError(error.status_code, "http", f"{request.method} {request.url.path}: {error.detail}"))
