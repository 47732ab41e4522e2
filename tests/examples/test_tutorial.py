"""The ten programs of docs/tutorial.md run, and give what the text beside them says."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "sdk"))

from tiny_model import Tiny, open_tiny

TEXT = (Path(__file__).parents[2] / "docs" / "tutorial.md").read_text("utf-8")
PROGRAMS = {
    int(n): code for n, code in re.findall(r"^## (\d+)\..*?```python\n(.*?)```", TEXT, re.DOTALL | re.MULTILINE)
}


@pytest.fixture(scope="module")
def tiny() -> Iterator[Tiny]:
    with open_tiny() as made:
        yield made


@pytest.fixture(scope="module")
def greedy(tiny: Tiny) -> list[int]:
    return tiny(PROGRAMS[1], prompt="Hi")


def test_there_are_ten() -> None:
    assert list(PROGRAMS) == list(range(1, 11))


@pytest.mark.parametrize("number", [2, 3, 4])
def test_other_ways_to_the_same_tokens(tiny: Tiny, greedy: list[int], number: int) -> None:
    assert len(greedy) == 8 and 2 not in greedy
    assert tiny(PROGRAMS[number], prompt="Hi") == greedy


def test_a_channel_sums_up(tiny: Tiny, greedy: list[int]) -> None:
    tokens, total = tiny(PROGRAMS[5], prompt="Hi")
    source = """
        from inferlet import generate
        async def main(input):
            return -sum([item.logprob async for item in generate("Hi", max_tokens=8, logprobs=0)])
    """
    assert tokens == greedy and total == pytest.approx(tiny(source), rel=1e-4)


def test_forks_go_their_own_way(tiny: Tiny, greedy: list[int]) -> None:
    one, other = tiny(PROGRAMS[6], prompt="H", ends=["i", "o"])
    assert one == greedy and other != one


def test_what_was_wrong_is_taken_back(tiny: Tiny) -> None:
    assert tiny(PROGRAMS[7], prompt="Hi") == [3, 3]


def test_rows_are_seen_together(tiny: Tiny, greedy: list[int]) -> None:
    def said(more: float) -> Any:
        return tiny(PROGRAMS[8], prompts=["Hi", "Ho"], more=more)

    assert said(0.0) == greedy != said(5.0)
    assert said(-1.0) == tiny(PROGRAMS[1], prompt="Ho")


def test_json_parses(tiny: Tiny) -> None:
    assert tiny(PROGRAMS[9]) in ({"ready": True}, {"ready": False})


def test_many_at_once_are_each_alone(tiny: Tiny) -> None:
    three = tiny(PROGRAMS[10])
    assert len(three) == 3 and tiny(PROGRAMS[10], words=["sky"]) == three[1:2]
