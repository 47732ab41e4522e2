"""Starting one inferlet and hearing what it says: what the CLI and the server share."""

from __future__ import annotations

import ast
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from pie_xla.errors import UsageError

SOURCE_LIMIT = 4 << 20  # bytes of a program's text
MAIN_HINT = "an inferlet is a Python file that defines `async def main(input)`"


@dataclass(frozen=True)
class Launch:
    """A program to run once.

    Attributes:
        source: the program's text.
        file: its name, for tracebacks; native programs are found by it.
        input: the argument of its `main`.
        native: run in this process under plain JAX, trusted, instead of in the sandbox.
        seed: of its random streams; None takes one from the system.
    """

    source: str
    file: str
    input: dict[str, Any] = field(default_factory=dict)
    native: bool = False
    seed: int | None = None


@dataclass(frozen=True)
class Sent:
    """Text that the program sent to whoever launched it."""

    text: str


@dataclass(frozen=True)
class Logged:
    """Text that the program logged or printed; levels are those of `logging`."""

    level: int
    text: str


@dataclass(frozen=True)
class Returned:
    """The end: what `main` returned, a JSON value."""

    value: Any


@dataclass(frozen=True)
class Failed:
    """The end: why there is no return value; the author's traceback, or the limit that was passed."""

    message: str


Event = Sent | Logged | Returned | Failed
Listener = Callable[[Event], None]


class Launched(Protocol):
    """A program that runs."""

    def kill(self, reason: str) -> None:
        """End it, from any thread; nothing happens if it has ended already. Its last event is `Failed(reason)`."""


class Service(Protocol):
    """A loaded model that programs can be started on."""

    def launch(self, launch: Launch, listener: Listener) -> Launched:
        """Start a program. `listener` hears every event in order, on any thread, and must return at once.

        Raises:
            PieError: it cannot be started, as with too many running.
        """


def read_source(path: Path) -> str:
    """A program's text; refuses what is plainly no program before a model is loaded for it.

    Raises:
        UsageError: no such file, a directory, not text, or no `main`.
    """
    try:
        data = path.read_bytes()
    except IsADirectoryError:
        inner = path / "main.py"
        hint = f"did you mean {inner}?" if inner.exists() else "name the Python file that defines `main`"
        raise UsageError(f"{path} is a directory, not an inferlet", hint) from None
    except FileNotFoundError:
        raise UsageError(f"there is no file {path}", MAIN_HINT) from None
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None
    if len(data) > SOURCE_LIMIT:
        raise UsageError(f"{path} has {len(data)} bytes; an inferlet may have {SOURCE_LIMIT}")
    try:
        source = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise UsageError(f"{path} is not an inferlet: it is not UTF-8 text", MAIN_HINT) from None
    if "\0" in source:
        raise UsageError(f"{path} is not an inferlet: it holds NUL bytes", MAIN_HINT)
    if not _may_define_main(source):
        raise UsageError(f"{path} is not an inferlet: it defines no `main`", MAIN_HINT)
    return source


def _may_define_main(source: str) -> bool:
    """False if no statement can bind `main`. What this Python cannot parse is left to the sandbox's, which is newer."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return True
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name="main") | ast.AsyncFunctionDef(name="main") | ast.ClassDef(name="main"):
                return True
            case ast.Name(id="main", ctx=ast.Store()) | ast.alias(asname="main") | ast.alias(name="main" | "*"):
                return True
    return False
