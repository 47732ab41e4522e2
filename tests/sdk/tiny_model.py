"""Programs on a real engine with a tiny random llama of bytes: what the fake engine does not have (masks, eviction, memory)."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent / "process"), str(HERE.parent / "engine")]

import tiny  # noqa: E402
from fake_engine import Bytes  # noqa: E402
from test_grammar import BYTES, SPELLED  # noqa: E402

from pie_xla.engine.engine import Engine  # noqa: E402
from pie_xla.eta.program import EtaProgram  # noqa: E402
from pie_xla.launch import Event, Launch, Sent  # noqa: E402
from pie_xla.process.grammar import Vocabulary, Workers  # noqa: E402
from pie_xla.process.grammar_calls import GrammarCalls  # noqa: E402
from pie_xla.process.interfaces import ModelFacts  # noqa: E402
from pie_xla.process.process import ProcessManager  # noqa: E402

V, D, CONTEXT, PAGE = 300, 32, 2048, 4
FACTS = ModelFacts(
    name="tiny",
    vocab_size=V,
    max_context=CONTEXT,
    page_size=PAGE,
    outputs={"logits": ((V,), "f32"), "hidden": ((D,), "f32")},
    stop_tokens=(2,),
    prefix=(1,),
)


class Words(Bytes):
    """Bytes, and the few words of the grammars' tokenizer."""

    def decode(self, ids: Any, skip_specials: bool) -> str:
        return b"".join(BYTES.get(token, b"") for token in ids).decode("utf-8", "replace")


class Tiny:
    """Runs programs; `text` is what the last one sent, and `on_sent` is called while it sends."""

    def __init__(self, manager: ProcessManager, engine: Engine) -> None:
        self.manager, self.engine = manager, engine
        self.text = ""
        self.on_sent: Callable[[str], None] = lambda text: None

    def __call__(self, source: str, /, **value: Any) -> Any:
        """The result of a program's text."""
        self.text = ""
        launch = Launch(textwrap.dedent(source), "main.py", value, native=True, seed=11)
        return self.manager.launch(launch, self._hear).done.result(120)

    def _hear(self, event: Event) -> None:
        if isinstance(event, Sent):
            self.text += event.text
            self.on_sent(event.text)


@contextmanager
def open_tiny(transport: Any = None) -> Iterator[Tiny]:
    """A running engine with the model; programs are recorded as in the sandbox if a text transport is given."""
    from pie_xla.process.native import NativeRunner

    model = tiny.load({**tiny.CONFIG, "vocab_size": V, "max_position_embeddings": CONTEXT}, PAGE)
    engine = Engine(
        replace(model, key="tiny-bytes"), replace(tiny.OPTIONS, word_count=1 << 17), store=Path(tiny._STORE.name)
    )
    engine.start(warm=((1, 1), (1, 16)))
    workers = Workers()
    room = partial(GrammarCalls, vocabularies={"tiny": Vocabulary(lambda: SPELLED, V, (2,))}, workers=workers)
    manager = ProcessManager(engine, FACTS, Words(), EtaProgram.from_json, rooms=(room,))
    if transport is not None:
        manager._native = NativeRunner(transport)
    try:
        yield Tiny(manager, engine)
    finally:
        manager.close()
        workers.close()
        engine.close()
