"""The examples of the library on a tiny random model: each runs to its end, and its control setting gives what the README says."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

sys.path.insert(0, str(Path(__file__).parent.parent / "sdk"))

from tiny_model import D, Tiny, open_tiny

from pie_xla.launch import Launch

EXAMPLES = Path(__file__).parents[2] / "examples"
Run = Callable[..., Any]
NO_STOP = "from inferlet import generate\nasync def main(input):\n    return await generate("
PLAIN = NO_STOP + "input['prompt'], max_tokens=input['max_tokens'], model_stops=input.get('stops', True)).all_tokens()"


@pytest.fixture(scope="module")
def tiny() -> Iterator[Tiny]:
    with open_tiny() as made:
        yield made


@pytest.fixture
def run(tiny: Tiny) -> Run:
    return lambda name, **value: tiny((EXAMPLES / name / "main.py").read_text("utf-8"), **value)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("greedy", []),
        ("temperature", [0]),
        ("top_k", [1]),
        ("top_p", [1e-6]),
        ("min_p", [1.0]),
        ("top_n_sigma", [0.0]),
        ("mirostat", [0.0, 1.0]),
    ],
)
def test_samplers_at_their_coldest_are_greedy(tiny: Tiny, run: Run, name: str, values: list[float]) -> None:
    value = {"prompt": "Hi there", "max_tokens": 8}
    assert run("samplers", sampler=name, values=values, **value)["tokens"] == tiny(PLAIN, **value)


@pytest.mark.parametrize(
    "names", ["typical|dry", "penalties|eta|xtc", "entropy_temperature|tail_free", "no_repeat|epsilon"]
)
def test_samplers_join_and_repeat_by_their_seed(run: Run, names: str) -> None:
    first, again, other = (run("samplers", sampler=names, max_tokens=6, seed=seed)["tokens"] for seed in (3, 3, 4))
    assert first == again != other
    with pytest.raises(Exception, match="no sampler 'nothing'"):
        run("samplers", sampler="nothing")


def test_watermark(run: Run) -> None:
    found = run("watermark", mark="tournament", max_tokens=80, temperature=3.0)
    assert found["marked"]["z"] > 4 > 3.5 > abs(found["plain"]["z"])
    assert 0.4 < found["marked"]["perplexity"] / found["plain"]["perplexity"] < 2.5


@pytest.mark.parametrize("drafter", ["ngram", "jacobi", "junk"])
def test_ngram_speculation(tiny: Tiny, run: Run, drafter: str) -> None:
    made = run("ngram_speculation", prompt="abcabcabc", drafter=drafter, max_tokens=20)
    assert made["tokens"] == tiny(PLAIN, prompt="abcabcabc", max_tokens=20)
    assert made["passes"] <= len(made["tokens"]) + 1


def test_grammar_speculation(run: Run) -> None:
    made = run("grammar_speculation")
    junk = run("grammar_speculation", junk=True)
    assert made["value"] == junk["value"] and set(made["value"]) == {"first_name", "favourite_colour", "is_a_student"}
    assert made["accepted"] > 10 and made["passes"] < junk["passes"] / 2


def test_beam_search(tiny: Tiny, run: Run) -> None:
    one, four = (run("beam_search", prompt="Hi", max_tokens=8, width=width) for width in (1, 4))
    assert one["tokens"] == tiny(PLAIN, prompt="Hi", max_tokens=8)
    assert len(four["tokens"]) < 8 or four["logprob"] >= one["logprob"]


def test_best_of_n(run: Run) -> None:
    made = run("best_of_n", n=3, max_tokens=6, temperature=0)
    assert len(set(made["texts"])) == 1 and made["best_of_n"] == made["texts"][0]
    assert len(set(run("best_of_n", n=3, max_tokens=6, temperature=2.0)["texts"])) == 3


def test_guidance(tiny: Tiny, run: Run) -> None:
    value = {"prompt": "lo there", "context": "Hel", "max_tokens": 8}
    assert run("guidance", strength=1, **value)["tokens"] == tiny(PLAIN, prompt="Hello there", max_tokens=8)
    assert run("guidance", strength=0, **value)["tokens"] == tiny(PLAIN, prompt="lo there", max_tokens=8)
    assert run("guidance", strength=9, **value)["tokens"] != run("guidance", strength=1, **value)["tokens"]


def test_contrastive_decoding(tiny: Tiny, run: Run) -> None:
    value = {"prompt": "Hi", "max_tokens": 8}
    assert run("contrastive_decoding", **value)["tokens"] == tiny(PLAIN, **value)


def test_attention_sinks(tiny: Tiny, run: Run) -> None:
    value = {"prompt": "Hello you", "max_tokens": 40}
    plain = tiny(PLAIN, stops=False, **value)
    assert run("attention_sinks", policy="all", **value)["tokens"] == plain
    assert run("attention_sinks", window=60, **value)["tokens"] == plain
    assert run("attention_sinks", window=6, sinks=2, **value)["tokens"] != plain


def test_json_schema(run: Run) -> None:
    made = run("json_schema", max_tokens=160)
    assert made["reason"] == "stop_token" and set(made["value"]) == {"city", "population"}
    assert run("json_schema", regex="(red|green) [0-9]{2}")["value"].split()[0] in ("red", "green")


def test_token_healing(run: Run) -> None:
    healed, plain = run("token_healing", max_tokens=6), run("token_healing", max_tokens=6, heal=False)
    assert healed["tokens"][0] == ord(":") + 3 and plain["tokens"][:3] == healed["tokens"][1:4]


def test_react_agent(run: Run) -> None:
    made = run("react_agent", max_steps=1, max_tokens=200, longest=6)
    assert len(made["steps"]) <= 1 and (made["answer"] is None or len(made["answer"]) <= 6)
    assert run("react_agent", max_steps=0, max_tokens=200, longest=6)["steps"] == []


def test_map_reduce_summary(run: Run) -> None:
    made = run("map_reduce_summary", text="One.\n\nTwo.", max_tokens=5)
    assert len(made["parts"]) == 2
    alone = run("map_reduce_summary", text="One.", max_tokens=5)
    assert alone["parts"] == made["parts"][:1] == [alone["summary"]]


def test_skeleton_of_thought(run: Run) -> None:
    made = run("skeleton_of_thought", points=2, max_tokens=5)
    assert len(made["points"]) == len(made["texts"]) == 2 and all(len(point) >= 3 for point in made["points"])


def test_tree_of_thought(run: Run) -> None:
    made = run("tree_of_thought", task="Hm", width=2, breadth=2, depth=2, max_tokens=4)
    assert made["left"] == 2 and made["text"]


def test_swarm(run: Run) -> None:
    made = run("swarm", topic="Hm", roles=["a", "b"], rounds=2, max_tokens=4)
    assert made["answered"] == [2, 2] and len(made["views"]) == 2


def test_reflexion(run: Run) -> None:
    made = run("reflexion", attempts=2, max_tokens=4, words=99)
    assert made["attempts"] == 2 and not made["is_good"]


def test_prefix_cache(tiny: Tiny, run: Run) -> None:
    again = [run("prefix_cache", rules="Rules.", questions=["a", "b"], max_tokens=4)["answers"] for _ in range(2)]
    assert again[0] == again[1] and len(again[0]) == 2
    source = """
        from inferlet import generate, chat, model
        async def main(input):
            tokens = chat.prefix() + model.encode("Rules.") + model.encode("\\n\\nQ: b\\nA:")
            return await generate(tokens, max_tokens=4, stop=["\\n"]).all_text()
    """
    assert again[0][1] == tiny(source)


def test_jnp_steps_draw_what_eta_steps_draw(run: Run) -> None:
    value = {"mass": 0.6, "max_tokens": 8, "seed": 4}
    made = run("typical_sampling_jnp", **value)
    assert made == run("typical_sampling_jnp", eta=True, **value) and len(made["tokens"]) > 0
    assert made != run("typical_sampling_jnp", **{**value, "seed": 5})


def test_learned_verifier(run: Run, tmp_path: Path) -> None:
    weight = np.random.default_rng(1).normal(size=D).astype(np.float32)
    save_file({"weight": weight, "bias": np.float32([0.5]).reshape(())}, tmp_path / "probe.safetensors")
    save_file({"weight": -weight, "bias": np.float32([-0.5]).reshape(())}, tmp_path / "opposite.safetensors")
    one, other = (
        run("learned_verifier", probe=str(tmp_path / f"{name}.safetensors"), max_tokens=3)
        for name in ("probe", "opposite")
    )
    assert one["score"] == max(one["scores"]) and len(one["tokens"]) == 3 and one["tokens"] != other["tokens"]
    np.testing.assert_allclose(one["scores"], [-score for score in other["scores"]], rtol=1e-5)


def test_code_act(run: Run) -> None:
    begin = "```python\nx = 6\nprint(x * 7)\n```"
    made = run("code_act", begin=begin, max_steps=2, max_tokens=4)
    assert made["actions"][0] == ["x = 6\nprint(x * 7)\n", "42"] and made["actions"][1][1] == "There was no code."
    failed = run("code_act", begin="```python\n1 / 0\n```", max_steps=1, max_tokens=4)
    assert failed["actions"][0][1] == "ZeroDivisionError: division by zero"


def test_alone_and_beside_strangers(tiny: Tiny, run: Run) -> None:
    asked = [
        ("samplers", {"sampler": "penalties|typical", "max_tokens": 12, "prompt": "Hi"}),
        ("samplers", {"sampler": "mirostat", "max_tokens": 12, "prompt": "Ho"}),
        ("watermark", {"max_tokens": 30, "temperature": 2.0}),
        ("ngram_speculation", {"prompt": "abcabcabc", "max_tokens": 12}),
        ("beam_search", {"prompt": "Hi", "max_tokens": 6}),
        ("guidance", {"max_tokens": 8}),
    ]
    alone = [run(name, **value) for name, value in asked]
    launches = [
        Launch((EXAMPLES / name / "main.py").read_text("utf-8"), "main.py", value, native=True) for name, value in asked
    ]
    together = [
        one.done.result(120) for one in [tiny.manager.launch(launch, lambda event: None) for launch in launches]
    ]
    assert [one.get("tokens", one.get("marked", {}).get("z")) for one in together] == [
        one.get("tokens", one.get("marked", {}).get("z")) for one in alone
    ]
