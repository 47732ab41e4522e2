"""docs/sdk-reference.md is what the SDK's code says."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import write_sdk_reference


def test_the_reference_is_current_and_names_what_programs_use() -> None:
    made = write_sdk_reference.text()
    assert write_sdk_reference.FILE.read_text("utf-8") == made, (
        "run PYTHONPATH=. python tests/project/write_sdk_reference.py"
    )
    for name in ("generate(prompt, *, sampler=None", "typical(mass)", "ForwardPass(model=None)", "search(prompt"):
        assert name in made


def test_everything_public_is_described() -> None:
    bare = [
        f"{module.__name__}.{name}"
        for module in write_sdk_reference.modules()
        for name, value in write_sdk_reference.public(module).items()
        if not write_sdk_reference.described(value)
    ]
    assert bare == []
