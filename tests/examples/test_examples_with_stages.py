"""Examples that look into the layers, on a tiny model: without pressure they are greedy decoding, under it they keep their budget."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "process"))
sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))

from fake_engine import Bytes, V
from tiny import CONFIG, load, reference_greedy
from tiny import engine as tiny_engine

from pie_xla.eta.program import EtaProgram
from pie_xla.launch import Launch
from pie_xla.process.interfaces import ModelFacts
from pie_xla.process.process import ProcessManager

EXAMPLES = Path(__file__).parents[2] / "examples"
PROMPT = "Once upon a time"
Run = Callable[..., Any]


@pytest.fixture(scope="module")
def model() -> Any:
    return load(CONFIG | {"vocab_size": V})


@pytest.fixture(scope="module")
def run(model: Any) -> Iterator[Run]:
    served = tiny_engine(model, name="examples with stages")
    outputs = {"logits": ((V,), "f32"), "hidden": ((32,), "f32")}
    manager = ProcessManager(
        served, ModelFacts("tiny", V, 256, 4, outputs, (2,), (1,), (2, 4, 8)), Bytes(), EtaProgram.from_json
    )

    def go(name: str, **value: Any) -> Any:
        source = (EXAMPLES / name / "main.py").read_text("utf-8")
        return manager.launch(Launch(source, "main.py", value, native=True), lambda event: None).done.result(100)

    yield go
    manager.close()
    served.close()


@pytest.fixture(scope="module")
def plain(model: Any) -> list[int]:
    return reference_greedy(model.lowered, model.params, [byte + 3 for byte in PROMPT.encode()], 12)


def test_quest(run: Run, plain: list[int]) -> None:
    assert run("quest", prompt=PROMPT, max_tokens=12, pages=100)["tokens"] == plain
    few = run("quest", prompt=PROMPT, max_tokens=12, pages=1)["tokens"]
    assert len(few) == 12 and few != plain


def test_heavy_hitters(run: Run, plain: list[int]) -> None:
    whole = run("heavy_hitters", prompt=PROMPT, max_tokens=12, budget=100)
    assert whole == {"tokens": plain, "kept": list(range(len(PROMPT) + 11))}
    tight = run("heavy_hitters", prompt=PROMPT, max_tokens=12, budget=8, recent=4)
    assert len(tight["kept"]) == 8 and tight["kept"][-4:] == whole["kept"][-4:] and tight["tokens"] != plain


def test_tova(run: Run, plain: list[int]) -> None:
    whole = run("tova", prompt=PROMPT, max_tokens=12, budget=100)
    assert whole == {"tokens": plain, "kept": list(range(len(PROMPT) + 11))}
    tight = run("tova", prompt=PROMPT, max_tokens=12, budget=8)
    assert len(tight["kept"]) == 8 and tight["tokens"] != plain


def test_snapkv(run: Run, plain: list[int]) -> None:
    whole = run("snapkv", prompt=PROMPT, max_tokens=12, budget=100)
    assert whole == {"tokens": plain, "kept": list(range(len(PROMPT) - 8)), "of": len(PROMPT) - 8}
    tight = run("snapkv", prompt=PROMPT, max_tokens=12, budget=3, pool=1)
    assert len(tight["kept"]) == 3 and tight["tokens"][0] == plain[0] and tight["tokens"] != plain
