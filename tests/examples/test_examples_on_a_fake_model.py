"""Every example runs to its end natively on the fake engine; what it computes is checked where the fake model makes
it plain.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "process"))

from fake_engine import FACTS, Bytes, FakeEngine, greedy

from pie_xla.eta.program import EtaProgram
from pie_xla.launch import Event, Launch, Sent
from pie_xla.process.process import ProcessManager

EXAMPLES = Path(__file__).parents[2] / "examples"


class Runner:
    def __init__(self, manager: ProcessManager, engine: FakeEngine) -> None:
        self.manager, self.engine = manager, engine
        self.text = ""

    def __call__(self, name: str, **value: Any) -> Any:
        self.text = ""
        file = EXAMPLES / name / "main.py"
        process = self.manager.launch(Launch(file.read_text("utf-8"), str(file), value, native=True), self._hear)
        return process.done.result(60)

    def _hear(self, event: Event) -> None:
        if isinstance(event, Sent):
            self.text += event.text


@pytest.fixture(scope="module")
def run() -> Iterator[Runner]:
    engine = FakeEngine()
    manager = ProcessManager(engine, FACTS, Bytes(), EtaProgram.from_json)
    yield Runner(manager, engine)
    manager.close()
    engine.close()


def ids(text: str) -> list[int]:
    return [1, *(byte + 3 for byte in text.encode())]


def text_of(tokens: list[int]) -> str:
    return bytes(token - 3 for token in tokens if 3 <= token < 259).decode("utf-8", "replace")


def until_stop(tokens: list[int]) -> list[int]:
    return tokens[: tokens.index(2)] if 2 in tokens else tokens


def test_every_example_has_its_readme_and_command() -> None:
    for folder in sorted(path for path in EXAMPLES.iterdir() if path.is_dir()):
        assert f"examples/{folder.name}/main.py" in (folder / "README.md").read_text("utf-8")
        assert f"]({folder.name})" in (EXAMPLES / "README.md").read_text("utf-8")


def test_quickstart(run: Runner) -> None:
    expected = until_stop(greedy(ids("Hi"), 5))
    assert run("quickstart", prompt="Hi", max_tokens=5)["model"] == "fake"
    assert run.text == "Hi" + text_of(expected) + "\n"


def test_text_completion(run: Runner) -> None:
    expected = until_stop(greedy(ids("Hello there"), 12))
    result = run("text_completion", prompt="Hello there", max_tokens=12)
    assert result == {"prompt_tokens": 12, "tokens": len(expected), "stopped": len(expected) < 12}
    assert run.text == "Hello there" + text_of(expected) + "\n"


def test_chat_reuses_what_it_has(run: Runner) -> None:
    first = until_stop(greedy([byte + 3 for byte in b"<user>a<assistant>"], 6))
    result = run("chat", message=["a", "b"], max_tokens=6)
    assert result["answers"][0] == text_of(first)
    second = [byte + 3 for byte in f"<user>a<assistant>{text_of(first)}<user>b<assistant>".encode()]
    assert result["answers"][1] == text_of(until_stop(greedy(second, 6)))
    prompts = [r.rows[0].tokens for r in run.engine.clients[-1].submits if isinstance(r.rows[0].tokens, tuple)]
    assert len(prompts[1]) < len(second)


def test_samplers_in_eta_and_jnp_draw_the_same(run: Runner) -> None:
    value = {"prompt": "Hi", "max_tokens": 6, "seed": 5, "temperature": 0.7, "top_p": 0.5}
    native = run("custom_sampler_jnp", **value)
    assert native == run("custom_sampler", **value)
    assert len(native["tokens"]) == 6 and native != run("custom_sampler", **{**value, "seed": 6})
    cold = run("custom_sampler", **{**value, "top_p": 1e-6})["tokens"]
    assert cold == greedy(ids("Hi"), 6)
