"""Finished tickets as the JSON that `session.wait` returns."""

from __future__ import annotations

import json
from typing import Any

_encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode


def encode_events(events: Any) -> str:
    """Compact JSON of events, or of any answer; floats without a JSON form become "nan", "inf", "-inf"."""
    try:
        return _encode(events)
    except ValueError:
        return _encode(_named(events))


def _named(value: Any) -> Any:
    match value:
        case float() if value != value:
            return "nan"
        case float() if value in (float("inf"), float("-inf")):
            return "inf" if value > 0 else "-inf"
        case list() | tuple():
            return [_named(item) for item in value]
        case dict():
            return {key: _named(item) for key, item in value.items()}
        case _:
            return value
