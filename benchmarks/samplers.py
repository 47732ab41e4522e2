"""What a sampler costs: time per token of equal lanes with it, as a ratio to greedy lanes of the same round.

    python -m benchmarks.samplers [--lanes 8] [--rounds 3] [--native] [--model NAME]

Each round runs greedy lanes before and after every sampler's, so that a busy machine is on both sides of the ratio.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from benchmarks.newcomer import launch

HERE = Path(__file__).parent
SAMPLERS = [
    "temperature",
    "usual",
    "typical",
    "tail_free",
    "eta",
    "xtc",
    "mirostat",
    "entropy_temperature",
    "penalties",
    "dry",
    "greenlist",
    "gumbel",
    "tournament",
]


def per_token(runtime: Any, sampler: str, lanes: int, tokens: int, native: bool) -> float:
    """Seconds between tokens, of all lanes, after the first few."""
    given = {"sampler": sampler, "prompt": 32, "tokens": tokens}
    running = [launch(runtime, "sampler.py", native, lane=lane, **given) for lane in range(lanes)]
    times = [process.done.result(600) for process in running]
    return statistics.fmean((lane[-1] - lane[7]) / (len(lane) - 8) for lane in times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lanes", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--native", action="store_true")
    parser.add_argument("--model")
    parser.add_argument("--only", nargs="*", default=SAMPLERS)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "samplers.json")
    args = parser.parse_args()
    from pie_xla.cli.console import stderr_progress
    from pie_xla.config import load
    from pie_xla.runtime import open_runtime
    from pie_xla.timings import Timings

    with open_runtime(load(), args.model, serve=True, progress=stderr_progress(), timings=Timings()) as runtime:
        for sampler in ["greedy", *args.only]:
            per_token(runtime, sampler, args.lanes, 16, args.native)  # compiles
        ratios: dict[str, list[float]] = {sampler: [] for sampler in args.only}
        for _ in range(args.rounds):
            before = per_token(runtime, "greedy", args.lanes, args.tokens, args.native)
            for sampler in args.only:
                own = per_token(runtime, sampler, args.lanes, args.tokens, args.native)
                after = per_token(runtime, "greedy", args.lanes, args.tokens, args.native)
                ratios[sampler].append(own / ((before + after) / 2))
                before = after
    found = {sampler: {"ratio": statistics.median(own), "of": own} for sampler, own in ratios.items()}
    for sampler, one in found.items():
        print(f"{sampler:20s} {one['ratio']:.2f}  ({', '.join(f'{ratio:.2f}' for ratio in one['of'])})")
    about = {"model": runtime.model_name, "lanes": args.lanes, "rounds": args.rounds, "native": args.native}
    args.out.write_text(json.dumps({**about, "ratios to greedy": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
