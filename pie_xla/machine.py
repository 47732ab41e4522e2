"""What this machine has: cores, memory, disk, as the process may use them (containers included)."""

from __future__ import annotations

import ctypes
import os
import shutil
import sys
import time
from pathlib import Path

import psutil

_CGROUP = Path("/sys/fs/cgroup")

_M_ARENA_MAX = -8  # malloc.h


def usable_cores() -> int:
    """Cores this process may run on, no more than its container's quota."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    try:
        quota, period = (_CGROUP / "cpu.max").read_text().split()
        return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))
    except (OSError, ValueError):
        return cores


def memory() -> tuple[int, int]:
    """(total, available) bytes for this process: the machine's, or its container's if that is less.

    Cached files count as available in a container too: the kernel lets go of them.
    """
    machine = psutil.virtual_memory()
    try:
        limit = int((_CGROUP / "memory.max").read_text())
        used = int((_CGROUP / "memory.current").read_text())
        counts = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
        used -= int(counts.get("active_file", 0)) + int(counts.get("inactive_file", 0))
    except (OSError, ValueError):
        return machine.total, machine.available
    return min(machine.total, limit), min(machine.available, max(0, limit - used))


def disk_free(folder: Path) -> int:
    """Free bytes on the disk that holds `folder`, which need not exist yet."""
    here = folder.absolute()
    while not here.exists():
        here = here.parent
    return shutil.disk_usage(here).free


def process_age() -> float:
    """Seconds since this process was started, the interpreter's own start included."""
    started: float = psutil.Process().create_time()
    return time.time() - started


def share_arenas() -> None:
    """Let all threads of this process allocate from two arenas. glibc's default of eight a core keeps 160 MB that threads freed
    while loading (measured); elsewhere this does nothing."""
    try:
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 2)
    except (OSError, AttributeError):
        return
