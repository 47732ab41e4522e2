"""From process start to the first token: `pie-xla run` on imported weights, with warm caches.

python -m benchmarks.warm_start [--runs 5]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
PROGRAM = HERE / "inferlets" / "first_token.py"


def run() -> tuple[float, str]:
    """Seconds to the first word of the program, and the table of timings."""
    command = [sys.executable, "-m", "pie_xla", "run", "--timings", str(PROGRAM)]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    table = said[said.index("seconds ") :]
    (line,) = [line for line in table.splitlines() if line.endswith("first word from the program")]
    return float(line.split()[0]), table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "warm_start.json")
    args = parser.parse_args()
    run()  # whatever is cold becomes warm
    runs = sorted((run() for _ in range(args.runs)), key=lambda found: found[0])
    seconds = [found[0] for found in runs]
    args.out.parent.mkdir(exist_ok=True)
    args.out.write_text(json.dumps({"seconds": seconds, "median": statistics.median(seconds)}, indent=1) + "\n")
    print(runs[len(runs) // 2][1])
    print(
        f"first token: {seconds[0]:.2f} / {statistics.median(seconds):.2f} / {seconds[-1]:.2f} s (least / median / most)"
    )


if __name__ == "__main__":
    main()
