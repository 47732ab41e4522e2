"""Passes with layer stages: they see and hide what they should, alone, chunked, batched and beside strangers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from inferlet.eta import _intrinsics as intrinsics
from inferlet.eta import _ops as ops
from inferlet.eta._recorder import recorder, trace
from inferlet.eta._stages import Stage, Stages
from tiny import CONFIG, OPTIONS, Greedy, Listener, engine, load, reference_greedy

from pie_xla.engine.api import FromTicket, Geometry, PassError, PassRequest, Recipe, Row
from pie_xla.engine.buckets import Bucket
from pie_xla.engine.engine import Engine
from pie_xla.engine.executables import compile_now
from pie_xla.errors import PieError
from pie_xla.eta.program import EtaProgram
from pie_xla.eta.types import DType, TensorType
from poem.spec import Batch

V, C, PAGE, HEADS = 97, 64, 4, (4, 8)
J = C // PAGE
OUTPUTS: dict[str, tuple[tuple[int, ...], str]] = {"logits": ((V,), "f32"), "hidden": ((32,), "f32")}
PROMPT = [5, 17, 80, 3, 3, 41]
LONG = [int(x) for x in np.random.default_rng(1).integers(0, V, 45)]


class Channel:
    """What a recorder needs of a channel."""

    def __init__(self, dtype: str, shape: tuple[int, ...]) -> None:
        self.dtype, self.shape = dtype, shape


SUMS = Channel("f32", (C,))


def program(
    epilogue: Callable[[], Any], rows: int = 1, width: int = C, **fns: Callable[[], Any]
) -> tuple[EtaProgram, Any]:
    staged = Stages(tuple((s, fns[s.value]) for s in Stage if s.value in fns), width, PAGE, HEADS)
    made = trace(epilogue, OUTPUTS, (None,) * rows, V, PAGE, staged)
    parsed = EtaProgram.from_json(made.text)
    return parsed, tuple(np.asarray(p, t.dtype.numpy) for p, t in zip(made.params, parsed.params, strict=True))


def pick(row: int = 0) -> Any:
    return ops.cast(ops.reduce_argmax(intrinsics.output(row, "logits")), "i32")


def add_scores() -> None:
    """The sum over layers, anew in each pass: the prologue clears it."""
    recorder("test").put(SUMS, recorder("test").take(SUMS) + intrinsics.attn_scores(0))


def clear() -> None:
    recorder("test").put(SUMS, ops.broadcast(0.0, (C,)))


def watching() -> tuple[EtaProgram, Any]:
    def epilogue() -> Any:
        return pick(), recorder("test").take(SUMS)

    return program(epilogue, prologue=clear, on_attn=add_scores)


def hiding() -> tuple[EtaProgram, Any]:
    """The last token does not look at page 1."""
    return program(pick, on_attn_proj=lambda: intrinsics.keep_pages(0, ops.iota(J) != 1))


class Bare:
    """The reference's taps: the sum of the scores, and a page to hide from the last token."""

    width, scored, bounded = C, True, False

    def __init__(self, hide: int | None) -> None:
        self.hide = hide

    def start(self) -> Any:
        return jnp.zeros((1, C))

    def projected(self, carry: Any, layer: Any, query: Any, bounds: Any) -> Any:
        return carry, None if self.hide is None else (jnp.arange(J) != self.hide)[None]

    def attended(self, carry: Any, layer: Any, query: Any, scores: Any) -> Any:
        return carry + scores


_BARE: dict[Any, Any] = {}


def bare_step(lowered: Any, hide: int | None) -> Any:
    key = id(lowered), hide
    if key not in _BARE:
        _BARE[key] = jax.jit(lambda p, s, b: lowered.tapped_step(p, s, b, Bare(hide)))
    return _BARE[key]


def reference(model: Any, prompt: list[int], n: int, hide: int | None = None) -> tuple[list[int], list[np.ndarray]]:
    """Tokens and scores per step, one token at a time from an empty cache; from the prompt's last token on, `hide` is hidden."""
    lowered = model.lowered
    state = {g.name: {k: jnp.zeros(v.shape, v.dtype) for k, v in g.arrays(J + 1).items()} for g in lowered.groups}
    tokens, scores = list(prompt), []
    for at in range(len(prompt) + n - 1):
        one = lambda x: jnp.asarray([x], jnp.int32)  # noqa: E731
        table = {g.name: jnp.arange(1, J + 1, dtype=jnp.int32)[None] for g in lowered.groups}
        batch = Batch(one(tokens[at])[None], one(at)[None], one(at), one(1), table, one(0), one(1), one(0))
        last = at >= len(prompt) - 1
        state, outputs, seen = bare_step(lowered, hide if last else None)(model.params, state, batch)
        if last:
            tokens.append(int(jnp.argmax(outputs["logits"][0])))
            scores.append(np.asarray(seen)[0])
    return tokens[len(prompt) :], scores


