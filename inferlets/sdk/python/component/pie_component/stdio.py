"""`print` goes to the process's log on the host: text as written, line by line."""

from __future__ import annotations

import codecs
import io
import sys

from wit_world.imports import session

STDOUT_LEVEL = 20  # logging.INFO
STDERR_LEVEL = 30  # logging.WARNING
_CHUNK = 1 << 16  # bytes in one host call


class _LogWriter(io.RawIOBase):
    """A byte sink that hands UTF-8 text to `session.log`."""

    def __init__(self, level: int) -> None:
        self._level = level
        self._decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")

    def writable(self) -> bool:
        return True

    def write(self, data: object) -> int:
        view = memoryview(data).cast("B")  # type: ignore[arg-type]
        for start in range(0, len(view), _CHUNK):
            text = self._decoder.decode(bytes(view[start : start + _CHUNK]))
            if text:
                session.log(self._level, text)
        return len(view)


_streams: list[io.TextIOWrapper] = []


def install() -> None:
    for name, level in (("stdout", STDOUT_LEVEL), ("stderr", STDERR_LEVEL)):
        binary = io.BufferedWriter(_LogWriter(level), _CHUNK)
        stream = io.TextIOWrapper(binary, encoding="utf-8", errors="backslashreplace", line_buffering=True)
        _streams.append(stream)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def uninstall() -> None:
    """Forget the streams."""
    _streams.clear()


def flush() -> None:
    """Hand over what has no newline yet."""
    for stream in _streams:
        if not stream.closed:
            stream.flush()
