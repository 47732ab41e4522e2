"""Whole programs: traced by the guest, lowered, run natively and in the oracle; and hostile texts."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eta_programs import EPILOGUES, OUTPUTS, V
from inferlet.eta._recorder import TracedProgram, recording, trace

from pie_xla.eta import native, oracle
from pie_xla.eta.program import EtaProgram, Limits
from pie_xla.eta.types import DType, EtaError, TensorType

GOLDEN = Path(__file__).parent / "golden" / "programs.json"
PASSES = 3
KEY = (3, 4)


def traced(name: str) -> tuple[TracedProgram, EtaProgram]:
    fn, rows = EPILOGUES[name]
    made = trace(fn, OUTPUTS, rows, V)
    return made, EtaProgram.from_json(made.text)


def inputs(program: Any, seed: int = 0) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Reads and cells with a leading axis of PASSES."""
    rng = np.random.default_rng(seed)
    reads = [(rng.normal(size=(PASSES, *read.shape)) * 3).astype(np.float32) for read in program.reads]
    cells = [rng.integers(-2, V, (PASSES, *use.type.shape)).astype(use.type.dtype.numpy) for use in program.channels]
    return reads, cells


def batched(program: Any, reads: list[np.ndarray], params: list[np.ndarray], cells: list[np.ndarray]) -> Any:
    keys = np.tile(np.asarray(KEY, np.uint32), (PASSES, 1))
    ordinals = np.arange(PASSES, dtype=np.uint32)
    many = [np.stack([param] * PASSES) for param in params]
    arguments = jax.tree.map(jnp.asarray, (reads, many, cells, keys, ordinals))
    return jax.jit(jax.vmap(program.apply))(*arguments)


@pytest.mark.parametrize("name", EPILOGUES)
def test_lowered_equals_oracle_and_native(name: str) -> None:
    made, program = traced(name)
    reads, cells = inputs(program)
    params = [np.asarray(v, kind.dtype.numpy) for v, kind in zip(made.params, program.params, strict=True)]
    results, puts = batched(program, reads, params, cells)
    for at in range(PASSES):
        want, want_puts = oracle.run(program, [r[at] for r in reads], params, [c[at] for c in cells], KEY, at)
        for got, right, kind in zip(results, want, program.results, strict=True):
            assert TensorType(DType(kind.dtype), got.shape[1:]) == kind and right.dtype == got.dtype
            np.testing.assert_allclose(np.asarray(got[at]), right, rtol=1e-5, atol=1e-5)
        for got, right in zip(puts, want_puts, strict=True):
            np.testing.assert_array_equal(np.asarray(got[at]), right)

    fn, rows = EPILOGUES[name]
    if name in ("operators", "shaped"):
        return  # methods such as cast and reshape(2, 3) of int tensors are spelled alike, indices of tracers are JAX's

    def run(recorder: native.NativeRecorder) -> Any:
        with recording(recorder):
            return fn()

    other = native.trace(run, OUTPUTS, rows, V)
    assert other.program.results == program.results and other.program.channels == program.channels
    assert other.program.reads == program.reads and other.program.scalar_result == program.scalar_result
    native_results, native_puts = batched(other.program, reads, list(other.params), cells)
    for got, right in zip([*native_results, *native_puts], [*results, *puts], strict=True):
        np.testing.assert_allclose(np.asarray(got), np.asarray(right), rtol=1e-6, atol=1e-6)


def test_golden_programs_are_unchanged() -> None:
    """Other SDKs must write these bytes; the keys are cache keys of users."""
    golden = json.loads(GOLDEN.read_text())
    for name in EPILOGUES:
        made, program = traced(name)
        body = json.dumps(json.loads(made.text)["body"], sort_keys=True, separators=(",", ":"))
        assert golden[name] == {"key": program.key, "body": body, "cost": program.cost, "memory": program.memory}


def test_key_ignores_lines_values_and_spelling() -> None:
    def make(scale: float) -> EtaProgram:
        from inferlet.eta import _intrinsics as intrinsics
        from inferlet.eta import _ops as ops

        return EtaProgram.from_json(
            trace(lambda: ops.categorical(intrinsics.output(0, "logits") / scale), OUTPUTS, [None], V).text
        )

    first, second = make(0.7), make(1.3)
    assert first.key == second.key
    loose = json.dumps({"body": json.loads(trace(EPILOGUES["greedy"][0], OUTPUTS, [None], V).text)["body"]}, indent=2)
    assert EtaProgram.from_json(loose).key == traced("greedy")[1].key
    assert EtaProgram.from_json(first.text).key == first.key and "test_program" not in first.text
    assert traced("greedy")[1].key != first.key


