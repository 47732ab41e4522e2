"""The words after `--`."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pie_xla.cli.arguments import parse_input
from pie_xla.errors import UsageError


def test_each_sort_of_word() -> None:
    words = ["--prompt", "The capital", "--max-tokens", "8", "--t=0.5", "--stream", "--no-echo", "--stop", '["a", "b"]']
    words += ["--n", '"3"', "--neg", "-1", "--eq=a=b", "--empty="]
    assert parse_input(words) == {
        "prompt": "The capital",
        "max_tokens": 8,
        "t": 0.5,
        "stream": True,
        "echo": False,
        "stop": ["a", "b"],
        "n": "3",
        "neg": -1,
        "eq": "a=b",
        "empty": "",
    }


@pytest.mark.parametrize("text", ["NaN", "Infinity", "-Infinity", "01", "1 2", "{", "tru", "[" * 100_000])
def test_what_is_not_json_is_text(text: str) -> None:
    assert parse_input([f"--x={text}"]) == {"x": text}


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(), lambda inner: st.lists(inner, max_size=3)))
def test_json_values_arrive(value: object) -> None:
    assert parse_input([f"--x={json.dumps(value)}"]) == {"x": value}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["hello"], "'hello' belongs to no key"),
        (["-p", "x"], "'-p' belongs to no key"),
        (["--"], "no usable key"),
        (["--=3"], "no usable key"),
        (["--a", "1", "--a", "2"], "--a is given twice"),
        (["--a", "1", "2"], "'2' belongs to no key"),
    ],
)
def test_wrong_words_are_refused(words: list[str], expected: str) -> None:
    with pytest.raises(UsageError, match=expected):
        parse_input(words)
