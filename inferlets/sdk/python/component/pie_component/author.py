"""Run an author's source, and say what went wrong in the author's own terms."""

from __future__ import annotations

import asyncio
import inspect
import json
import linecache
import math
import sys
import traceback
import types
from typing import Any

from inferlet import _host

from pie_component.loop import HostEventLoop

_EXAMPLE = "async def main(input: dict) -> dict"
_MAX_REPORT = 1 << 15  # characters
# Frames of these modules are ours, not the author's.
_OWN = ("pie_component", "inferlet", "asyncio", "wit_world", "app")


class Failed(Exception):
    """The author's program failed; `args[0]` is the text for them."""


def run(request: dict[str, Any]) -> str:
    """Execute `request["source"]`, call its `main(request["input"])`, return `{"result": ...}` as JSON.

    Raises:
        Failed: with a traceback or a message that names the file and the line.
    """
    source, file = request["source"], request["file"]
    linecache.cache[file] = (len(source), None, source.splitlines(True), file)
    ballast = bytearray(1 << 16)  # freed when memory runs out, so that the report can be written
    try:
        return _call(source, file, request["input"])
    except Failed:
        raise
    except MemoryError as error:
        if error.args:  # CPython's parser calls source that is nested too deeply a MemoryError, with a text
            raise Failed(_traceback_text(error)) from None
        del ballast
        raise Failed(_memory_text(error, file, request.get("memory_mib"))) from None
    except SystemExit as error:
        raise Failed(_exit_text(error, file)) from None
    except BaseException as error:
        raise Failed(_traceback_text(error)) from None


def _call(source: str, file: str, value: Any) -> str:
    module = types.ModuleType("main")
    module.__file__ = file
    sys.modules["main"] = module
    exec(compile(source, file, "exec", dont_inherit=True), module.__dict__)

    main = module.__dict__.get("main")
    if main is None:
        raise Failed(f"{file} defines no `main`.\n  hint: an inferlet is a file with `{_EXAMPLE}`")
    if not callable(main):
        raise Failed(f"`main` in {file} is {_kind(main)}, not a function.\n  hint: define `{_EXAMPLE}`")
    try:
        inspect.signature(main).bind(value)
    except TypeError as error:
        raise Failed(
            f"{_where(main, file)}: main{inspect.signature(main)} cannot be called with the input as its one argument: "
            f"{error}.\n  hint: define `{_EXAMPLE}`"
        ) from None

    _host.begin(value)
    result = main(value)
    if inspect.iscoroutine(result):
        with asyncio.Runner(loop_factory=HostEventLoop) as runner:
            result = runner.run(result)
    elif inspect.isgenerator(result) or inspect.isasyncgen(result):
        raise Failed(
            f"{_where(main, file)}: `main` is a generator."
            "\n  hint: return one value; stream parts with `session.send(text)`"
        )
    try:
        return json.dumps({"result": result}, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as error:
        found = _find_unjsonable(result, "result", [])
        raise Failed(
            f"{_where(main, file)}: what `main` returned has no JSON form: {found or error}."
            "\n  hint: return dicts, lists, strings, finite numbers, booleans and None"
        ) from None


def _where(function: Any, file: str) -> str:
    code = getattr(inspect.unwrap(function), "__code__", None)
    return file if code is None else f"{code.co_filename}:{code.co_firstlineno}"


def _kind(value: object) -> str:
    name = type(value).__qualname__
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def _find_unjsonable(value: Any, path: str, above: list[int]) -> str | None:
    if id(value) in above:
        return f"{path} contains itself"
    if len(above) > 200:
        return f"{path[:80]}... is nested too deeply"
    match value:
        case None | bool() | int() | str():
            return None
        case float():
            return None if math.isfinite(value) else f"{path} is {value}"
        case list() | tuple():
            parts = ((item, f"{path}[{index}]") for index, item in enumerate(value))
        case dict():
            for key in value:
                if not isinstance(key, str | int | float | bool | None):
                    return f"{path} has the key {key!r:.60}, {_kind(key)}"
            parts = ((item, f"{path}[{key!r:.60}]") for key, item in value.items())
        case _:
            return f"{path} is {_kind(value)}"
    for item, item_path in parts:
        found = _find_unjsonable(item, item_path, [*above, id(value)])
        if found:
            return found
    return None


def _last_line(error: BaseException, file: str) -> str:
    line = None
    for frame, number in traceback.walk_tb(error.__traceback__):
        if frame.f_code.co_filename == file:
            line = number
    return file if line is None else f"{file}:{line}"


def _memory_text(error: MemoryError, file: str, limit_mib: int | None) -> str:
    where = _last_line(error, file)
    traceback.clear_frames(error.__traceback__)  # frees the locals that hold the memory
    limit = "its memory limit" if limit_mib is None else f"{limit_mib} MiB, its memory limit"
    return f"{where}: the program used more than {limit}.\nMemoryError"


def _exit_text(error: SystemExit, file: str) -> str:
    code = "" if error.code is None else repr(error.code)
    return (
        f"{_last_line(error, file)}: the program called sys.exit({code})."
        "\n  hint: an inferlet ends when `main` returns; raise an exception to fail"
    )


def _traceback_text(error: BaseException) -> str:
    report = traceback.TracebackException.from_exception(error)
    _trim(report, set())
    text = _shorten("".join(report.format()).rstrip("\n"))
    if isinstance(error, ModuleNotFoundError):
        text += (
            "\n  hint: the sandbox has the standard library and `inferlet`; with `--native` your own packages work too"
        )
    return text


def _shorten(text: str) -> str:
    if len(text) <= _MAX_REPORT:
        return text
    half = _MAX_REPORT // 2
    return f"{text[:half]}\n... ({len(text) - 2 * half} characters left out) ...\n{text[-half:]}"


def _trim(report: traceback.TracebackException | None, seen: set[int]) -> None:
    """Drop our frames from a report and from everything it mentions, unless nothing else is left."""
    if report is None or id(report) in seen:
        return
    seen.add(id(report))
    kept = [frame for frame in report.stack if not _is_own(frame.filename)]
    report.stack = traceback.StackSummary.from_list(kept)
    for other in (report.__cause__, report.__context__, *(report.exceptions or ())):
        _trim(other, seen)


def _is_own(filename: str) -> bool:
    parts = filename.replace("\\", "/").removesuffix(".py").split("/")
    return len(parts) > 1 and any(part in _OWN for part in parts)
