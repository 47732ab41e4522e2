"""Rewrites golden/programs.json: `PYTHONPATH=.:inferlets/sdk/python:tests/eta python tests/eta/write_golden.py`."""

from __future__ import annotations

import json

from test_program import EPILOGUES, GOLDEN, traced


def main() -> None:
    golden = {}
    for name in EPILOGUES:
        made, program = traced(name)
        body = json.dumps(json.loads(made.text)["body"], sort_keys=True, separators=(",", ":"))
        golden[name] = {"key": program.key, "body": body, "cost": program.cost, "memory": program.memory}
    GOLDEN.write_text(json.dumps(golden, indent=1) + "\n")


if __name__ == "__main__":
    main()
