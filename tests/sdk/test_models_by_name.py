"""Programs that run several models: each pass, set and text belongs to one of them."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from fake_engine import FACTS, Bytes, FakeEngine, logits_of

from pie_xla.errors import PieError
from pie_xla.eta.program import EtaProgram
from pie_xla.launch import Launch
from pie_xla.process.interfaces import HostModel
from pie_xla.process.native import NativeRunner
from pie_xla.process.process import ProcessManager

SMALL = 200
Run = Callable[..., Any]
HEAD = """
from inferlet import UsageError, chat, model
from inferlet.eta import *
FOLD = StateGeometry.folding()
"""


class Upper(Bytes):
    """Another tokenizer: bytes of the upper-case text, from 1."""

    def encode(self, text: str, specials: bool) -> list[int]:
        return [byte + 1 for byte in text.upper().encode()]

    def decode(self, ids: Any, skip_specials: bool) -> str:
        return bytes(token - 1 for token in ids).decode("utf-8", "replace")


DRAFT = HostModel(
    replace(
        FACTS,
        name="draft",
        vocab_size=SMALL,
        max_context=12,
        outputs={"logits": ((SMALL,), "f32")},
        prefix=(),
        stop_tokens=(5,),
    ),
    Upper(),
)


@pytest.fixture(params=["recorded", "native"])
def run(request: pytest.FixtureRequest, engine: FakeEngine, text_transport: Any) -> Iterator[Run]:
    manager = ProcessManager(engine, FACTS, Bytes(), EtaProgram.from_json, others=[DRAFT])
    if request.param == "recorded":
        manager._native = NativeRunner(text_transport)

    def run(body: str) -> Any:
        source = HEAD + "async def main(input):\n" + textwrap.indent(textwrap.dedent(body), "    ")
        return manager.launch(Launch(source, "main.py", {}, native=True, seed=11), lambda event: None).done.result(60)

    yield run
    manager.close()


def test_texts_and_facts_are_of_the_model_that_is_named(run: Run) -> None:
    found = run("""
        small = model.get("draft")
        stream = model.TextStream(model="draft")
        said = [{"role": "user", "content": "hi"}]
        return [
            model.names(), model.name(), small.name, model.encode("a"), small.encode("a"), model.encode("a", model="draft"),
            small.decode([66]), model.decode(68), small.vocab_size(), model.vocab_size(), small.context_length(),
            small.stop_tokens(), list(small.outputs()), chat.prefix(), chat.prefix(model="draft"),
            chat.stop_tokens(model="draft"), chat.render(said, model="draft") == small.encode("<user>hi<assistant>"),
            chat.render(said) == model.encode("<user>hi<assistant>"), stream.push(66) + stream.finish(),
            model.get("fake").encode("a"),
        ]
    """)
    small, large = [66], [100]
    assert found[:6] == [["fake", "draft"], "fake", "draft", large, small, small]
    assert found[6:12] == ["A", "A", SMALL, 300, 12, [5]]
    assert found[12:16] == [["logits"], [1], [], [5]]
    assert found[16:] == [True, True, "A", large]


def test_a_pass_runs_the_model_that_it_names(run: Run, engine: FakeEngine) -> None:
    """The same epilogue is recorded for each width, and an Output of one model is a token of the other."""
    found = run("""
        logits = lambda: intrinsics.output(0, "logits")
        width = lambda: (reduce_argmax(logits()), reduce_sum(logits()) * 0.0 + float(intrinsics.vocab()))
        pipe, large, small = Pipeline(), WorkingSet(), WorkingSet(model="draft")
        outs = []
        token = [7, 8]
        for name, ws in (("draft", small), ("fake", large), ("draft", small)):
            fwd = ForwardPass(model=name)
            fwd.embed(token)
            fwd.state([ws], FOLD)
            token, wide = fwd.epilogue(width)
            pipe.submit(fwd)
            outs.append([await token, await wide])
        return [outs, small.fork().model, large.model, len(small), len(large)]
    """)
    first = int(logits_of([7, 8])[:SMALL].argmax())
    second = int(logits_of([first]).argmax())
    third = int(logits_of([7, 8, second])[:SMALL].argmax())
    assert found == [[[first, 200.0], [second, 300.0], [third, 200.0]], "draft", "fake", 3, 1]
    assert [request.model for request in engine.clients[0].submits] == ["draft", None, "draft"]
    assert engine.clients[0].models == {"draft": 1, None: 1}  # the fork is made from the set


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("ForwardPass(model='drat')", "there is no model 'drat' here; there is fake, draft"),
        ("WorkingSet(model=3)", "there is no model 3 here"),
        ("model.get('x')", "there is no model 'x' here"),
        ("model.encode('a', model='x')", "there is no model 'x' here"),
        ("chat.render([{'role': 'user', 'content': ''}], model='x')", "there is no model 'x' here"),
        ("ForwardPass(model='draft').embed([250])", "row 0, token 0 is 250: the vocabulary of draft is 0 to 199"),
        ("model.get('draft').decode([250])", "entry 0 is 250, not a token id \\(0 to 199\\)"),
        (
            "Pipeline().submit(ForwardPass(model='draft').embed([1]).state([WorkingSet()], FOLD))",
            "row 0 meets a set of the model fake, but the pass runs draft",
        ),
        (
            "Pipeline().submit(ForwardPass(model='draft').embed([1] * 13).state([WorkingSet(model='draft')], FOLD))",
            "the context of draft is 12",
        ),
    ],
)
def test_what_makes_no_sense_is_refused_at_its_line(run: Run, body: str, words: str) -> None:
    with pytest.raises(PieError, match=words) as failed:
        run(body)
    assert 'File "main.py", line 6' in str(failed.value)
