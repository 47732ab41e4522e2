"""What the documents say is there is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pie_xla import config
from pie_xla.cli.main import COMMANDS
from pie_xla.hub import known

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    targets = re.findall(r"\]\(([^)#]+)[^)]*\)", document.read_text())
    missing = [target for target in targets if "://" not in target and not (document.parent / target).exists()]
    assert missing == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_commands_and_files_that_are_named_exist(document: Path) -> None:
    text = document.read_text()
    blocks = re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
    inline = re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    commands = [word for code in blocks + inline for word in re.findall(r"(?:^|/)pie-xla ([a-z]+)", code, re.MULTILINE)]
    assert set(commands) <= set(COMMANDS)
    examples = set(re.findall(r"examples/[a-z_]+/[a-z_]+\.py", text))
    assert {name for name in examples if not (ROOT / name).exists()} == set()
    targets = set(re.findall(r"`?make ([a-z-]+)`?", text)) & {
        "quickstart",
        "test",
        "test-all",
        "bench",
        "wheel",
        "lint",
    }
    assert targets <= set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def test_the_guide_names_every_setting() -> None:
    guide = (ROOT / "docs" / "guide.md").read_text()
    for section in config.SECTIONS:
        row = next(line for line in guide.splitlines() if line.startswith(f"| `[{section}]`"))
        assert set(config.settings_of(section)) <= set(re.findall(r"`([a-z_]+)`", row))


def test_one_default_model() -> None:
    assert (config.DEFAULT_MODEL, config.DEFAULT_SOURCE) == (known.DEFAULT_MODEL, known.DEFAULT_SOURCE)
    makefile = (ROOT / "Makefile").read_text()
    assert f"MODEL := {config.DEFAULT_MODEL}\nSOURCE := {config.DEFAULT_SOURCE}\n" in makefile
