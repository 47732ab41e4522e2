"""Several models of the store in one runtime: opened together, refused by name, and each answers as alone."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "hub"))

from tiny_checkpoint import CONFIG, tensors, write_directory

from pie_xla import config, machine, runtime
from pie_xla.cli.arguments import parse_models
from pie_xla.cli.doctor import Verdict, store
from pie_xla.config import Config
from pie_xla.errors import PieError, UsageError
from pie_xla.hub.importing import import_model
from pie_xla.hub.store import Store
from pie_xla.launch import Launch
from pie_xla.timings import Timings

GREEDY = """
from inferlet import chat, model
from inferlet.eta import ForwardPass, Pipeline, StateGeometry, WorkingSet, intrinsics, reduce_argmax


async def main(input):
    said, pipe = {}, Pipeline()
    for name in model.names():
        fwd = ForwardPass(model=name)
        fwd.state([WorkingSet(model=name)], StateGeometry.folding())
        fwd.embed(chat.prefix(model=name) + model.encode("hello", model=name))
        fwd.epilogue(lambda: reduce_argmax(intrinsics.output(0, "logits")))
        outs = []
        for _ in range(12):
            outs.append(pipe.submit(fwd))
            fwd.embed(outs[-1])
        said[name] = [await out for out in outs]
    return said
"""


class Notes:
    """A `Progress` that keeps what is noted."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)

    def task(self, name: str, total: int | None = None) -> Any:
        from pie_xla.progress import SILENT

        return SILENT.task(name, total or 0)


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """Settings whose store holds the models one (2 layers), two (1 layer) and three (as one, other weights)."""
    home = tmp_path_factory.mktemp("home")
    text = '[engine]\nkv_memory = "1MiB"\nmax_rows = 2\nmax_tokens = 32\n[model]\ndefault = "one"\n'
    found = config.parse(text, config.Environment.read({"PIE_XLA_HOME": str(home)}))
    for seed, (name, layers) in enumerate({"one": 2, "two": 1, "three": 2}.items()):
        folder = home / f"from-{name}"
        write_directory(folder, tensors(seed, layers), {**CONFIG, "num_hidden_layers": layers})
        import_model(str(folder), Store(found.store_dir), name=name)
    return found


def tokens(settings: Config, model: str | None = None, **others: str) -> tuple[dict[str, list[int]], list[str]]:
    notes = Notes()
    opened = runtime.open_runtime(settings, model, others=others, native=True, progress=notes, timings=Timings())  # type: ignore[arg-type]
    with opened as made:
        found = made.launch(Launch(GREEDY, "main.py", {}, native=True, seed=1), lambda event: None).done.result(120)  # type: ignore[attr-defined]
        assert made.model_name == (model or "one")
        return found, notes.notes


def test_each_model_of_a_runtime_answers_as_alone(settings: Config) -> None:
    alone = {name: tokens(settings, name)[0][name] for name in ("one", "two", "three")}
    assert len({tuple(said) for said in alone.values()}) == 3
    together, notes = tokens(settings, draft="two", other="three")
    assert together == {"one": alone["one"], "draft": alone["two"], "other": alone["three"]}
    said = [note.partition(": state: ")[0] for note in notes]
    assert said == ["one", "draft", "other"]
    counts = [int(note.rpartition(", ")[2].split()[0].replace(",", "")) for note in notes]
    assert max(counts) - min(counts) <= 32  # the same sequences fit into each


@pytest.mark.parametrize("native", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["native", "sandboxed"])
def test_speculative_decoding_says_what_the_target_says(settings: Config, native: bool) -> None:
    """The example, with a draft that is always right (the same weights), and one that never is."""
    source = (Path(__file__).parents[2] / "examples" / "speculative_decoding" / "main.py").read_text("utf-8")
    others = {"same": "one", "strange": "three"}
    opened = runtime.open_runtime(settings, others=others, native=native, progress=Notes(), timings=Timings())  # type: ignore[arg-type]
    with opened as made:

        def run(text: str, **value: Any) -> Any:
            launch = Launch(text, "main.py", value, native=native, seed=1)
            return made.launch(launch, lambda event: None).done.result(120)  # type: ignore[attr-defined]

        greedy = run(GREEDY)["one"]
        stop = greedy.index(2) + 1 if 2 in greedy else 12
        ask = {"prompt": "hello", "max_tokens": stop}
        same = run(source, draft="same", **ask)
        assert same == {"tokens": greedy[:stop], "rounds": -(-(stop - 1) // 4)}
        strange = run(source, draft="strange", **ask)
        assert strange["tokens"] == greedy[:stop] and strange["rounds"] > same["rounds"]
        made.engine.settle()
        stats = made.engine.stats()
        assert all(used == 0 for _, used, _ in stats["memory"].values()) and stats["words used"] == 0


def test_settings_name_models_and_the_command_line_wins(settings: Config) -> None:
    text = '[model]\ndefault = "one"\n[models]\ndraft = {model = "two", kv_memory = "64KiB"}\nthree = "three"\n'
    named = config.parse(text, settings.environment)
    found = runtime.wanted_models(named, None, {"draft": "three"})
    assert [(one.name, one.entry.name, one.state_bytes) for one in found] == [
        ("one", "one", None),
        ("draft", "three", None),
        ("three", "three", None),
    ]
    assert runtime.wanted_models(named, "two", {})[1].state_bytes == 64 << 10
    with pytest.raises(UsageError, match="'three' is the default model's name"):
        runtime.wanted_models(named, "three", {})
    with pytest.raises(UsageError, match="four"):
        runtime.wanted_models(named, None, {"draft": "four"})


def test_doctor_misses_a_model_that_the_settings_name(settings: Config) -> None:
    text = '[model]\ndefault = "one"\n[models]\ndraft = "two"\nexpert = "four"\n'
    found = list(store(config.parse(text, settings.environment)))
    assert [finding.detail for finding in found if finding.verdict is Verdict.WARN] == [
        f"the model four, which [models] calls expert, is not in {settings.store_dir}"
    ]


def test_weights_that_do_not_fit_together_are_refused_before_any_is_read(
    settings: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = runtime.wanted_models(settings, None, {"draft": "three"})
    each = wanted[0].entry.manifest.total_bytes
    monkeypatch.setattr(machine, "memory", lambda: (4 * each, 2 * each - 1))
    runtime.check_weights_fit(wanted[:1], "cpu")
    with pytest.raises(PieError, match=r"the weights of 2 models \(one: 0 MiB, draft: 0 MiB\) take 0 MiB together"):
        runtime.check_weights_fit(wanted, "cpu")
    monkeypatch.setattr(machine, "memory", lambda: (4 * each, 2 * each))
    runtime.check_weights_fit(wanted, "cpu")


def test_words_that_name_models() -> None:
    assert parse_models(("draft=small", "large")) == {"draft": "small", "large": "large"}
    for word in ("=small", "draft=", "a b=c"):
        with pytest.raises(UsageError, match="is not NAME=MODEL"):
            parse_models((word,))
    with pytest.raises(UsageError, match="--with draft is given twice"):
        parse_models(("draft=a", "draft=b"))
