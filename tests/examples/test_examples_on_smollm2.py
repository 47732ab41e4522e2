"""Every example on SmolLM2: in the sandbox and natively the tokens are the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
pytestmark = [pytest.mark.model, pytest.mark.slow]


def source(name: str) -> str:
    return (EXAMPLES / name / "main.py").read_text("utf-8")


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("quickstart", {"max_tokens": 4}, "The capital of France is Paris."),
        ("text_completion", {"prompt": "The capital of France is", "max_tokens": 4}, "The capital of France is Paris."),
        ("chat", {"max_tokens": 12}, "The capital of Italy is Rome."),
        ("custom_sampler", {"max_tokens": 8, "seed": 3}, "My favourite thing about winter is"),
        ("samplers", {"sampler": "penalties|typical|mirostat", "max_tokens": 8}, ""),
        ("watermark", {"max_tokens": 40}, "[marked]"),
        ("ngram_speculation", {"max_tokens": 24}, "green pear"),
        ("grammar_speculation", {}, "favourite_colour"),
        ("beam_search", {"max_tokens": 6}, "Paris"),
        ("best_of_n", {"n": 3, "max_tokens": 24}, ""),
        ("guidance", {"max_tokens": 8}, ""),
        ("contrastive_decoding", {"max_tokens": 6}, ""),
        ("attention_sinks", {"max_tokens": 48, "window": 24}, ""),
        ("json_schema", {}, "population"),
        ("token_healing", {"max_tokens": 6}, "https://"),
        ("react_agent", {"max_steps": 1, "max_tokens": 96, "longest": 30}, ""),
        ("map_reduce_summary", {"max_tokens": 12}, ""),
        ("skeleton_of_thought", {"max_tokens": 8, "points": 2}, "1. "),
        ("tree_of_thought", {"max_tokens": 12, "depth": 1}, ""),
        ("swarm", {"max_tokens": 12, "rounds": 1}, "a curious child: "),
        ("reflexion", {"attempts": 2}, ""),
        ("prefix_cache", {"max_tokens": 8}, "When do you open?"),
        ("quest", {"max_tokens": 6, "pages": 2}, "there lived a"),
        ("heavy_hitters", {"max_tokens": 6, "budget": 12}, "there lived a"),
        ("tova", {"max_tokens": 6, "budget": 12}, "there lived a"),
        ("snapkv", {"max_tokens": 6}, "Anna lives in Lisbon"),
    ],
)
def test_sandboxed_equals_native(
    run_inferlet: Callable[..., Any], name: str, value: dict[str, Any], words: str
) -> None:
    sandboxed = run_inferlet(source(name), value)
    assert sandboxed.failure is None and words in sandboxed.sent
    native = run_inferlet(source(name), value, native=True)
    assert (native.failure, native.sent, native.result) == (None, sandboxed.sent, sandboxed.result)


def test_jnp_sampler_equals_eta_sampler(run_inferlet: Callable[..., Any]) -> None:
    value = {"max_tokens": 8, "seed": 3}
    plain = run_inferlet(source("custom_sampler_jnp"), value, native=True)
    assert plain.failure is None
    assert plain.result == run_inferlet(source("custom_sampler"), value).result


def test_jnp_needs_native(run_inferlet: Callable[..., Any]) -> None:
    outcome = run_inferlet(source("custom_sampler_jnp"))
    assert "No module named 'jax'" in outcome.failure and "--native" in outcome.failure
