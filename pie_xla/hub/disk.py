"""Disk space: computed before work where it can be, named when it runs out anyway."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pie_xla.errors import PieError


def require_space(path: Path, needed: int, doing: str) -> None:
    """Refuse work that needs more than the `needed` bytes that are free where `path` lies.

    Raises:
        PieError: names the needed and the free bytes.
    """
    place = next(parent for parent in (path, *path.parents) if parent.exists())
    free = shutil.disk_usage(place).free
    if needed > free:
        raise PieError(
            f"not enough disk space: {doing} needs {human_bytes(needed)}, {place} has {human_bytes(free)} free",
            "free some space, or set another store directory, and run it again",
        )


@contextmanager
def naming_full_disk(path: Path, doing: str) -> Iterator[None]:
    """Turn a full disk, whoever reports it, into a PieError that says where and during what."""
    try:
        yield
    except Exception as error:
        if not _is_full(error):
            raise
        raise PieError(
            f"the disk is full: {doing} stopped at {path}",
            "nothing half-done is kept in the store; free some space and run it again",
        ) from error


def _is_full(error: BaseException) -> bool:
    if isinstance(error, OSError):
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    # tensorstore reports the system's text inside a ValueError
    return any(os.strerror(code) in str(error) for code in (errno.ENOSPC, errno.EDQUOT))


def human_bytes(count: float) -> str:
    """12345678 -> "12.3 MB"."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def sync_tree(path: Path) -> None:
    """fsync every file and directory under `path`, so that a rename after it is safe against a crash."""
    for directory, _, names in os.walk(path):
        for name in names:
            sync(Path(directory, name))
        sync(Path(directory))


def sync(path: Path) -> None:
    """fsync one file or directory."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
