"""A native epilogue: any traceable JAX code, as a program.

The author's function is traced once. Numbers given to eta functions, channel cells and arrays that the function closes
over are inputs of the program, never constants in its code, so changing a value never recompiles. Python numbers in
plain `jnp` code are constants, as under `jax.jit`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from hashlib import sha256
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

from pie_xla.eta import jaxprs
from pie_xla.eta.fingerprint import Fingerprint, Unknown
from pie_xla.eta.native_recorder import DTYPE_NAMES, NativeRecorder
from pie_xla.eta.program import Limits
from pie_xla.eta.types import ChannelUse, DType, EtaError, Read, TensorType

Array = Any
_struct: Any = jax.ShapeDtypeStruct


class Origin(Enum):
    """Where a constant of the traced function comes from."""

    CAPTURED = "captured"  # an array that the function closes over: a parameter
    LITERAL = "literal"  # a number given to eta: a parameter, traced as [1, ...]
    CELL = "cell"  # a channel's cell, traced as [1, ...]
    BAKED = "baked"  # an array whose dtype the language lacks: part of the program


@dataclass(frozen=True)
class Const:
    """One constant of the jaxpr and what stands for it at run time."""

    origin: Origin
    index: int
    baked: Any = None

    def value(self, params: Sequence[Array], cells: Sequence[Array]) -> Array:
        match self.origin:
            case Origin.CAPTURED:
                return params[self.index]
            case Origin.LITERAL:
                return params[self.index][None]
            case Origin.CELL:
                return cells[self.index][None]
            case Origin.BAKED:
                return self.baked

    @property
    def identity(self) -> str:
        if self.origin is not Origin.BAKED:
            return f"{self.origin.value}{self.index}"
        array = np.asarray(self.baked)
        return f"{array.dtype}{array.shape}{sha256(array.tobytes()).hexdigest()}"


@dataclass(frozen=True, eq=False)
class NativeProgram:
    """A traced native epilogue; implements `types.Program`."""

    key: str
    rows: int
    reads: tuple[Read, ...]
    params: tuple[TensorType, ...]
    channels: tuple[ChannelUse, ...]
    results: tuple[TensorType, ...]
    scalar_result: bool
    cost: int
    memory: int
    source: str
    stages: None
    _jaxpr: Any  # constvars as in _consts; invars are every output of every row, key, ordinal
    _consts: tuple[Const, ...]
    _inputs: tuple[tuple[int, str, TensorType], ...]

    def apply(
        self,
        reads: Sequence[Array],
        params: Sequence[Array],
        cells: Sequence[Array],
        key: Array,
        ordinal: Array,
    ) -> tuple[list[Array], list[Array]]:
        """See `types.Program.apply`."""
        consts = [const.value(params, cells) for const in self._consts]
        given = {(read.row, read.name): value for read, value in zip(self.reads, reads, strict=True)}
        # Outputs that the function never asked for are dead in the jaxpr: any value of the type will do.
        inputs = [given[row, name] if (row, name) in given else jnp.zeros(t.shape, t.dtype.numpy)
                  for row, name, t in self._inputs]  # fmt: skip
        out = jax.core.eval_jaxpr(self._jaxpr, consts, *inputs, key, ordinal)
        return out[: len(self.results)], out[len(self.results) :]

    def export(self, passes: int) -> bytes:
        """The program over `passes` passes as a serialized `jax.export`, for another process.

        Its call takes lists with a leading axis of `passes`: reads, params, cells, keys u32[P, 2], ordinals u32[P].
        """
        try:
            import flatbuffers  # noqa: F401 -- jax.export serializes with it and does not require it
        except ImportError:
            raise EtaError("a native program cannot be serialized: flatbuffers is not installed") from None

        def batch(kind: TensorType) -> Any:
            return _struct((passes, *kind.shape), kind.dtype.numpy)

        arguments = (
            [batch(read.type) for read in self.reads],
            [batch(kind) for kind in self.params],
            [batch(use.type) for use in self.channels],
            _struct((passes, 2), jnp.uint32),
            _struct((passes,), jnp.uint32),
        )
        return bytes(jax.export.export(jax.jit(jax.vmap(self.apply)))(*arguments).serialize())


@dataclass(frozen=True)
class NativeTrace:
    """A native program and what each submit sends beside it: values, and names of what the host fills in."""

    program: NativeProgram
    params: tuple[np.ndarray | dict[str, int], ...]
    channels: tuple[Any, ...]  # the author's channel objects, in order of first use


@dataclass(frozen=True)
class _Known:
    """A trace that may be used again: its channels are places in the fingerprint's list."""

    made: NativeTrace
    places: tuple[int, ...]
    alive: tuple[Any, ...]


_known: OrderedDict[Any, _Known] = OrderedDict()
_channel_types: set[type] = set()
_KEPT = 256