@pytest.fixture(scope="module")
def model():
    return load()


@pytest.fixture(scope="module")
def served(model):
    made = engine(model)
    yield made
    made.close()


@pytest.fixture
def account(served):
    listener = Listener()
    client = served.client("test", listener)
    yield client, listener
    client.close()
    served.settle()
    for free, used, total in served.stats()["memory"].values():
        assert used == 0 and free == total
    assert served.stats()["words used"] == 0


def decode(client, listener, prompt, n, made, channels=(), ahead=False):
    """Results of `n` passes, the tokens carried on the device when `ahead`."""
    parsed, params = made
    ws, pipe = client.new_set(), client.new_pipeline()
    tickets, results, row = [], [], Row(ws, tuple(prompt))
    for _ in range(n):
        tickets.append(client.submit(pipe, PassRequest((row,), program=parsed, params=params, channels=channels)))
        if ahead:
            row = Row(ws, FromTicket(tickets[-1], 0))
        else:
            results.append(listener.wait(tickets[-1]))
            row = Row(ws, (int(results[-1][0]),))
    return results or [listener.wait(ticket) for ticket in tickets]


@pytest.mark.parametrize("ahead", [False, True], ids=["host loop", "run-ahead"])
@pytest.mark.parametrize("prompt", [PROMPT, LONG], ids=["short", "chunked"])
def test_scores_are_those_of_the_bare_step_and_looking_changes_nothing(account, model, prompt, ahead):
    client, listener = account
    sums = client.new_channel(TensorType(DType.F32, (C,)))
    results = decode(client, listener, prompt, 4, watching(), (sums,), ahead)
    tokens, scores = reference(model, prompt, 4)
    assert [int(token) for token, _ in results] == tokens == reference_greedy(model.lowered, model.params, prompt, 4)
    for i, (_, seen) in enumerate(results):
        np.testing.assert_allclose(seen, scores[i], atol=1e-4)
        np.testing.assert_allclose(seen.sum(), 2.0, atol=1e-4)  # of two layers


def test_a_channel_gathers_over_passes_too(account, model):
    client, listener = account
    sums = client.new_channel(TensorType(DType.F32, (C,)))
    client.put_channel(sums, np.zeros(C, np.uint32))
    decode(client, listener, PROMPT, 4, program(pick, on_attn=add_scores), (sums,), ahead=True)
    (total,) = listener.wait(client.take_channel(sums))
    np.testing.assert_allclose(total, sum(reference(model, PROMPT, 4)[1]), atol=2e-4)


def test_hidden_pages_change_what_follows_and_nobody_shares_it(account, model, served):
    client, listener = account
    prompt = LONG[:24]
    expected, _ = reference(model, prompt, 4, hide=1)
    assert expected != reference(model, prompt, 4)[0]
    assert [int(token) for (token,) in decode(client, listener, prompt, 4, hiding())] == expected
    # what the hidden token left behind is not what its tokens give to others
    again = decode(client, listener, [*prompt, *expected, 1, 2, 3], 3, (Greedy(), ()))
    assert [int(t) for (t,) in again] == reference_greedy(model.lowered, model.params, [*prompt, *expected, 1, 2, 3], 3)


def test_batched_with_equals_and_strangers(account, model, served):
    """Three watchers, one that hides and two without stages, at once: each gets what it gets alone."""
    client, listener = account
    prompts = [LONG[i : i + 5 + i] for i in range(3)]
    runs: list[Any] = []
    for prompt in prompts:
        channel = client.new_channel(TensorType(DType.F32, (C,)))
        runs.append((prompt, watching(), (channel,)))
    runs += [(LONG[:24], hiding(), ()), (PROMPT, (Greedy(), ()), ()), (LONG, (Greedy(), ()), ())]
    lanes = [(client.new_set(), client.new_pipeline(), *run) for run in runs]
    tickets: list[list[int]] = [[] for _ in lanes]
    for step in range(4):
        for i, (ws, pipe, prompt, (parsed, params), channels) in enumerate(lanes):
            row = Row(ws, FromTicket(tickets[i][-1], 0)) if step else Row(ws, tuple(prompt))
            tickets[i].append(
                client.submit(pipe, PassRequest((row,), program=parsed, params=params, channels=channels))
            )
    got = [[listener.wait(ticket) for ticket in lane] for lane in tickets]
    for i, prompt in enumerate(prompts):
        tokens, scores = reference(model, prompt, 4)
        assert [int(token) for token, _ in got[i]] == tokens
        for step in range(4):
            np.testing.assert_allclose(got[i][step][1], scores[step], atol=1e-4)
    assert [int(token) for (token,) in got[3]] == reference(model, LONG[:24], 4, hide=1)[0]
    for lane, prompt in ((4, PROMPT), (5, LONG)):
        assert [int(token) for (token,) in got[lane]] == reference_greedy(model.lowered, model.params, prompt, 4)


