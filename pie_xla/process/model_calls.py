"""Calls on models other than the default one, which the WIT world's own functions serve."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from pie_xla.process.requests import U32, integers
from pie_xla.process.rooms import Answer, Request

if TYPE_CHECKING:
    from pie_xla.process.host import InferletHost


class ModelCalls:
    """`model.encode`, `model.decode`, `model.chat`, `set.new`: each names its `model`."""

    def __init__(self, host: InferletHost) -> None:
        self._host = host
        self.calls: Mapping[str, Callable[[Request], Any]] = {
            "model.encode": self._encode,
            "model.decode": self._decode,
            "model.chat": self._chat,
            "set.new": self._new_set,
        }
        self.starts: Mapping[str, Callable[[Request, Answer], None]] = {}

    def close(self) -> None:
        return None

    def _encode(self, request: Request) -> list[int]:
        model, text = request.get("model", str), request.get("text", str)
        specials = request.get("specials", bool, False)
        request.done()
        return list(self._host.encode(text, specials, model))

    def _decode(self, request: Request) -> str:
        model, ids = request.get("model", str), request.get("ids", list)
        skip = request.get("skip_specials", bool, True)
        request.done()
        return self._host.decode(integers(ids, "ids", U32), skip, model)

    def _chat(self, request: Request) -> list[int]:
        model = request.get("model", str)
        wanted = {name: request.get(name, kind, None) for name, kind in CHAT.items()}
        request.done()
        return list(self._host.render(wanted, model))

    def _new_set(self, request: Request) -> int:
        model = request.get("model", str)
        request.done()
        return self._host.new_set(model)


CHAT: dict[str, Any] = {"messages": list, "tools": list, "add_generation_prompt": bool}
