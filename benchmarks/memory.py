"""Memory of `pie-xla serve`: resident when ready, resident under load, and the most at any time.

    python -m benchmarks.memory [--streams 32] [--program FILE]

The bound is the weights, the state pool and 600 MB. Linux only: figures are the kernel's (VmRSS, VmHWM).
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


def status(pid: int) -> dict[str, int]:
    """Bytes resident now, and the most so far."""
    text = Path(f"/proc/{pid}/status").read_text()
    return {name: int(re.search(rf"{name}:\s+(\d+)", text)[1]) << 10 for name in ("VmRSS", "VmHWM")}  # type: ignore[index]


def generate(port: int, source: str, value: dict[str, object]) -> None:
    body = json.dumps({"source": source, "input": value}).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/generate", body, {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=300) as answer:
        answer.read()


def measure(streams: int, program: Path) -> dict[str, float]:
    """Megabytes of a server of its own under `streams` programs at once."""
    command = [sys.executable, "-m", "pie_xla", "serve", "--port", "0"]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    said, port, state = [], 0, 0.0
    for line in server.stderr:
        said.append(line)
        if found := re.search(r"state: ([\d,]+) MiB", line):
            state = float(found[1].replace(",", "")) * 2**20
        if found := re.search(r"http://[\w.]+:(\d+)", line):
            port = int(found[1])
            break
    if not port:
        raise SystemExit("the server did not start:\n" + "".join(said))
    threading.Thread(target=server.stderr.read, daemon=True).start()
    try:
        time.sleep(1.0)
        ready = status(server.pid)
        source = program.read_text("utf-8")
        workers = [
            threading.Thread(target=generate, args=(port, source, {"stream": i, "prompt": 32, "tokens": 64, "depth": 4})) for i in range(streams)
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        loaded = status(server.pid)
    finally:
        server.terminate()
        server.wait(30)
    return {
        "state MB": state / 1e6,
        "ready MB": ready["VmRSS"] / 1e6,
        "loaded MB": loaded["VmRSS"] / 1e6,
        "peak MB": loaded["VmHWM"] / 1e6,
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
        print(f"{name:12} {value:8.0f}")


if __name__ == "__main__":
    main()