def test_source_lines_are_the_authors() -> None:
    text = traced("greedy")[0].text
    lines = json.loads(text)["lines"]
    assert all(line.startswith("eta_programs.py:") for line in lines) and len(set(lines)) == 1
    assert traced("greedy")[1].source == lines[0]


BASE = {
    "body": {
        "channels": [],
        "eta": 1,
        "ops": [["output", [], {"i": 0}], ["param", [], {"i": 0}], ["mul", [0, 1], {}], ["reduce_argmax", [2], {}]],
        "out": [3],
        "params": [["f32", []]],
        "reads": [[0, "logits", "f32", [8]]],
        "rows": 1,
        "single": True,
    },
    "lines": ["a.py:1", "a.py:2", "a.py:3", "a.py:4"],
    "source": "a.py:1",
}


def changed(path: str, value: Any) -> str:
    document: Any = copy.deepcopy(BASE)
    *parents, last = path.split(".")
    at = document
    for part in parents:
        at = at[int(part) if part.isdigit() else part]
    at[int(last) if last.isdigit() else last] = value
    if "fori" in str(value) or "while" in str(value):
        document["lines"] = []
    return json.dumps(document)


LOOP = ["fori", [2], {"n": 10**9, "ops": [["exp", [4], {}]], "out": [5]}]

WHILE: dict[str, Any] = {"n": 9, "test": [["isnan", [3], {}]], "hold": 4, "ops": [["exp", [3], {}]], "out": [5]}


def looping(operands: list[int], **changes: Any) -> str:
    """BASE with a `while`; ids: 2 the index, 3 the carried value, 4 the test's, 5 the body's, 6 the result."""
    text = changed("body.ops.2", ["while", operands, WHILE | changes])
    return text.replace('["reduce_argmax", [2], {}]', '["exp", [6], {}]').replace(
        '"out": [3], "params"', '"out": [7], "params"'
    )


HOSTILE = [
    ("not json", "{", "not JSON"),
    ("deep", "[" * 100_000, "not JSON"),
    ("huge", '"' + "x" * (1 << 20) + '"', "characters"),
    ("array", "[]", "must be an object"),
    ("nan", '{"body": NaN}', "NaN"),
    ("twice", '{"body": 1, "body": 2}', "twice"),
    ("digits", '{"body": ' + "9" * 5000 + "}", "not JSON"),
    ("unknown key", changed("body.extra", 1), "unknown keys"),
    ("version", changed("body.eta", 2), "version 2"),
    ("bool version", changed("body.eta", True), "version True"),
    ("rows", changed("body.rows", -1), "rows"),
    ("rows type", changed("body.rows", "1"), "rows"),
    ("read row", changed("body.reads.0.0", 1), "reads row"),
    ("read name", changed("body.reads.0.1", 5), "reads must hold"),
    ("read twice", changed("body.reads", [[0, "logits", "f32", [8]]] * 2), "twice"),
    ("rank", changed("body.reads.0.3", [1, 1, 1, 1, 2]), "rank 5"),
    ("extent", changed("body.reads.0.3", [0]), "extent"),
    ("size", changed("body.reads.0.3", [1 << 20, 1 << 20]), "elements"),
    ("dtype", changed("body.params.0.0", "f64"), "params must hold"),
    ("op name", changed("body.ops.3.0", "import"), "op 3 at a.py:4: unknown op"),
    ("op shape", changed("body.ops.3", 5), "op 3 at a.py:4"),
    ("operand", changed("body.ops.3.1", [3]), "operand 3"),
    ("operand bool", changed("body.ops.3.1", [True]), "operand True"),
    ("operand count", changed("body.ops.3.1", [0, 1]), "takes 1 operands"),
    ("leaf index", changed("body.ops.0.2", {"i": 1}), "attribute i"),
    ("leaf negative", changed("body.ops.0.2", {"i": -1}), "attribute i"),
    ("attr", changed("body.ops.3.2", {"depth": 0}), "unknown attribute"),
    ("type", changed("body.params.0.0", "i32"), "share one dtype"),
    ("out", changed("body.out", [9]), "does not exist"),
    ("single", changed("body.out", [2, 3]), "single is true"),
    ("single type", changed("body.single", 1), "single must be"),
    ("lines count", changed("lines", ["a"]), "lines has 1"),
    ("lines type", changed("lines", [1, 2, 3, 4]), "lines must hold"),
    ("source", changed("source", 5), "source must be"),
    ("unused channel", changed("body.channels", [["i32", []]]), "never used"),
    ("iota", changed("body.ops.2", ["iota", [], {"n": 1 << 40}]), "n must be in"),
    ("broadcast bomb", changed("body.ops.2", ["broadcast", [1], {"shape": [1 << 14, 1 << 15]}]), "elements"),
    ("loop", changed("body.ops.3", LOOP).replace('"out": [3], "params"', '"out": [6], "params"'), "costs 64000000"),
    ("loop n", changed("body.ops.3", ["fori", [2], {"n": 0, "ops": [], "out": [2]}]), "n must be"),
    ("loop type", changed("body.ops.3", ["fori", [2], {"n": 2, "ops": [], "out": [3]}]), "must return the types"),
    ("while n", looping([1], n=0), "n must be"),
    (
        "while without a test",
        changed("body.ops.2", ["while", [1], {"n": 2, "ops": [], "out": [4]}]),
        "attributes must be",
    ),
    ("while test", looping([1], test=5), "attributes must be"),
    ("while answer", looping([1], hold=3), "the test must give bool[]"),
    ("while answer shape", looping([0]), "the test must give bool[]"),
    ("while answer made by the body", looping([1], hold=5), "operand 5"),
    ("test's values in the body", looping([1], ops=[["not", [4], {}]], out=[3]), "operand 4"),
    ("while type", looping([1], out=[2]), "must return the types"),
    ("while cost", looping([1], n=10**9), "costs 128000000"),
    ("many ops", changed("body.ops", [["param", [], {"i": 0}]] * 4097), "more than 4096"),
]


