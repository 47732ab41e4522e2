"""Layer stages: what they record, what the host accepts, and that the lowering agrees with the oracle and with NumPy."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eta_programs import OUTPUTS, FakeChannel, V
from inferlet.eta import _compose as eta
from inferlet.eta import _intrinsics as intrinsics
from inferlet.eta import _ops as ops
from inferlet.eta._errors import EtaError
from inferlet.eta._recorder import recorder, trace
from inferlet.eta._stages import Stage, Stages

from pie_xla.eta.oracle import Layer, run
from pie_xla.eta.program import EtaProgram, Limits
from pie_xla.eta.types import EtaError as Refused

L, H, D, C, PAGE = 3, 4, 6, 10, 4
J = 3
SUMS, LAST, COUNT = FakeChannel("f32", (C,)), FakeChannel("f32", (H, D)), FakeChannel("u32", ())
Fn = Callable[[], Any]
KEY = (7, 9)


def record(epilogue: Fn, rows: tuple[int | None, ...] = (None,), **fns: Fn) -> Any:
    order = [(stage, fns[stage.value]) for stage in Stage if stage.value in fns]
    return trace(epilogue, OUTPUTS, rows, V, PAGE, Stages(tuple(order), C, PAGE, (H, D)))


def take(channel: Any) -> Any:
    return recorder("test").take(channel)


def read(channel: Any) -> Any:
    return recorder("test").read(channel)


def put(channel: Any, value: Any) -> None:
    recorder("test").put(channel, value)


def shown(rows: int, seed: int = 0) -> list[Layer]:
    rng = np.random.default_rng(seed)

    def some(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    return [
        Layer([some(H, D) for _ in range(rows)], {r: some(C) for r in range(rows)}, {r: some(J) for r in range(rows)})
        for _ in range(L)
    ]


def lowered(
    program: EtaProgram, reads: Any, params: Any, cells: Any, layers: list[Layer]
) -> tuple[Any, Any, list[Any]]:
    """Results, puts, and the masks of each layer: the methods in the order in which the engine calls them."""
    stages = program.stages
    assert stages is not None
    key, ordinal = jnp.asarray(KEY, jnp.uint32), jnp.uint32(5)
    given = [[jnp.asarray(x) for x in part] for part in (params, cells)]

    @jax.jit
    def go(params: Any, cells: Any) -> Any:
        values, registers = stages.start(params, cells, key, ordinal)
        masks = []
        for number, layer in enumerate(layers):
            at, queries = jnp.uint32(number), [jnp.asarray(q) for q in layer.queries]
            common = (params, cells, key, ordinal)
            bounds = [layer.bounds[row] for row in stages.bounded]
            registers, kept = stages.projected(values, registers, at, queries, bounds, *common)
            masks.append(kept)
            scores = [layer.scores[row] for row in stages.scored]
            registers = stages.attended(values, registers, at, queries, scores, *common)
        return *stages.finish(values, registers, [jnp.asarray(x) for x in reads], params, cells, key, ordinal), masks

    return go(*given)


def agree(made: Any, cells: list[Any], reads: list[Any], layers: list[Layer]) -> tuple[list[Any], list[Any], list[Any]]:
    program = EtaProgram.from_json(made.text)
    params = [np.asarray(p, kind.dtype.numpy) for p, kind in zip(made.params, program.params, strict=True)]
    results, puts = run(program, reads, params, cells, KEY, 5, layers)
    got, gave, masks = lowered(program, reads, params, cells, layers)
    for mine, theirs in zip([*got, *gave], [*results, *puts], strict=True):
        assert mine.shape == theirs.shape and mine.dtype == theirs.dtype
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)
    return results, puts, masks


def test_a_register_is_carried_through_the_layers_and_left_to_the_channel() -> None:
    def attn() -> None:
        put(SUMS, take(SUMS) + intrinsics.attn_scores(0) * 2.0)

    def epilogue() -> Any:
        return ops.reduce_argmax(read(SUMS)), ops.reduce_max(intrinsics.output(0, "logits"))

    made = record(epilogue, on_attn=attn)
    layers, start, logits = shown(1), np.full(C, 3, np.float32), np.arange(V, dtype=np.float32)
    results, puts, _ = agree(made, [start], [logits], layers)
    total = start + 2 * sum(layer.scores[0] for layer in layers)
    np.testing.assert_allclose(puts[0], total, rtol=1e-5)
    assert results[0] == np.argmax(total) and results[1] == V - 1
    (use,) = EtaProgram.from_json(made.text).channels
    assert (use.take, use.put) == (True, True)


def test_a_prologue_starts_anew_and_its_values_are_seen_by_all_stages() -> None:
    kept: dict[str, Any] = {}

    def prologue() -> None:
        take(COUNT)
        kept["first"] = take(LAST)
        put(COUNT, kept["zero"] if "zero" in kept else ops.cast(ops.iota(1).reshape(()), "u32"))

    def proj() -> None:
        scaled = kept["first"] * intrinsics.query(0)
        intrinsics.keep_pages(
            0, (intrinsics.page_bounds(0) > ops.reduce_max(scaled.reshape(-1)) * 0.1) | (ops.iota(J) == 0)
        )

    def attn() -> None:
        put(LAST, intrinsics.query(0) + kept["first"])
        put(COUNT, take(COUNT) + intrinsics.layer() + 1)

    made = record(lambda: read(COUNT), prologue=prologue, on_attn_proj=proj, on_attn=attn)
    layers, first = shown(1, 1), np.random.default_rng(4).standard_normal((H, D)).astype(np.float32)
    results, puts, masks = agree(made, [np.uint32(99), first], [], layers)
    assert results == [1 + 2 + 3]
    np.testing.assert_allclose(puts[1], layers[-1].queries[0] + first, rtol=1e-6)
    for layer, (mask,) in zip(layers, masks, strict=True):
        expected = layer.bounds[0] > np.float32((first * layer.queries[0]).max() * np.float32(0.1))
        expected[0] = True
        np.testing.assert_array_equal(mask, expected)


def test_each_row_and_each_layer_has_its_own() -> None:
    def attn() -> None:
        put(SUMS, take(SUMS) + intrinsics.attn_scores(1) - intrinsics.attn_scores(0) + ops.uniform((C,)))

    made = record(lambda: None, (None, None), on_attn=attn)
    layers = shown(2, 2)
    _, puts, _ = agree(made, [np.zeros(C, np.float32)], [], layers)
    noise = puts[0] - sum(layer.scores[1] - layer.scores[0] for layer in layers)
    assert (noise > 0).all() and (noise < L).all() and np.unique(np.round(noise, 4)).size == C
    same = record(lambda: put(SUMS, ops.uniform((C,))), (None, None), on_attn=lambda: put(COUNT, 1))
    _, one, _ = agree(same, [np.uint32(0), np.zeros(C, np.float32)], [], layers)
    assert np.abs(noise / L - one[1]).max() > 0.1  # the layers did not draw the same number


def test_a_loop_inside_a_stage() -> None:
    def attn() -> None:
        put(SUMS, eta.fori(3, lambda i, x: x + intrinsics.attn_scores(0) * ops.cast(i, "f32"), take(SUMS)))

    layers = shown(1)
    _, puts, _ = agree(record(lambda: None, on_attn=attn), [np.zeros(C, np.float32)], [], layers)
    np.testing.assert_allclose(puts[0], 3 * sum(layer.scores[0] for layer in layers), rtol=1e-5)


def leak() -> Fn:
    kept: list[Any] = []

    def attn() -> None:
        kept.append(intrinsics.attn_scores(0))
        put(SUMS, kept[0])

    return lambda: record(lambda: ops.reduce_max(kept[0]), on_attn=attn)


WRONG: list[tuple[str, Fn, str]] = [
    (
        "scores too early",
        lambda: record(nothing, on_attn_proj=lambda: put(SUMS, intrinsics.attn_scores(0))),
        "in on_attn only",
    ),
    (
        "query too late",
        lambda: record(lambda: intrinsics.query(0), on_attn=use),
        "in on_attn_proj and on_attn only, not in epilogue",
    ),
    (
        "output too early",
        lambda: record(nothing, on_attn=lambda: put(LAST, intrinsics.output(0, "hidden"))),
        "in the epilogue only",
    ),
    ("row", lambda: record(nothing, on_attn=lambda: put(SUMS, intrinsics.attn_scores(1))), "rows 0 to 0"),
    ("result", lambda: record(nothing, on_attn=lambda: intrinsics.layer()), "gives back nothing"),
    ("mask", lambda: record(nothing, on_attn_proj=lambda: intrinsics.keep_pages(0, [True])), r"bool\[3\]"),
    (
        "two masks",
        lambda: record(nothing, on_attn_proj=lambda: [intrinsics.keep_pages(0, [True] * J) for _ in "ab"][:0]),
        "once per layer",
    ),
    ("second take", lambda: record(nothing, on_attn=lambda: put(LAST, take(LAST) + take(LAST))), "already taken from"),
    (
        "never put back",
        lambda: record(nothing, on_attn=lambda: put(COUNT, ops.cast(take(SUMS)[0], "u32"))),
        "in the second layer",
    ),
    ("leak", leak(), "layer stage"),
    ("put twice", lambda: record(lambda: put(SUMS, [0.0] * C), on_attn=use), "already put to in this pass"),
]


def nothing() -> None: ...


def use() -> None:
    put(SUMS, intrinsics.attn_scores(0))


@pytest.mark.parametrize(("fn", "message"), [case[1:] for case in WRONG], ids=[case[0] for case in WRONG])
def test_refused_while_recording(fn: Fn, message: str) -> None:
    with pytest.raises(EtaError, match=message):
        fn()


def broken(change: Callable[[dict[str, Any]], Any]) -> str:
    document = json.loads(record(lambda: ops.reduce_max(read(SUMS)), on_attn_proj=keep, on_attn=use).text)
    change(document["body"])
    document.pop("lines")
    return json.dumps(document)


def keep() -> None:
    intrinsics.keep_pages(0, intrinsics.page_bounds(0) > 0.0)


def stage(name: str, *ops: list[Any]) -> Callable[[dict[str, Any]], Any]:
    return lambda body: body["stages"].update({name: list(ops)})


HOSTILE: list[tuple[str, Callable[[dict[str, Any]], Any], str]] = [
    ("no page", lambda b: b["stages"].pop("page"), "lacks"),
    ("page 0", lambda b: b["stages"].update(page=0), "stages page"),
    ("huge width", lambda b: b["stages"].update(width=1 << 40), "stages width"),
    ("heads", lambda b: b["stages"].update(heads=[4]), r"\[H, d\]"),
    ("not an object", lambda b: b.update(stages=[1]), "must be an object"),
    ("nothing", lambda b: b["stages"].update(proj=[], attn=[]), "do nothing"),
    ("stage of its own", lambda b: b["stages"].update(late=[]), "late"),
    ("score in proj", stage("proj", ["score", [], {"i": 0}]), "on_attn only"),
    ("row 9", stage("attn", ["query", [], {"i": 9}]), "row in 0..0"),
    ("layer with a row", stage("attn", ["layer", [], {"i": 0}]), "attribute i"),
    ("mask of a wrong type", stage("proj", ["layer", [], {}], ["pages", [0], {"i": 0}]), r"bool\[3\]"),
    ("stale value", lambda b: b.update(out=[1]), "value 1"),
    ("two puts", stage("attn", ["score", [], {"i": 0}], *[["put", [3], {"i": 0}]] * 2), "already put"),
]


@pytest.mark.parametrize(("change", "message"), [case[1:] for case in HOSTILE], ids=[case[0] for case in HOSTILE])
def test_refused_by_the_host(change: Callable[[dict[str, Any]], Any], message: str) -> None:
    EtaProgram.from_json(broken(lambda body: None))
    with pytest.raises(Refused, match=message):
        EtaProgram.from_json(broken(change))


def test_stages_count_in_cost_and_key() -> None:
    plain = EtaProgram.from_json(record(lambda: None, on_attn=use).text)
    other = EtaProgram.from_json(record(lambda: None, on_attn=lambda: put(SUMS, intrinsics.attn_scores(0) * 2.0)).text)
    assert plain.stages is not None and other.stages is not None
    assert plain.key != other.key and other.stages.cost > plain.stages.cost >= 1
    assert plain.stages.scored == (0,) and plain.stages.bounded == () and plain.stages.masked == ()
    with pytest.raises(Refused, match="costs"):
        EtaProgram.from_json(record(lambda: None, on_attn=use).text, Limits(cost=1))


def test_damaged_stages_are_refused_or_run() -> None:
    """Any damage gives an EtaError, or a program that the oracle can run and JAX can trace."""
    rng = np.random.default_rng(0)

    def attn() -> None:
        put(SUMS, take(SUMS) + intrinsics.attn_scores(0))
        put(COUNT, take(COUNT) + intrinsics.layer())

    def prologue() -> None:
        put(COUNT, 0)

    text = record(
        lambda: (read(COUNT), ops.reduce_max(take(SUMS))), prologue=prologue, on_attn_proj=keep, on_attn=attn
    ).text
    text = json.dumps({"body": json.loads(text)["body"]})
    names = [
        "take",
        "put",
        "read",
        "layer",
        "query",
        "score",
        "bound",
        "pages",
        "add",
        "prologue",
        "proj",
        "attn",
        "ops",
    ]
    ran = refused = 0
    for _ in range(1500):
        words = text.split('"')
        if rng.random() < 0.5:  # one name for another
            spots = [i for i, word in enumerate(words) if word in names]
            words[int(rng.choice(spots))] = str(rng.choice(names))
            broken = '"'.join(words)
        else:  # one digit for another
            spots = [i for i, letter in enumerate(text) if letter.isdigit()]
            at = int(rng.choice(spots))
            broken = text[:at] + str(rng.integers(0, 7)) + text[at + 1 :]
        try:
            program = EtaProgram.from_json(broken)
        except Refused:
            refused += 1
            continue
        ran += 1
        if program.stages is None or broken == text:
            continue
        params, cells, reads = ([np.zeros(k.shape, k.dtype.numpy) for k in kinds] for kinds in (
            program.params, [use.type for use in program.channels], [read.type for read in program.reads]))  # fmt: skip
        heads, width, page = program.stages.heads, program.stages.width, program.stages.page
        shape = np.ones(heads, np.float32), np.ones(width, np.float32), np.ones(-(-width // page), np.float32)
        layers = [Layer([shape[0]], {0: shape[1]}, {0: shape[2]})] * 2
        results, puts = run(program, reads, params, cells, KEY, 5, layers)
        traced = jax.eval_shape(lambda p, c: lowered_shapes(program, reads, p, c, layers), params, cells)  # noqa: B023
        assert [x.shape for x in [*traced[0], *traced[1]]] == [x.shape for x in [*results, *puts]]
    assert refused > 150 and ran > 100


def lowered_shapes(program: EtaProgram, reads: Any, params: Any, cells: Any, layers: list[Layer]) -> Any:
    stages = program.stages
    assert stages is not None
    common = (params, cells, jnp.zeros(2, jnp.uint32), jnp.uint32(5))
    values, registers = stages.start(*common)
    for number, layer in enumerate(layers):
        at = jnp.uint32(number)
        registers, _ = stages.projected(
            values, registers, at, layer.queries, [layer.bounds[0] for _ in stages.bounded], *common
        )
        registers = stages.attended(
            values, registers, at, layer.queries, [layer.scores[0] for _ in stages.scored], *common
        )
    return stages.finish(values, registers, reads, *common)
