"""Qwen3.5 against transformers (stored float32 references), and its recurrent state: forks, retries, padding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from poem_cases import tensor
from poem_runner import Runner, load, lowered
from qwen3_5_cases import CASES, prompts

from poem.lower import Loop, LoweredModel
from poem.spec import PoemError, StateKind
from poem.weights import assign

Array = np.ndarray[Any, Any]
IDS = prompts()


def stored(name: str) -> dict[str, Array]:
    with np.load(Path(__file__).parent / "reference" / f"{name}.npz") as saved:
        return dict(saved)


def runner(name: str, loop: Loop, rows: int) -> tuple[Runner, list[Array]]:
    """A runner of the case, and the reference logits of each prompt."""
    saved = stored(name)
    model = lowered(CASES[name], loop)
    return Runner(model, load(model, [str(n) for n in saved["tensors"]]), rows), [
        saved[f"logits_{i}"] for i in range(3)
    ]


def close(got: Array, expected: Array) -> None:
    """Within 2e-4 of the largest logit, and the same greedy ids."""
    assert got.shape == expected.shape
    assert np.abs(got - expected).max() <= 2e-4 * np.abs(expected).max()
    assert (got.argmax(-1) == expected.argmax(-1)).all()


@pytest.mark.parametrize("loop", Loop)
@pytest.mark.parametrize("name", CASES)
def test_prompts_of_different_lengths_in_one_launch(name: str, loop: Loop) -> None:
    run, expected = runner(name, loop, 3)
    got = run.run(dict(enumerate(IDS)), 92, 4)
    for i in range(3):
        close(got[i], expected[i])


@pytest.mark.parametrize("loop", Loop)
@pytest.mark.parametrize("name", CASES)
def test_chunks_then_single_tokens(name: str, loop: Loop) -> None:
    """A prompt in chunks of 66, 1, 19 and then token by token, beside one that starts late and a row without tokens."""
    run, expected = runner(name, loop, 2)
    parts: dict[int, list[Array]] = {0: [], 1: []}
    for begin, end in ((0, 66), (66, 67), (67, 86)):
        parts[0].append(run.run({0: IDS[0][begin:end]}, 66, 2)[0])
    for t in range(4):
        chunks = {1: IDS[1][t : t + 1], 0: IDS[0][86 + t : 87 + t]} if t else {0: IDS[0][86:87], 1: IDS[1][:1]}
        for row, logits in run.run(chunks, 1, 2).items():
            parts[row].append(logits)
    parts[1].append(run.run({1: IDS[1][4:]}, 66, 2)[1])
    for row in (0, 1):
        close(np.concatenate(parts[row]), expected[row])


@pytest.mark.parametrize("loop", Loop)
def test_a_fork_reads_the_same_slot_and_writes_its_own(loop: Loop) -> None:
    run, expected = runner("qwen3_5", loop, 3)
    prefix = 20  # whole pages, so that rows may share them
    close(run.run({0: IDS[0][:prefix]}, 24, 3)[0], expected[0][:prefix])
    origin = int(run.slot[0])
    for row in (1, 2):
        run.table[row, : prefix // 4] = run.table[0, : prefix // 4]
        run.lengths[row], run.slot[row] = run.lengths[0], origin
    rest = IDS[0][prefix : prefix + 5]
    got = run.run({0: rest, 1: rest, 2: IDS[1][:5]}, 5, 3)
    np.testing.assert_array_equal(got[0], got[1])
    close(got[0], expected[0][prefix : prefix + 5])
    assert np.abs(got[2] - got[0]).max() > 0.1
    slots = {row: slot_of(run, int(run.slot[row])) for row in range(3)}
    assert len(set(map(int, run.slot))) == 3 and origin not in run.slot
    for mine, other in zip(slots[0], slots[1], strict=True):
        np.testing.assert_array_equal(mine, other)
    assert all(np.abs(a - b).max() > 1e-3 for a, b in zip(slots[0], slots[2], strict=True))
    close(run.run({1: IDS[0][prefix + 5 : prefix + 12]}, 7, 3)[1], expected[0][prefix + 5 : prefix + 12])


def test_a_retry_starts_where_the_first_attempt_did() -> None:
    run, expected = runner("qwen3_5", Loop.SCAN, 2)
    run.run({0: IDS[0][:30]}, 30, 2)
    origin = int(run.slot[0])
    before = slot_of(run, origin)
    first = run.run({0: IDS[0][30:37]}, 8, 2)[0]
    for kept, now in zip(before, slot_of(run, origin), strict=True):
        np.testing.assert_array_equal(kept, now)
    run.slot[0], run.lengths[0] = origin, 30
    again = run.run({0: IDS[0][30:37]}, 8, 2)[0]
    np.testing.assert_array_equal(first, again)
    close(again, expected[0][30:37])


@pytest.mark.parametrize("width", [1, 8])
def test_padding_tokens_leave_the_state_alone(width: int) -> None:
    """A row of no tokens copies its slot bit by bit; wider padding changes nothing that matters."""
    run, _ = runner("qwen3_5_untied", Loop.UNROLLED, 1)
    run.run({0: IDS[0][:5]}, 5, 1)
    narrow = slot_of(run, int(run.slot[0]))
    run.run({0: IDS[0][:0]}, width, 1)
    for a, b in zip(narrow, slot_of(run, int(run.slot[0])), strict=True):
        np.testing.assert_array_equal(a, b)
    wide, _ = runner("qwen3_5_untied", Loop.UNROLLED, 1)
    wide.run({0: IDS[0][:5]}, 70, 1)
    for a, b in zip(narrow, slot_of(wide, int(wide.slot[0])), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)


def test_both_loops_keep_the_same_state() -> None:
    states = []
    for loop in Loop:
        run, _ = runner("qwen3_5", loop, 1)
        run.run({0: IDS[0][:70]}, 70, 1)
        states.append(slot_of(run, int(run.slot[0])))
    for a, b in zip(*states, strict=True):
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
    from pie_xla.kernels.ops import Kernel, ops_for
    from poem.lower import lower

    model = lower(CASES["qwen3_5"], ops=ops_for(Kernel.XLA), dtype="bfloat16", page_size=4)
    saved = stored("qwen3_5")
    params = {}
    for a in assign(model.weight_rules, model.stored, map(str, saved["tensors"])).used:
        source = tensor(a.source, a.transform.source_shape(a.leaf.shape))
        params[a.target] = jax.numpy.asarray(a.transform.apply(source, a.leaf.shape, a.source), a.leaf.dtype)
    run = Runner(model, model.pack(params), 1)
    got = np.concatenate([run.run({0: IDS[0][:40]}, 40, 1)[0], run.run({0: IDS[0][40:41]}, 1, 1)[0]])
    assert {n: a.dtype.name for n, a in run.state["recurrent"].items()} == {"conv": "bfloat16", "delta": "float32"}
    expected = saved["logits_0"][:41]
    assert np.abs(got - expected).mean() < 0.05 * np.abs(expected).mean()


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
