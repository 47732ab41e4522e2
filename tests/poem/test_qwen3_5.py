"""Qwen3.5 against transformers (stored float32 references), and its recurrent state: forks, retries, padding."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from poem_cases import tensor
from poem_runner import Runner, load, lowered
from qwen3_5_cases import CASES, prompts

from pie_xla.kernels.ops import Kernel, ops_for
from poem.lower import Loop, LoweredModel, lower
from poem.spec import PoemError, StateKind
from poem.weights import assign

Array = np.ndarray[Any, Any]
IDS = prompts()
WIDE = 72
COMBINATIONS = [("qwen3_5", Loop.UNROLLED), ("qwen3_5", Loop.SCAN), ("qwen3_5_untied", Loop.SCAN)]


def stored(name: str) -> dict[str, Array]:
    with np.load(Path(__file__).parent / "reference" / f"{name}.npz") as saved:
        return dict(saved)


@functools.cache
def prepared(name: str, loop: Loop) -> tuple[LoweredModel, dict[str, jax.Array], Any]:
    """The case's model, parameters and compiled steps, shared by all tests: each launch shape costs seconds."""
    model = lowered(CASES[name], loop)
    params = load(model, [str(n) for n in stored(name)["tensors"]])
    return model, params, jax.jit(model.step, donate_argnums=1, static_argnums=3)


def runner(name: str, loop: Loop) -> tuple[Runner, list[Array]]:
    """A fresh runner of 3 rows, and the reference logits of each prompt. Launches are 72 or 1 tokens wide."""
    model, params, step = prepared(name, loop)
    run = Runner(model, params, 3)
    run.step = step
    saved = stored(name)
    return run, [saved[f"logits_{i}"] for i in range(3)]


def close(got: Array, expected: Array) -> None:
    """Within 2e-4 of the largest logit, and the same greedy ids."""
    assert got.shape == expected.shape
    assert np.abs(got - expected).max() <= 2e-4 * np.abs(expected).max()
    assert (got.argmax(-1) == expected.argmax(-1)).all()


@pytest.mark.parametrize(("name", "loop"), COMBINATIONS)
def test_prompts_of_different_lengths_in_one_launch(name: str, loop: Loop) -> None:
    run, expected = runner(name, loop)
    got = run.run(dict(enumerate(IDS)), WIDE, 4)
    for i in range(3):
        close(got[i], expected[i])


@pytest.mark.parametrize(("name", "loop"), COMBINATIONS)
def test_chunks_then_single_tokens(name: str, loop: Loop) -> None:
    """A prompt in chunks of 5, 50 and 11, then token by token beside one that starts late, in either order of rows."""
    run, expected = runner(name, loop)
    parts: dict[int, list[Array]] = {0: [], 1: []}
    for begin, end in ((0, 5), (5, 55), (55, 66)):
        parts[0].append(run.run({0: IDS[0][begin:end]}, WIDE, 4)[0])
    for t in range(6):
        chunks = {0: IDS[0][66 + t : 67 + t]}
        if t >= 2:
            chunks = {1: IDS[1][t - 2 : t - 1], **chunks}
        for row, logits in run.run(chunks, 1, 4).items():
            parts[row].append(logits)
    parts[1].append(run.run({1: IDS[1][4:]}, WIDE, 4)[1])
    for row in (0, 1):
        close(np.concatenate(parts[row]), expected[row])


