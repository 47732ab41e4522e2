"""What the process layer says to the engine, and what it hears back: plain frozen data, no behaviour."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pie_xla.errors import PieError
from pie_xla.eta.types import Program


class PassError(PieError):
    """A pass that ran and failed, or was dropped: its cause, and where the author submitted it.

    The pass committed nothing: its working sets are as before, and whatever depended on it fails with the same cause.
    """

    def __init__(self, cause: str, line: str | None = None) -> None:
        super().__init__(cause if line is None else f"{cause} (pass submitted at {line})")
        self.cause = cause
        self.line = line


class Geometry(enum.Enum):
    """How a pass's tokens meet the state."""

    FOLD = "fold"  # appended, and final
    BUFFER = "buffer"  # appended, but tentative: a commit keeps the first of them
    READ = "read"  # attends and leaves nothing behind


@dataclass(frozen=True)
class FromTicket:
    """Tokens taken from a result of an earlier pass, on the device: result `index` of `ticket` (i32 or u32, n elements = n tokens)."""

    ticket: int
    index: int = 0


@dataclass(frozen=True)
class FromChannel:
    """Tokens taken from a channel on the device: the front cell is consumed (i32 or u32, n elements = n tokens)."""

    channel: int


@dataclass(frozen=True, eq=False)
class Sight:
    """What a row's new tokens see of the set and of one another, besides that a token never sees a later one.

    Attributes:
        window: the last positions that are seen, the token's own included; None: all.
        sinks: positions below it are seen whatever the window.
        places: per token, its position after the set's length (position - len(set)); None: 0, 1, 2, ...
        mask: bool[T, len + T], True where token t sees position p of the set, then token p - len; None: no mask. Causal all the same.
        tree: per token, the index of the new token it follows, or -1 for the set's end; it sees the set, itself and its ancestors.
        spans: half-open spans of positions of the set that are seen; None: all.
    """

    window: int | None = None
    sinks: int = 0
    places: tuple[int, ...] | None = None
    mask: np.ndarray | None = None
    tree: tuple[int, ...] | None = None
    spans: tuple[tuple[int, int], ...] | None = None


@dataclass(frozen=True)
class Row:
    """One row of a pass: its working set (None: a state-less model), its new tokens, and what they see (None: all before them)."""

    set: int | None
    tokens: tuple[int, ...] | FromTicket | FromChannel
    sight: Sight | None = None


@dataclass(frozen=True)
class PassRequest:
    """A forward pass to run once.

    Attributes:
        rows: at least one; each set at most once.
        readout: per row, the indices within the row's new tokens whose outputs are wanted; None means the last token of each row.
        program: the epilogue, traced for `len(rows)` rows; None runs the model and returns an empty tuple.
        params: one array per `program.params`, with its dtype (bool as bool) and shape; or a future of one, which keeps the pass waiting
            and nobody else.
        channels: one channel handle per `program.channels`.
        line: the author's `file:line`, for errors.
        model: its name; None is the engine's default. All sets of the pass are of this model.
    """

    rows: tuple[Row, ...]
    geometry: Geometry = Geometry.FOLD
    readout: tuple[tuple[int, ...], ...] | None = None
    program: Program | None = None
    params: tuple[np.ndarray | Future[np.ndarray], ...] = ()
    channels: tuple[int, ...] = ()
    line: str | None = None
    model: str | None = None


Event = Callable[[int, "tuple[np.ndarray, ...] | PassError"], None]


@dataclass(frozen=True)
class Quota:
    """What one client may hold at once; beyond it a call is refused by name."""

    sets: int = 4096
    pipelines: int = 1024
    channels: int = 1024
    queued_passes: int = 4096
    device_words: int = 1 << 19


@dataclass(frozen=True)
class EngineOptions:
    """Sizes that decide executables and memory. Every padded size comes from here through `Buckets`.

    Attributes:
        state_bytes: bytes for the state pools of all models together; None sizes them from free memory.
        max_context: longest sequence served, in tokens; None is the model's own limit.
        decode_rows: row buckets of one-token launches.
        prefill: (rows, tokens per row) buckets of longer launches.
        word_count: u32 words of the device register file (outputs and channel cells).
        depth: plans in flight at once; 2 dispatches step N+1 before step N is read.
        prefix_cache: whether full pages of known tokens are shared with whoever comes with the same tokens (not in strict mode).
        published: most named prefixes kept at once; those not opened for longest go first.
        memory_seconds: how long a pass waits for state memory that other clients hold before it is refused.
        gather_seconds: longest wait of an idle device for processes that were just answered.
        strict: one decode and one prefill shape only, so that results are bit-equal alone and batched.
        fuse_after: launches filled by one program alone before its fused step is compiled; 0 never fuses.
        max_program_cost: largest static cost (element operations per pass) that is admitted.
        max_program_bytes: largest temporary memory of a program executable that is admitted.
        max_programs: programs per model whose executables stay in memory without a pass; those not asked for longest go first.
        max_tapped: steps with layer stages per model that stay in memory; those launched longest ago go first, and come back from disk.
        store_bytes: most bytes of serialized executables on disk; those not used for longest go first. None: no limit.
    """

    state_bytes: int | None = None
    max_context: int | None = None
    decode_rows: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    prefill: tuple[tuple[int, int], ...] = ((1, 16), (1, 64), (1, 256), (8, 16), (16, 16))
    word_count: int = 1 << 21
    depth: int = 2
    memory_seconds: float = 30.0
    prefix_cache: bool = True
    published: int = 256
    gather_seconds: float = 0.006
    strict: bool = False
    fuse_after: int = 256
    max_program_cost: int = 20_000_000_000
    max_program_bytes: int = 1 << 30
    max_programs: int = 256
    max_tapped: int = 6  # about 40 MB each, of a model with 30 layers
    store_bytes: int | None = None
    quota: Quota = field(default_factory=Quota)


@dataclass(frozen=True)
class Recipe:
    """How to lower the model again without its weights, for a compile process: the arguments of `poem.lower.lower` on one device.

    `library`: the file of the CPU kernels, where the kernel is theirs.
    """

    config: Mapping[str, Any]
    kernel: str
    dtype: str
    page_size: int
    loop: str
    library: str = ""


@dataclass(frozen=True)
class LoadedModel:
    """A lowered model with its weights on the device, or on their way there.

    Attributes:
        name: as users call it.
        lowered: `poem.lower.LoweredModel`.
        weights: gives dotted path -> array, exactly `lowered.params`. Executables are loaded while the weights still are.
        key: digest of everything that decides the step's executable (config, poem source, dtype, kernel, mesh); keys the executable store.
        recipe: lets a compile process build fused steps; None (a mesh, a model from elsewhere) leaves programs unfused.
        state_bytes: bytes for its own state pools; None is its share of the engine's.
    """

    name: str
    lowered: Any
    weights: Future[Any]
    key: str
    recipe: Recipe | None = None
    state_bytes: int | None = None

    @property
    def params(self) -> Mapping[str, Any]:
        """The weights, waited for."""
        return self.weights.result()
