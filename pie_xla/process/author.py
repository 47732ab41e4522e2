"""Run an author's source natively, and say what went wrong in the author's own terms."""

from __future__ import annotations

import asyncio
import inspect
import json
import linecache
import sys
import traceback
import types
from pathlib import Path
from typing import Any

import jax
import jaxlib

from pie_xla.errors import PieError

EXAMPLE = "async def main(input: dict) -> dict"


class AuthorError(PieError):
    """The author's program failed; the message is their traceback, or what their file lacks."""


class AuthorModule:
    """One process's own module: nothing is shared with another process that runs the same file.

    Args:
        source: the program's text. file: its name, as tracebacks show it. unique: a name no other process has.
        say: where `print` goes (level, text).
    """

    def __init__(self, source: str, file: str, unique: str, say: Any) -> None:
        self.source, self.file, self.name = source, file, f"pie_inferlet_{unique}"
        self.module = types.ModuleType(self.name)
        self.module.__file__ = file
        self.module.__dict__["print"] = printer(say)

    async def run(self, value: Any) -> str:
        """Execute the source and call its `main(value)`; gives `{"result": ...}` as JSON.

        Raises:
            AuthorError: with a traceback of the author's own frames. asyncio.CancelledError: the process was killed.
        """
        sys.modules[self.name] = self.module  # dataclasses and pickles look their module up by name
        try:
            return await self._call(value)
        except (AuthorError, asyncio.CancelledError):
            raise
        except SystemExit as error:
            code = "" if error.code is None else repr(error.code)
            raise AuthorError(
                f"{self._last_line(error)}: the program called sys.exit({code}).",
                "an inferlet ends when `main` returns; raise an exception to fail",
            ) from None
        except BaseException as error:
            raise AuthorError(self.report(error)) from None

    def forget(self) -> None:
        sys.modules.pop(self.name, None)

    async def _call(self, value: Any) -> str:
        exec(compile(self.source, self.file, "exec", dont_inherit=True), self.module.__dict__)
        main = self.module.__dict__.get("main")
        if main is None:
            raise AuthorError(f"{self.file} defines no `main`.", f"an inferlet is a file with `{EXAMPLE}`")
        if not callable(main):
            raise AuthorError(
                f"`main` in {self.file} is a {type(main).__name__}, not a function.", f"define `{EXAMPLE}`"
            )
        try:
            inspect.signature(main).bind(value)
        except TypeError as error:
            raise AuthorError(
                f"{self._where(main)}: main{inspect.signature(main)} cannot be called with one argument, "
                f"the input dict: {error}.",
                f"define `{EXAMPLE}`",
            ) from None
        result = main(value)
        if inspect.iscoroutine(result):
            result = await result
        elif inspect.isgenerator(result) or inspect.isasyncgen(result):
            raise AuthorError(
                f"{self._where(main)}: `main` is a generator.",
                "return one value; stream parts with `session.send(text)`",
            )
        try:
            return json.dumps({"result": result}, allow_nan=False, separators=(",", ":"))
        except (TypeError, ValueError, RecursionError) as error:
            raise AuthorError(
                f"{self._where(main)}: what `main` returned has no JSON form: {error}.",
                "return dicts, lists, strings, finite numbers, booleans and None",
            ) from None

    def report(self, error: BaseException) -> str:
        """The traceback as the author would see it had nothing been around their file."""
        lines = self.source.splitlines(True)
        # all native processes run on one thread, so nobody reads another's lines between these two statements
        linecache.cache[self.file] = (len(self.source), None, lines, self.file)
        report = traceback.TracebackException.from_exception(error, lookup_lines=True)
        linecache.cache.pop(self.file, None)
        trim(report, set())
        return "".join(report.format()).rstrip("\n")

    def _where(self, function: Any) -> str:
        code = getattr(inspect.unwrap(function), "__code__", None)
        return self.file if code is None else f"{code.co_filename}:{code.co_firstlineno}"

    def _last_line(self, error: BaseException) -> str:
        found = [
            number for frame, number in traceback.walk_tb(error.__traceback__) if frame.f_code.co_filename == self.file
        ]
        return f"{self.file}:{found[-1]}" if found else self.file


def printer(say: Any) -> Any:
    """`print` that writes to the process's log, as in the sandbox; other files are written as ever."""

    def to_log(
        *values: object, sep: str | None = None, end: str | None = None, file: Any = None, flush: bool = False
    ) -> None:
        if file is not None and file not in (sys.stdout, sys.stderr):
            print(*values, sep=sep, end=end, file=file, flush=flush)
            return
        text = (" " if sep is None else sep).join(map(str, values)) + ("\n" if end is None else end)
        say(30 if file is sys.stderr else 20, text)

    to_log.__name__ = "print"
    return to_log


def trim(report: traceback.TracebackException | None, seen: set[int]) -> None:
    """Drop frames that are not the author's from a report and from everything it mentions."""
    if report is None or id(report) in seen:
        return
    seen.add(id(report))
    kept = [frame for frame in report.stack if not is_own(frame.filename)]
    report.stack = traceback.StackSummary.from_list(kept)
    notes = getattr(report, "__notes__", None)
    if notes:  # JAX says on every exception how it filters tracebacks; here that is done
        report.__notes__ = [note for note in notes if "JAX has removed its internal frames" not in note]
    for other in (report.__cause__, report.__context__, *(getattr(report, "exceptions", None) or ())):
        trim(other, seen)


_OWN_FOLDERS = tuple(
    Path(file).resolve().parent for file in (__file__, asyncio.__file__, jax.__file__, jaxlib.__file__)
)
_PIE = _OWN_FOLDERS[0].parent


def is_own(filename: str) -> bool:
    """A frame of pie-xla, of the SDK, of asyncio or of JAX: true, and of no use to the author."""
    path = Path(filename)
    if not path.is_absolute():
        return False
    return any(path.is_relative_to(folder) for folder in (*_OWN_FOLDERS, _PIE)) or "inferlet" in path.parts[-4:-1]