def test_rows_of_one_pass_each_have_their_own(account, model):
    client, listener = account

    def attn() -> None:
        sums = recorder("test").take(SUMS)
        recorder("test").put(SUMS, sums + intrinsics.attn_scores(0) - 2.0 * intrinsics.attn_scores(1))

    parsed, params = program(lambda: (pick(0), pick(1), recorder("test").take(SUMS)), 2, prologue=clear, on_attn=attn)
    sums = client.new_channel(TensorType(DType.F32, (C,)))
    rows = (Row(client.new_set(), tuple(PROMPT)), Row(client.new_set(), tuple(LONG)))
    request = PassRequest(rows, program=parsed, params=params, channels=(sums,))
    a, b, seen = listener.wait(client.submit(client.new_pipeline(), request))
    (first, one), (second, other) = reference(model, PROMPT, 1), reference(model, LONG, 1)
    assert [int(a), int(b)] == [*first, *second]
    np.testing.assert_allclose(seen, one[0] - 2 * other[0], atol=2e-4)


def test_several_readouts_and_a_pass_that_only_reads(account, model):
    client, listener = account
    ws, pipe = client.new_set(), client.new_pipeline()
    listener.wait(client.submit(pipe, PassRequest((Row(ws, tuple(LONG[:10])),))))
    staged = Stages(((Stage.PROLOGUE, clear), (Stage.ATTN, add_scores)), C, PAGE, HEADS)
    made = trace(lambda: ops.reduce_argmax(intrinsics.output(0, "logits")), OUTPUTS, (3,), V, PAGE, staged)
    parsed = EtaProgram.from_json(made.text)
    params = tuple(np.asarray(p, t.dtype.numpy) for p, t in zip(made.params, parsed.params, strict=True))
    sums = client.new_channel(TensorType(DType.F32, (C,)))
    request = PassRequest(
        (Row(ws, tuple(LONG[10:16])),), Geometry.READ, ((3, 4, 5),), parsed, params, (sums,)
    )  # fmt: skip
    (best,) = listener.wait(client.submit(pipe, request))
    expected = [reference_greedy(model.lowered, model.params, LONG[:n], 1)[0] for n in (14, 15, 16)]
    assert best.tolist() == expected and client.set_length(ws) == 10
    (seen,) = listener.wait(client.take_channel(sums))
    np.testing.assert_allclose(seen, reference(model, LONG[:16], 1)[1][0], atol=1e-4)


def test_looking_copies_no_pool(served):
    """A pool that is read late is copied in each layer: XLA must read it before the next one writes."""
    shapes, model = served.default.shapes, served.default.model
    pool = min(leaf.nbytes for g in model.lowered.groups for leaf in g.arrays(shapes.units[g.name]).values())

    def both() -> None:
        intrinsics.keep_pages(0, ops.iota(J) != 1)
        recorder("test").put(bounds, intrinsics.page_bounds(0))

    bounds = Channel("f32", (J,))
    one = Bucket(1, 1, 1)
    works = [shapes.step(one), *(shapes.tapped(p, one) for p, _ in (watching(), program(pick, on_attn_proj=both)))]
    plain, *tapped = (compile_now(work).memory_analysis().temp_size_in_bytes for work in works)
    assert max(tapped) < plain + pool / 2, (plain, tapped, pool)


@pytest.mark.slow
def test_old_steps_with_stages_go_and_come_back(model):
    few = engine(model, dataclasses.replace(OPTIONS, max_tapped=1), name="few")
    try:
        listener = Listener()
        client = few.client("test", listener)
        sums = client.new_channel(TensorType(DType.F32, (C,)))
        made = [(watching(), (sums,)), (hiding(), ())]
        for _ in range(2):
            for program_, channels in made:
                results = decode(client, listener, LONG[:24], 3, program_, channels)
                hide = 1 if not channels else None
                assert [int(one[0]) for one in results] == reference(model, LONG[:24], 3, hide)[0]
                kept = [key for key in few.default.table.keys() if key.kind == "tapped"]  # noqa: SIM118 -- a method of the table
                assert [key.program for key in kept] == [program_[0].key]
        assert few.stats()["loaded"]["tapped"] >= 2
    finally:
        few.close()