@pytest.mark.parametrize(("text", "why"), [case[1:] for case in HOSTILE], ids=[case[0] for case in HOSTILE])
def test_hostile_text_is_refused_by_name(text: str, why: str) -> None:
    with pytest.raises(EtaError) as caught:
        EtaProgram.from_json(text)
    assert why in str(caught.value)
    assert len(str(caught.value)) < 2000


def test_base_is_accepted() -> None:
    assert EtaProgram.from_json(looping([1])).results == (TensorType(DType.F32, ()),)
    assert EtaProgram.from_json(json.dumps(BASE)).results == (TensorType(DType.I32, ()),)


def test_mutated_texts_never_crash() -> None:
    """Any damage gives a program or an EtaError, nothing else."""
    rng = np.random.default_rng(0)
    text = traced("looped")[0].text
    marks = [*list('0123456789-[]{}",:abcdefi'), "null", "true", "1e9", '"i"', "[[", "99999999999"]
    refused = 0
    for _ in range(1500):
        at, length = int(rng.integers(len(text))), int(rng.integers(0, 4))
        broken = text[:at] + str(rng.choice(marks)) + text[at + length :]
        try:
            EtaProgram.from_json(broken)
        except EtaError:
            refused += 1
    assert refused > 500


def test_a_loop_body_does_not_leak() -> None:
    leak = changed("body.ops.3", ["fori", [2], {"n": 2, "ops": [["exp", [4], {}]], "out": [5]}])
    assert EtaProgram.from_json(leak.replace('"out": [3], "params"', '"out": [6], "params"')).cost > 0
    with pytest.raises(EtaError, match="does not exist"):
        EtaProgram.from_json(leak.replace('"out": [3], "params"', '"out": [5], "params"'))


def test_bounds_are_the_servers() -> None:
    text = json.dumps(BASE)
    with pytest.raises(EtaError, match="more than the limit of 100"):
        EtaProgram.from_json(text, Limits(cost=100))
    with pytest.raises(EtaError, match="intermediate values"):
        EtaProgram.from_json(text, Limits(memory=8))
    matmul = changed("body.ops.2", ["broadcast", [1], {"shape": [4096, 4096]}])
    assert EtaProgram.from_json(matmul.replace("[2], {}", "[0], {}")).memory >= 4 * 4096 * 4096
