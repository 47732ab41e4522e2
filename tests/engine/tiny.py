"""A tiny random llama, programs written by hand, and a listener: what the engine's tests share."""

from __future__ import annotations

import dataclasses
import queue
import tempfile
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pie_xla.engine.api import EngineOptions, LoadedModel, PassError
from pie_xla.engine.engine import Engine
from pie_xla.eta.types import ChannelUse, DType, Read, TensorType
from pie_xla.kernels.ops import Kernel, ops_for
from poem.lower import LoweredModel, lower
from poem.spec import Batch, StateKind

V = 97
CONFIG = {
    "model_type": "llama",
    "vocab_size": V,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
}
OPTIONS = EngineOptions(
    state_bytes=1 << 20,
    decode_rows=(1, 2, 4, 8),
    prefill=((1, 16), (4, 8)),
    word_count=1 << 12,
    fuse_after=0,
    gather_seconds=0.0,
)


def load(config: dict[str, Any] = CONFIG, page_size: int = 4, scale: float = 0.3) -> LoadedModel:
    """Weights from a seed; large enough that logits differ clearly."""
    lowered = lower(config, ops=ops_for(Kernel.XLA), page_size=page_size)
    rng = np.random.default_rng(0)
    stored = {
        name: jnp.asarray(rng.standard_normal(leaf.shape).astype(np.float32) * scale + (1.0 if "norm" in name else 0.0))
        for name, leaf in lowered.stored.items()
    }
    weights: Future[Any] = Future()
    weights.set_result(lowered.pack(stored))
    return LoadedModel("tiny", lowered, weights, "tiny")


WIDTH = 96  # tokens of the reference's one launch


_BARE: dict[int, Any] = {}


def _bare_step(lowered: LoweredModel) -> Any:
    if id(lowered) not in _BARE:
        _BARE[id(lowered)] = jax.jit(lambda p, s, b: lowered.step(p, s, b)[1]["logits"][0])
    return _BARE[id(lowered)]


def reference_greedy(lowered: LoweredModel, params: Any, prompt: list[int], n: int) -> list[int]:
    """Greedy decoding with the bare step over the whole text at once: no engine, no cache, no batch."""
    size = lowered.facts.page_size
    pages = WIDTH // size
    state = {
        g.name: {k: jnp.zeros(leaf.shape, leaf.struct.dtype) for k, leaf in g.arrays(pages + 1).items()}
        for g in lowered.groups
    }
    table = {
        g.name: jnp.arange(1, pages + 1, dtype=jnp.int32)[None] for g in lowered.groups if g.kind is StateKind.PAGED
    }
    tokens = list(prompt)
    for _ in range(n):
        count = len(tokens)
        block = np.zeros((1, WIDTH), np.int32)
        block[0, :count] = tokens
        positions = np.where(np.arange(WIDTH) < count, np.arange(WIDTH), -1)[None]
        one = lambda x: jnp.asarray([x], jnp.int32)  # noqa: E731
        batch = Batch(
            tokens=jnp.asarray(block), positions=jnp.asarray(positions, jnp.int32), starts=one(0), counts=one(count), pages=table,
            slots_in=one(0), slots_out=one(1), readout=one(count - 1),
        )  # fmt: skip
        tokens.append(int(jnp.argmax(_bare_step(lowered)(params, state, batch))))
    return tokens[len(prompt) :]


@dataclass
class Greedy:
    """argmax of row 0's logits; with `feedback`, also put into channel 0."""

    feedback: bool = False
    key: str = "greedy"
    rows: int = 1
    row: int = 0
    vocab: int = V
    scalar_result: bool = True
    cost: int = V
    memory: int = 4 * V
    source: str = "test.py:1"
    stages: None = None

    def __post_init__(self) -> None:
        self.key += f"{self.rows}{self.row}{self.feedback}"
        self.reads = (Read(self.row, "logits", (self.vocab,), DType.F32),)
        self.params: tuple[TensorType, ...] = ()
        self.results = (TensorType(DType.I32, ()),)
        self.channels = (
            (ChannelUse(TensorType(DType.I32, ()), take=False, read=False, put=True),) if self.feedback else ()
        )

    def apply(self, reads: Any, params: Any, cells: Any, key: Any, ordinal: Any) -> Any:
        token = jnp.argmax(reads[0]).astype(jnp.int32)
        return [token], [token] if self.feedback else []


@dataclass
class Scaled:
    """logits[token] * param, and the pass's random words: a program with a parameter and randomness in it."""

    key: str = "scaled"

    def __post_init__(self) -> None:
        self.rows, self.scalar_result, self.cost, self.memory, self.source = 1, False, V, 4 * V, "test.py:2"
        self.stages = None
        self.reads = (Read(0, "logits", (V,), DType.F32),)
        self.params = (TensorType(DType.F32, ()), TensorType(DType.I32, ()))
        self.results = (TensorType(DType.F32, ()), TensorType(DType.U32, (3,)))
        self.channels: tuple[ChannelUse, ...] = ()

    def apply(self, reads: Any, params: Any, cells: Any, key: Any, ordinal: Any) -> Any:
        return [reads[0][params[1]] * params[0], jnp.stack([key[0], key[1], ordinal])], []


class Listener:
    """Collects events; `wait(ticket)` returns values or raises the PassError."""

    def __init__(self) -> None:
        self._events: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
        self._seen: dict[int, Any] = {}

    def __call__(self, ticket: int, outcome: Any) -> None:
        self._events.put((ticket, outcome))

    def wait(self, ticket: int, timeout: float = 60.0) -> Any:
        while ticket not in self._seen:
            key, outcome = self._events.get(timeout=timeout)
            self._seen[key] = outcome
        outcome = self._seen[ticket]
        if isinstance(outcome, PassError):
            raise outcome
        return outcome


_STORE = tempfile.TemporaryDirectory(prefix="pie-xla-tests-")  # one run's engines share executables


def engine(model: LoadedModel, options: EngineOptions = OPTIONS, name: str = "tiny") -> Engine:
    made = Engine(dataclasses.replace(model, key=name), options, store=Path(_STORE.name))
    made.start(warm=((1, 1), (1, 16)))
    return made
