"""Sharing a prefix: time to the first tokens of many programs with the same long prompt, against prompts that share nothing.

    python -m benchmarks.prefix [--programs 16] [--prompt 1000] [--rounds 3]

All are launched at once; a cell is the mean time from launch to a program's first token. Both kinds in turn, in one run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

from benchmarks.newcomer import launch

HERE = Path(__file__).parent


def first_tokens(runtime: Any, programs: int, prompt: int, shared: bool, turn: int) -> tuple[float, float]:
    """Mean seconds to the first token, and seconds a fork of the state after it."""
    begun = time.time()
    given = {"prompt": prompt, "shared": shared, "round": turn}
    running = [launch(runtime, "prefix.py", False, stream=i, **given) for i in range(programs)]
    found = [process.done.result(600) for process in running]
    return statistics.fmean(one["came"] - begun for one in found), statistics.median(one["fork"] for one in found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "prefix.json")
    args = parser.parse_args()
    from pie_xla.cli.console import stderr_progress
    from pie_xla.config import load
    from pie_xla.runtime import open_runtime
    from pie_xla.timings import Timings

    with open_runtime(load(), serve=True, progress=stderr_progress(), timings=Timings()) as runtime:
        first_tokens(runtime, 1, 64, True, 40)  # the program compiles here
        pairs, forks = [], []
        for turn in range(args.rounds):
            shared, fork = first_tokens(runtime, args.programs, args.prompt, True, turn)
            alone, _ = first_tokens(runtime, args.programs, args.prompt, False, turn)
            pairs.append((shared, alone))
            forks.append(fork)
    report = {
        "shared s": statistics.median(shared for shared, _ in pairs),
        "not shared s": statistics.median(alone for _, alone in pairs),
        "not shared / shared": statistics.median(alone / shared for shared, alone in pairs),
        "fork ms": statistics.median(forks) * 1e3,
    }
    args.out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
