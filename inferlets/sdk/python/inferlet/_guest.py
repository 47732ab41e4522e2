"""The sandbox's transport: the component world's imports, which exist only inside the sandbox."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

from componentize_py_types import Err
from wit_world.imports import engine, host, model, session

from inferlet._errors import RefusedError
from inferlet._host import Facts, Traced, compact, finite_json, quoted

T = TypeVar("T")


def _call(fn: Callable[..., T], *args: Any) -> T:
    try:
        return fn(*args)
    except Err as error:
        raise RefusedError(str(error.value)) from None


class GuestTransport:
    """`inferlet._host.Transport` over WIT."""

    def facts(self) -> dict[str, Any]:
        return json.loads(engine.facts())

    def new_set(self) -> int:
        return _call(engine.new_set)

    def fork_set(self, ws: int) -> int:
        return _call(engine.fork_set, ws)

    def truncate_set(self, ws: int, length: int) -> None:
        _call(engine.truncate_set, ws, length)

    def drop_set(self, ws: int) -> None:
        _call(engine.drop_set, ws)

    def new_pipeline(self, seed: int | None) -> int:
        return _call(engine.new_pipeline, seed)

    def close_pipeline(self, pipeline: int, cancel: bool) -> None:
        _call(engine.close_pipeline, pipeline, cancel)

    def new_channel(self, dtype: str, shape: tuple[int, ...], capacity: int) -> int:
        return _call(engine.new_channel, compact({"dtype": dtype, "shape": list(shape), "capacity": capacity}))

    def channel(self, channel: int, op: str, value: Any) -> int:
        return _call(engine.channel, channel, op, "" if value is None else compact(finite_json(value)))

    def prepare(self, fixed: dict[str, Any]) -> str:
        return compact({**fixed, "params": finite_json(fixed["params"])})[
            1:
        ]  # without the brace: `submit` goes before it

    def submit(
        self, pipeline: int, rows: list[dict[str, Any]], prepared: object, line: str, drop: list[int], times: int
    ) -> int:
        # by hand: this is sent for every token, and a JSON encoder costs more than the call
        parts = []
        for row in rows:
            more = f',"sight":{compact(row["sight"])}' if "sight" in row else ""
            if "chain" in row:
                more += ',"chain":true'
            match row:
                case {"ticket": [ticket, result]}:
                    parts.append(f'{{"set":{row["set"]},"ticket":[{ticket},{result}]{more}}}')
                case {"channel": channel}:
                    parts.append(f'{{"set":{row["set"]},"channel":{channel}{more}}}')
                case _:
                    parts.append(f'{{"set":{row["set"]},"tokens":{row["tokens"]}{more}}}')
        head = f'{{"rows":[{",".join(parts)}],"line":{quoted(line)},"drop":{drop},"times":{times}'
        return _call(engine.submit, pipeline, f"{head},{prepared}")

    def send(self, text: str) -> None:
        _call(session.send, text)

    def receive(self) -> int:
        return _call(session.receive)

    def log(self, level: int, text: str) -> None:
        session.log(level, text)

    def encode(self, text: str, specials: bool) -> list[int]:
        return list(_call(model.encode, text, specials))

    def decode(self, ids: list[int], skip_specials: bool) -> str:
        return _call(model.decode, ids, skip_specials)

    def chat(self, request: dict[str, Any]) -> list[int]:
        return list(_call(model.chat, compact(request)))

    def call(self, name: str, request: dict[str, Any]) -> Any:
        return json.loads(_call(host.call, name, compact(finite_json(request))))

    def start(self, name: str, request: dict[str, Any]) -> int:
        return _call(host.start, name, compact(finite_json(request)))

    def trace(self, fn: Callable[[], Any], rows: tuple[int | None, ...], facts: Facts, stages: Any = None) -> Traced:
        from inferlet.eta._trace import record

        return record(fn, rows, facts, stages)
