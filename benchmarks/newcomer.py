"""What a never-seen epilogue costs: the newcomer's first token against a warm one's, and its neighbours' gaps between tokens.

    python -m benchmarks.newcomer [--lanes 8] [--rounds 3]

Lanes decode greedily all the while. A program whose epilogue nobody has compiled arrives; the same program arrives again later, warm.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
SHAPES = itertools.count(random.randrange(1, 1 << 20) % 97 + 1)


def launch(runtime: Any, name: str, native: bool, **given: Any) -> Any:
    """Start a program of `inferlets/`; its process, whose `done` gives the result."""
    from pie_xla.launch import Launch

    path = HERE / "inferlets" / name
    return runtime.launch(Launch(path.read_text("utf-8"), str(path), given, native), lambda event: None)


def gaps(times: list[float], begin: float, end: float) -> list[float]:
    """Seconds between tokens that came in a span."""
    return [b - a for a, b in itertools.pairwise(times) if begin <= a and b <= end]


def one_round(runtime: Any, lanes: int, native: bool, shape: int) -> dict[str, float]:
    tokens = 220
    decoders = [launch(runtime, "decode.py", native, stream=i, prompt=32, tokens=tokens, depth=4) for i in range(lanes)]
    time.sleep(3.0)
    asked_cold = time.time()
    cold = launch(runtime, "newcomer.py", native, prompt=8, tokens=16, shape=shape).done.result(120)
    time.sleep(0.5)
    asked_warm = time.time()
    warm = launch(runtime, "newcomer.py", native, prompt=8, tokens=16, shape=shape).done.result(120)
    times = [process.done.result(300)["times"] for process in decoders]

    def mean(begin: float, end: float) -> float:
        return statistics.fmean(gap for lane in times for gap in gaps(lane, begin, end))

    # the second beside the newcomer's compile, against the second beside the same program when it is warm
    return {
        "first token, cold": cold["times"][0] - asked_cold,
        "first token, warm": warm["times"][0] - asked_warm,
        "gap before": mean(asked_cold - 1.5, asked_cold),
        "gap beside the cold one": mean(asked_cold, cold["times"][-1]),
        "gap beside the warm one": mean(asked_warm, warm["times"][-1]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lanes", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "newcomer.json")
    args = parser.parse_args()
    from pie_xla.cli.console import stderr_progress
    from pie_xla.config import load
    from pie_xla.runtime import open_runtime
    from pie_xla.timings import Timings

    report: dict[str, Any] = {}
    with open_runtime(load(), serve=True, progress=stderr_progress(), timings=Timings()) as runtime:
        for native in (False, True):
            rounds = [one_round(runtime, args.lanes, native, next(SHAPES)) for _ in range(args.rounds)]
            cell = {name: statistics.median(r[name] for r in rounds) for name in rounds[0]}
            cell["later by"] = cell["first token, cold"] - cell["first token, warm"]
            cell["gap grows by"] = statistics.median(
                r["gap beside the cold one"] / r["gap beside the warm one"] - 1 for r in rounds
            )
            report["native" if native else "sandboxed"] = cell
    args.out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
