"""Memory of `pie-xla serve`: when ready, after a load, and the most at any time.

    python -m benchmarks.memory [--streams 32] [--program FILE]

The bound is the weights, the state pool and 600 MB. Linux only: figures are the kernel's proportional set size, sampled.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

HERE = Path(__file__).parent
ALLOWED = 600e6  # bytes beyond weights and state


class Watch:
    """Samples a process's proportional set size: pages that many mappings share (a sandbox's image, once per guest) count once."""

    def __init__(self, pid: int) -> None:
        self._path = Path(f"/proc/{pid}/smaps_rollup")
        self.most = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def now(self) -> int:
        """Bytes."""
        try:
            found = re.search(r"^Pss:\s+(\d+)", self._path.read_text(), re.MULTILINE)
        except OSError:  # it has ended
            return 0
        return int(found[1]) << 10 if found else 0

    def _run(self) -> None:
        while not self._stop.wait(0.05):
            self.most = max(self.most, self.now())

    def close(self) -> None:
        self._stop.set()
        self._thread.join()


def generate(port: int, source: str, value: dict[str, object]) -> None:
    body = json.dumps({"source": source, "input": value}).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/generate", body, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as answer:
        answer.read()


def measure(streams: int, program: Path) -> dict[str, float]:
    """Megabytes of a server of its own under `streams` programs at once."""
    command = [sys.executable, "-m", "pie_xla", "serve", "--port", "0"]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    watch = Watch(server.pid)
    said, port, state = [], 0, 0.0
    for line in server.stderr:
        said.append(line)
        if found := re.search(r"state: ([\d,]+) MiB", line):
            state = float(found[1].replace(",", "")) * 2**20
        if found := re.search(r"http://[\w.]+:(\d+)", line):
            port = int(found[1])
            break
    if not port:
        watch.close()
        raise SystemExit("the server did not start:\n" + "".join(said))
    threading.Thread(target=server.stderr.read, daemon=True).start()
    try:
        time.sleep(1.0)
        ready, starting = watch.now(), watch.most
        source = program.read_text("utf-8")
        workers = [
            threading.Thread(
                target=generate, args=(port, source, {"stream": i, "prompt": 32, "tokens": 64, "depth": 4})
            )
            for i in range(streams)
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        loaded = watch.now()
    finally:
        watch.close()
        server.terminate()
        server.wait(30)
    return {
        "state MB": state / 1e6,
        "start's peak MB": starting / 1e6,
        "ready MB": ready / 1e6,
        "afterwards MB": loaded / 1e6,
        "peak MB": watch.most / 1e6,
    }


def weights_bytes() -> int:
    """Of the default model."""
    from pie_xla.config import Environment, load
    from pie_xla.hub.store import Store

    config = load(Environment.read())
    return Store(config.store_dir).open(config.model.default).manifest.total_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--program", type=Path, default=HERE / "inferlets" / "decode.py")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "memory.json")
    args = parser.parse_args()
    found = measure(args.streams, args.program)
    found["weights MB"] = weights_bytes() / 1e6
    found["allowed MB"] = found["weights MB"] + found["state MB"] + ALLOWED / 1e6
    args.out.parent.mkdir(exist_ok=True)
    args.out.write_text(json.dumps(found, indent=1) + "\n")
    for name, value in found.items():
        print(f"{name:16} {value:8.0f}")


if __name__ == "__main__":
    main()