def test_a_failing_step_with_stages_fails_its_passes_alone(account, model, served):
    client, listener = account
    parsed, params = hiding()
    decode(client, listener, PROMPT, 2, (parsed, params))
    key = served.default.programs.tapped_key(parsed, Bucket(1, 1, 1))
    good = served.default.table.planned(key)

    def broken(parameters, state, words, *rest):
        good(parameters, state, words, *rest)  # takes the pools along
        raise RuntimeError("the device is on fire")

    served.default.table._ready[key] = broken
    try:
        with pytest.raises(PassError, match="on fire"):
            decode(client, listener, PROMPT, 1, (parsed, params))
    finally:
        served.default.table._ready[key] = good
    expected = reference(model, LONG[:24], 3, hide=1)[0]
    assert [int(token) for (token,) in decode(client, listener, LONG[:24], 3, (parsed, params))] == expected


def test_a_killed_process_leaves_nothing_behind(model, served):
    listener = Listener()
    client = served.client("killed", listener)
    ws, pipe = client.new_set(), client.new_pipeline()
    sums = client.new_channel(TensorType(DType.F32, (C,)))
    parsed, params = watching()
    for _ in range(6):
        client.submit(pipe, PassRequest((Row(ws, tuple(LONG[:9])),), program=parsed, params=params, channels=(sums,)))
    client.close()
    served.settle()
    assert all(used == 0 and free == total for free, used, total in served.stats()["memory"].values())
    assert served.stats()["words used"] == 0


def test_layers_count_in_the_cost(model):
    parsed, params = watching()
    assert parsed.stages is not None
    both_layers = parsed.cost + parsed.stages.cost
    for limit, fits in ((both_layers - 1, False), (both_layers, True)):
        tight = engine(model, dataclasses.replace(OPTIONS, max_program_cost=limit), name="tight")
        try:
            client = tight.client("test", Listener())
            sums = client.new_channel(TensorType(DType.F32, (C,)))
            request = PassRequest((Row(client.new_set(), (1,)),), program=parsed, params=params, channels=(sums,))
            if fits:
                client.submit(client.new_pipeline(), request)
            else:
                with pytest.raises(PieError, match="element operations a pass"):
                    client.submit(client.new_pipeline(), request)
        finally:
            tight.close()


@pytest.mark.slow
def test_stages_are_compiled_by_another_process(model, tmp_path: Path):
    recipe = Recipe(CONFIG, "xla", "float32", 4, "unrolled")
    served = Engine(dataclasses.replace(model, recipe=recipe), OPTIONS, store=tmp_path / "store")
    served.start(warm=((1, 1), (1, 16)))
    try:
        listener = Listener()
        client = served.client("test", listener)
        results = decode(client, listener, LONG[:24], 3, hiding())
        assert [int(token) for (token,) in results] == reference(model, LONG[:24], 3, hide=1)[0]
        stats = served.stats()
        assert (
            not served.default.fusion.failures
            and not stats["compiled"].get("tapped")
            and stats["loaded"]["tapped"] == 1
        )
        client.close()
    finally:
        served.close()


def test_refused_at_submit(account, model, served):
    client, _ = account
    parsed, params = program(pick, width=16, on_attn_proj=lambda: intrinsics.keep_pages(0, ops.iota(4) != 1))
    request = PassRequest((Row(client.new_set(), tuple(LONG)),), program=parsed, params=params)
    with pytest.raises(PieError, match="45 tokens long, the layer stages span 16 positions"):
        client.submit(client.new_pipeline(), request)
    other = Stages(((Stage.ATTN, lambda: None), (Stage.PROJ, hide_nothing)), C, PAGE, (4, 16))
    strange = EtaProgram.from_json(trace(pick, OUTPUTS, (None,), V, PAGE, other).text)
    with pytest.raises(PieError, match=r"heads \[4, 16\]"):
        client.submit(client.new_pipeline(), PassRequest((Row(client.new_set(), (1,)),), program=strange))


def hide_nothing() -> None:
    intrinsics.keep_pages(0, intrinsics.page_bounds(0) >= intrinsics.page_bounds(0))


def test_a_model_that_shows_nothing_refuses_stages(model):
    facts = dataclasses.replace(model.lowered.facts, attention=None)
    blind = dataclasses.replace(model, lowered=dataclasses.replace(model.lowered, facts=facts))
    served = engine(blind, name="blind")
    try:
        client = served.client("test", Listener())
        parsed, params = hiding()
        with pytest.raises(PieError, match="the attention of tiny cannot be looked at"):
            client.submit(
                client.new_pipeline(), PassRequest((Row(client.new_set(), (1,)),), program=parsed, params=params)
            )
    finally:
        served.close()
