"""Calls on working sets beyond the basic ones of the WIT world."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from pie_xla.engine.api import FromTicket, PassError
from pie_xla.process.requests import RequestError, integers
from pie_xla.process.rooms import Answer, Request

if TYPE_CHECKING:
    from pie_xla.process.host import InferletHost

MAX_NAME = 256  # bytes


class StateCalls:
    """`set.commit`, `set.truncate`, `set.evict`, `set.publish`, `set.open`, `set.withdraw`."""

    def __init__(self, host: InferletHost) -> None:
        self._host = host
        self.calls: Mapping[str, Callable[[Request], Any]] = {
            "set.commit": self._commit,
            "set.truncate": self._truncate,
            "set.evict": self._evict,
            "set.publish": self._publish,
            "set.open": self._open,
            "set.withdraw": self._withdraw,
        }
        self.starts: Mapping[str, Callable[[Request, Answer], None]] = {}

    def close(self) -> None:
        return None

    def _commit(self, request: Request) -> None:
        ws, n = request.get("set", int), self._number(request)
        self._host.client.commit_set(ws, n)
        if isinstance(n, int):
            self._host.shortened(ws, self._host.client.set_length(ws))

    def _truncate(self, request: Request) -> None:
        ws, n = request.get("set", int), self._number(request)
        self._host.client.truncate_set(ws, n)
        if isinstance(n, int):
            self._host.shortened(ws, self._host.client.set_length(ws))

    def _number(self, request: Request) -> int | FromTicket:
        """`n`, or a pass's result on the device: `ticket` and `result`."""
        n, ticket, result = request.get("n", int, -1), request.get("ticket", int, -1), request.get("result", int, 0)
        request.done()
        if ticket < 0:
            if n < 0:
                raise RequestError(f"{request.name} needs n, an int of at least 0, or a ticket")
            return n
        try:
            return self._host.result_of(ticket, max(0, result))
        except PassError as failure:
            raise RequestError(f"the pass that was to say how many has failed: {failure.cause}") from None

    def _evict(self, request: Request) -> None:
        ws, spans = request.get("set", int), request.get("spans", list)
        request.done()
        found = [integers(span, "a span", 1 << 30) for span in spans]
        if any(len(span) != 2 for span in found):
            raise RequestError("a span is [begin, end]")
        self._host.client.evict_set(ws, [(begin, end) for begin, end in found])

    def _publish(self, request: Request) -> None:
        ws, name = request.get("set", int), self._name(request)
        self._host.client.publish_set(ws, name)

    def _open(self, request: Request) -> dict[str, int] | None:
        model = self._model(request)
        ws = self._host.client.open_set(self._name(request), model)
        return None if ws is None else {"set": ws, "length": self._host.opened(ws)}

    def _withdraw(self, request: Request) -> bool:
        model = self._model(request)
        return self._host.client.withdraw_set(self._name(request), model)

    def _model(self, request: Request) -> str | None:
        return self._host.engine_name(request.get("model", str, None))

    @staticmethod
    def _name(request: Request) -> str:
        name = request.get("name", str)
        request.done()
        if not 1 <= len(name.encode("utf-8", "replace")) <= MAX_NAME:
            raise RequestError(f"a published name has 1 to {MAX_NAME} bytes")
        return name