def trace(
    run: Callable[[NativeRecorder], Any],
    outputs: dict[str, tuple[Sequence[int], str]],
    rows: Sequence[int | None],
    vocab_size: int = 0,
    page_size: int = 0,
    source: str = "",
    limits: Limits | None = None,
) -> NativeTrace:
    """Trace an epilogue, or find the trace of an equal one.

    Args:
        run: calls the author's function while the recorder it is given is the current one; returns its result.
        outputs: name -> (shape of one position, dtype): the model's outputs.
        rows: per row of the pass, the number of readout positions, or None for the last token alone.
        source: "main.py:14", for errors.
    Raises:
        EtaError: effects, callbacks, a broken rule, a result whose dtype the language lacks.
    """
    try:
        found = Fingerprint(run, _channel_types)
    except Unknown:
        return _trace(run, outputs, rows, vocab_size, page_size, source, limits)
    kinds = tuple((name, tuple(shape), dtype) for name, (shape, dtype) in outputs.items())
    key = (found.key, kinds, tuple(rows), vocab_size, page_size, source, limits)
    known = _known.get(key)
    if known is not None:
        _known.move_to_end(key)
        return replace(known.made, channels=tuple(found.channels[place] for place in known.places))
    made = _trace(run, outputs, rows, vocab_size, page_size, source, limits)
    met = {id(channel): place for place, channel in enumerate(found.channels)}
    if all(id(channel) in met for channel in made.channels):
        places = tuple(met[id(channel)] for channel in made.channels)
        _known[key] = _Known(replace(made, channels=()), places, tuple(found.alive))
        while len(_known) > _KEPT:
            _known.popitem(last=False)
    return made


def _trace(
    run: Callable[[NativeRecorder], Any],
    outputs: dict[str, tuple[Sequence[int], str]],
    rows: Sequence[int | None],
    vocab_size: int,
    page_size: int,
    source: str,
    limits: Limits | None,
) -> NativeTrace:
    inputs = []
    for row, count in enumerate(rows):
        for name, (shape, dtype) in outputs.items():
            full = tuple(shape) if count is None else (count, *shape)
            inputs.append((row, name, TensorType(DType(dtype), full)))
    recorder = NativeRecorder([(row, name) for row, name, _ in inputs], len(rows), vocab_size, page_size)
    shape_of_result: list[bool] = []

    def whole(values: list[Array], key: Array, ordinal: Array) -> tuple[list[Array], list[Array]]:
        recorder.begin(values, key, ordinal)
        result = run(recorder)
        if hasattr(result, "__await__"):
            result.close()
            raise EtaError("an epilogue is a plain function: write def, not async def")
        single = result is not None and not isinstance(result, tuple | list)
        shape_of_result.append(single)
        results = [recorder.value(x, "a result") for x in ((result,) if single else tuple(result or ()))]
        return results, recorder.puts()

    arguments = [_struct(kind.shape, kind.dtype.numpy) for _, _, kind in inputs]
    words = _struct((2,), jnp.uint32), _struct((), jnp.uint32)
    closed = jax.make_jaxpr(whole)(arguments, *words)
    jaxprs.refuse_effects(closed.jaxpr, source)
    consts, params, late = _sort(closed.consts, recorder)
    count = len(closed.jaxpr.outvars) - sum("put" in use for use in recorder.used)
    results = tuple(_tensor_type(var.aval) for var in closed.jaxpr.outvars[:count])
    reads = tuple(Read(row, name, kind.shape, kind.dtype) for row, name, kind in inputs if (row, name) in recorder.seen)
    _channel_types.update(map(type, recorder.channels))
    uses = tuple(
        ChannelUse(TensorType(DType(str(c.dtype)), tuple(c.shape)), "take" in u, "read" in u, "put" in u)
        for c, u in zip(recorder.channels, recorder.used, strict=True)
    )
    cost = jaxprs.cost(closed.jaxpr)
    if limits is not None and cost > limits.cost:
        raise EtaError(f"the epilogue at {source} costs {cost} element operations a pass, more than {limits.cost}")
    identity = [jaxprs.text(closed.jaxpr), str(reads), str(uses), str(len(rows)), str(shape_of_result[-1])]
    identity += [const.identity for const in consts]
    program = NativeProgram(
        key="native-" + sha256("\n".join(identity).encode()).hexdigest(),
        rows=len(rows),
        reads=reads,
        params=tuple(TensorType(DType(DTYPE_NAMES[value.dtype]), value.shape) for value in params),
        channels=uses,
        results=results,
        scalar_result=shape_of_result[-1],
        cost=cost,
        memory=jaxprs.peak(closed.jaxpr),
        source=source,
        stages=None,
        _jaxpr=closed.jaxpr,
        _consts=consts,
        _inputs=tuple(inputs),
    )
    sent = tuple(late.get(i, value) for i, value in enumerate(params))
    return NativeTrace(program, sent, tuple(recorder.channels))


def _sort(
    found: Sequence[Any], recorder: NativeRecorder
) -> tuple[tuple[Const, ...], tuple[np.ndarray, ...], dict[int, dict[str, int]]]:
    """The constants, the parameters, and which of these the host fills in."""
    late: dict[int, dict[str, int]] = {}
    consts: list[Const] = []
    params: list[np.ndarray] = []
    cells = {id(cell): at for at, cell in enumerate(recorder.cells)}
    literals = {id(literal) for literal in recorder.literals}
    for const in found:
        if id(const) in cells:
            consts.append(Const(Origin.CELL, cells[id(const)]))
            continue
        value = np.asarray(const)
        if id(const) in literals:
            if id(const) in recorder.sources:
                late[len(params)] = recorder.sources[id(const)]
            consts.append(Const(Origin.LITERAL, len(params)))
            params.append(value[0])
        elif value.dtype in DTYPE_NAMES:
            consts.append(Const(Origin.CAPTURED, len(params)))
            params.append(value)
        else:
            consts.append(Const(Origin.BAKED, len(consts), const))
    return tuple(consts), tuple(params), late


def _tensor_type(aval: Any) -> TensorType:
    return TensorType(DType(DTYPE_NAMES[np.dtype(aval.dtype)]), tuple(aval.shape))
