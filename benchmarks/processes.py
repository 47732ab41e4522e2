"""What sandboxed Python processes cost: launching one and a hundred, and five hundred that wait.

    python -m benchmarks.processes [--model NAME]

Launch to return is timed inside the server's process, without HTTP. Memory is the kernel's proportional set size, and the
processor time that of the whole process over five seconds in which all of them wait. Linux only.
"""

from __future__ import annotations

import argparse
import gc
import json
import re
import statistics
import threading
import time
from concurrent.futures import wait
from dataclasses import replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def set_size() -> int:
    """Bytes of this process, pages that mappings share counted once."""
    found = re.search(r"^Pss:\s+(\d+)", Path("/proc/self/smaps_rollup").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) << 10


class Crowd:
    """Launches programs and hears what becomes of them."""

    def __init__(self, runtime: Any) -> None:
        self._runtime = runtime
        self.heard = threading.Semaphore(0)
        self.failed: list[str] = []

    def launch(self, name: str, count: int, what: type) -> list[Any]:
        """Start `count` of a program, and wait until each has said `what` (an event)."""
        from pie_xla.launch import Failed, Launch

        source = (HERE / "inferlets" / f"{name}.py").read_text()

        def hear(event: Any) -> None:
            if isinstance(event, Failed):
                self.failed.append(event.message)
            if isinstance(event, what | Failed):
                self.heard.release()

        started = [self._runtime.launch(Launch(source, f"{name}.py", {"i": i}), hear) for i in range(count)]
        for _ in range(count):
            self.heard.acquire()
        if self.failed and what is not Failed:
            raise SystemExit(self.failed[0])
        return started


def measure(model: str | None, waiting: int) -> dict[str, float]:
    from pie_xla.cli.console import PlainProgress
    from pie_xla.config import load
    from pie_xla.launch import Returned, Sent
    from pie_xla.runtime import open_runtime
    from pie_xla.timings import Timings

    config, found = load(), dict[str, float]()
    config = replace(config, limits=replace(config.limits, processes=max(100, waiting)))
    with open_runtime(config, model, serve=True, progress=PlainProgress(), timings=Timings()) as runtime:
        crowd = Crowd(runtime)
        crowd.launch("hello", 20, Returned)
        for count, rounds in ((1, 30), (100, 5)):
            seconds = []
            for _ in range(rounds):
                begin = time.perf_counter()
                crowd.launch("hello", count, Returned)
                seconds.append(time.perf_counter() - begin)
            found[f"{count} launched and returned, ms"] = 1e3 * statistics.median(seconds)
        before = set_size()
        begin = time.perf_counter()
        started = crowd.launch("wait", waiting, Sent)
        found[f"{waiting} launched and waiting, s"] = time.perf_counter() - begin
        time.sleep(1)
        assert not any(one.done.done() for one in started), "a program that should wait has ended"
        found["MB a waiting process"] = (set_size() - before) / waiting / 1e6
        busy = time.process_time()
        time.sleep(5)
        found[f"processor ms a second while {waiting} wait"] = (time.process_time() - busy) / 5 * 1e3
        for one in started:
            one.kill("the benchmark is over")
        done, late = wait([one.done for one in started], timeout=60)
        assert not late, f"{len(late)} of {len(done) + len(late)} did not end"
        del started, done, one
        gc.collect()
        time.sleep(1)
        found["MB kept afterwards, in all"] = (set_size() - before) / 1e6
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a model of the store")
    parser.add_argument("--waiting", type=int, default=500)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "processes.json")
    args = parser.parse_args()
    found = measure(args.model, args.waiting)
    args.out.parent.mkdir(exist_ok=True)
    args.out.write_text(json.dumps(found, indent=1) + "\n")
    for name, value in found.items():
        print(f"{name:44} {value:8.2f}")


if __name__ == "__main__":
    main()