@pytest.mark.parametrize("loop", Loop)
def test_a_fork_reads_the_same_slot_and_writes_its_own(loop: Loop) -> None:
    run, expected = runner("qwen3_5", loop)
    prefix = 20  # whole pages, so that rows may share them
    close(run.run({0: IDS[0][:prefix]}, WIDE, 4)[0], expected[0][:prefix])
    origin = int(run.slot[0])
    for row in (1, 2):
        run.table[row, : prefix // 4] = run.table[0, : prefix // 4]
        run.lengths[row], run.slot[row] = run.lengths[0], origin
    rest = IDS[0][prefix : prefix + 5]
    got = run.run({0: rest, 1: rest, 2: IDS[1][:5]}, WIDE, 4)
    np.testing.assert_array_equal(got[0], got[1])
    close(got[0], expected[0][prefix : prefix + 5])
    assert np.abs(got[2] - got[0]).max() > 0.1
    slots = {row: slot_of(run, int(run.slot[row])) for row in range(3)}
    assert len(set(map(int, run.slot))) == 3 and origin not in run.slot
    for mine, other in zip(slots[0], slots[1], strict=True):
        np.testing.assert_array_equal(mine, other)
    assert all(np.abs(a - b).max() > 1e-3 for a, b in zip(slots[0], slots[2], strict=True))
    close(run.run({1: IDS[0][prefix + 5 : prefix + 12]}, WIDE, 4)[1], expected[0][prefix + 5 : prefix + 12])


def test_a_retry_starts_where_the_first_attempt_did() -> None:
    run, expected = runner("qwen3_5", Loop.SCAN)
    run.run({0: IDS[0][:30]}, WIDE, 4)
    origin = int(run.slot[0])
    before = slot_of(run, origin)
    first = run.run({0: IDS[0][30:37]}, WIDE, 4)[0]
    for kept, now in zip(before, slot_of(run, origin), strict=True):
        np.testing.assert_array_equal(kept, now)
    run.slot[0], run.lengths[0] = origin, 30
    again = run.run({0: IDS[0][30:37]}, WIDE, 4)[0]
    np.testing.assert_array_equal(first, again)
    close(again, expected[0][30:37])


@pytest.mark.parametrize("width", [1, WIDE])
def test_padding_tokens_leave_the_state_alone(width: int) -> None:
    """A row of no tokens copies its slot bit by bit, whatever the padding holds."""
    run, _ = runner("qwen3_5", Loop.UNROLLED)
    run.run({0: IDS[0][:5]}, WIDE, 4)
    before, origin = slot_of(run, int(run.slot[0])), int(run.slot[0])
    run.run({0: IDS[0][:0]}, width, 4)
    assert int(run.slot[0]) != origin
    for a, b in zip(before, slot_of(run, int(run.slot[0])), strict=True):
        np.testing.assert_array_equal(a, b)


def test_loops_and_widths_keep_the_same_state() -> None:
    """Five tokens with 67 of padding, and one by one."""
    states = []
    for loop in Loop:
        run, _ = runner("qwen3_5", loop)
        run.run({0: IDS[0][:5]}, WIDE, 4)
        states.append(slot_of(run, int(run.slot[0])))
    for t in range(5):
        run.run({1: IDS[0][t : t + 1]}, 1, 4)
    states.append(slot_of(run, int(run.slot[1])))
    for other in states[1:]:
        for a, b in zip(states[0], other, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def slot_of(run: Runner, slot: int) -> list[Array]:
    """All layers' arrays of one slot."""
    group = next(g for g in run.model.groups if g.kind is StateKind.RECURRENT)
    pool = run.state["recurrent"]
    return [np.asarray(pool[n]).reshape(group.layers, -1, *pool[n].shape[1:])[:, slot] for n in ("conv", "delta")]


def test_state_and_segments() -> None:
    model: LoweredModel = lowered(CASES["qwen3_5"], Loop.SCAN)
    assert [(s.start, s.period, s.repeats) for s in model.segments] == [(0, 2, 2), (4, 1, 1)]
    by_name = {group.name: group for group in model.groups}
    channels = 2 * 2 * 8 + 4 * 6
    assert by_name["recurrent"].bytes_per_unit == 3 * 4 * (3 * channels + 4 * 8 * 6)
    assert by_name["full"].bytes_per_unit == 2 * 4 * 2 * (2 * 4 * 16)
    assert by_name["recurrent"].arrays(5)["delta"].shape == (15, 4, 8, 6)


@pytest.mark.parametrize("name", CASES)
def test_a_multimodal_checkpoint_gives_its_text_model(name: str) -> None:
    saved = stored(name)
    outer = {
        "model_type": "qwen3_5",
        "text_config": {k: v for k, v in CASES[name].items() if k != "tie_word_embeddings"},
        "vision_config": {"depth": 1},
        "tie_word_embeddings": CASES[name]["tie_word_embeddings"],
    }
    model, text = lowered(outer), lowered(CASES[name])
    assert model.stored == text.stored
    found = assign(model.weight_rules, model.stored, [*map(str, saved["multimodal"]), "mtp.fc.weight"])
    assert {a.target for a in found.used} == set(text.stored)
    assert found.unused["mtp.fc.weight"] == "multi-token prediction is not used"
    assert any(tensor_name.startswith("model.visual.") for tensor_name in found.unused)


def test_bfloat16_keeps_the_matrix_in_float32() -> None:
    model = lower(CASES["qwen3_5"], ops=ops_for(Kernel.XLA), dtype="bfloat16", page_size=4)
    saved = stored("qwen3_5")
    params = {}
    for a in assign(model.weight_rules, model.stored, map(str, saved["tensors"])).used:
        source = tensor(a.source, a.transform.source_shape(a.leaf.shape))
        params[a.target] = jax.numpy.asarray(a.transform.apply(source, a.leaf.shape, a.source), a.leaf.dtype)
    run = Runner(model, model.pack(params), 1)
    got = run.run({0: IDS[0][:40]}, 40, 1)[0]
    assert {n: a.dtype.name for n, a in run.state["recurrent"].items()} == {"conv": "bfloat16", "delta": "float32"}
    expected = saved["logits_0"][:40]
    # These weights magnify rounding: transformers' own bfloat16 run is 4.7 % off its float32 run.
    assert np.abs(got - expected).mean() < 0.08 * np.abs(expected).mean()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attn_output_gate": False}, "attn_output_gate: False is not supported"),
        ({"mamba_ssm_dtype": "bfloat16"}, "mamba_ssm_dtype: 'bfloat16'"),
        ({"hidden_act": "relu"}, "hidden_act: 'relu'"),
        ({"linear_num_value_heads": 5}, "linear_num_value_heads 5 is not a multiple of linear_num_key_heads 2"),
        ({"layer_types": ["linear_attention", "mamba"]}, "layer type 'mamba' is not supported"),
        ({"layer_types": ["linear_attention"]}, "layer_types names 1 layers, num_hidden_layers is 5"),
        ({"linear_key_head_dim": None}, "no 'linear_key_head_dim'"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope type 'yarn'"),
    ],
)
def test_unsupported_variants_are_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(PoemError, match=message):
        lowered(CASES["qwen3_5"] | change)
