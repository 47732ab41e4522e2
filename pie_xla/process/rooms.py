"""Calls that a process makes by name (`host.call` and `host.start` of the WIT world), grouped in rooms.

A room is made for each process and closed with it. What it is asked comes from hostile programs: `Request` reads every field by name
and type, and refuses what it does not know.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from pie_xla.errors import PieError
from pie_xla.process.requests import RequestError

if TYPE_CHECKING:
    from pie_xla.process.host import InferletHost

T = TypeVar("T")
REQUIRED: Any = object()


@dataclass
class Request:
    """The fields of one call. `done` refuses those nobody has asked for."""

    name: str
    fields: Mapping[str, Any]
    read: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, name: str, value: Any) -> Request:
        if type(value) is not dict:
            raise RequestError(f"{name} takes an object of named fields, not {type(value).__name__}")
        return cls(name, value)

    def get(self, field_name: str, kind: type[T], default: Any = REQUIRED) -> T:
        """The field, of exactly this type; `default` where it is missing or null."""
        self.read.add(field_name)
        value = self.fields.get(field_name)
        if value is None:
            if default is REQUIRED:
                raise RequestError(f"{self.name} needs {field_name}")
            return default  # type: ignore[no-any-return]
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            raise RequestError(f"{self.name}: {field_name} is {value!r:.60}, not {kind.__name__}")
        return value  # type: ignore[no-any-return]

    def done(self) -> None:
        unknown = self.fields.keys() - self.read
        if unknown:
            raise RequestError(f"{self.name} has no field {min(map(str, unknown))!r:.60}")


class Answer:
    """Where a started call's answer goes: once, from any thread; later ones are dropped."""

    def __init__(self, settle: Callable[[int, Any], None]) -> None:
        self._settle: Callable[[int, Any], None] | None = settle
        self._lock = threading.Lock()

    def value(self, value: Any) -> None:
        """`value` has a JSON form."""
        self._tell(0, value)

    def fail(self, error: PieError) -> None:
        self._tell(1, {"message": str(error), "line": "", "undone": []})

    def _tell(self, failed: int, value: Any) -> None:
        with self._lock:
            settle, self._settle = self._settle, None
        if settle is not None:
            settle(failed, value)


class Room(Protocol):
    """Calls of one kind, for one process."""

    @property
    def calls(self) -> Mapping[str, Callable[[Request], Any]]:
        """Name -> what answers at once with a value that has a JSON form; `PieError` refuses."""

    @property
    def starts(self) -> Mapping[str, Callable[[Request, Answer], None]]:
        """Name -> what answers later."""

    def close(self) -> None:
        """The process has ended: give back what it held; answers go nowhere any more."""


OpenRoom = Callable[["InferletHost"], Room]
