"""GGUF files: every tensor as the checkpoint held it; damage and strangers refused by name."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from tiny_checkpoint import tensors, write_gguf

from pie_xla.errors import PieError
from pie_xla.hub.gguf_file import GgufFile
from pie_xla.hub.gguf_model import GgufCheckpoint, unpermute
from pie_xla.hub.origin import from_gguf
from pie_xla.hub.weights import plan_weights


def test_every_tensor_comes_back_as_the_checkpoint_held_it(tmp_path: Path) -> None:
    expected = tensors()
    checkpoint = GgufCheckpoint(GgufFile(write_gguf(tmp_path / "tiny.gguf", expected)))
    assert set(checkpoint.shapes) == set(expected)
    for name, array in expected.items():
        assert checkpoint.shapes[name] == array.shape
        np.testing.assert_array_equal(checkpoint.read(name), array, err_msg=name)


def test_the_config_has_the_checkpoints_own_field_names(tmp_path: Path) -> None:
    config = GgufCheckpoint(GgufFile(write_gguf(tmp_path / "tiny.gguf"))).config
    expected = {
        "model_type": "llama",
        "vocab_size": 48,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "attention_bias": False,
    }
    assert {key: config[key] for key in expected} == expected


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1", "Q5_0", "F16", "BF16"])
def test_quantized_tensors_are_what_the_gguf_package_says(tmp_path: Path, kind: str) -> None:
    how = gguf.GGMLQuantizationType[kind]
    file = GgufFile(write_gguf(tmp_path / "tiny.gguf", quantize={"token_embd.weight": how, "blk.1.attn_q.weight": how}))
    checkpoint = GgufCheckpoint(file)
    source = tensors()["model.embed_tokens.weight"]
    expected = gguf.quants.dequantize(gguf.quants.quantize(source, how), how)
    value = checkpoint.read("model.embed_tokens.weight")
    assert value.dtype == np.float32
    np.testing.assert_array_equal(value, expected)
    query = tensors()["model.layers.1.self_attn.q_proj.weight"]
    assert (
        np.abs(checkpoint.read("model.layers.1.self_attn.q_proj.weight") - query).max() < 0.3
    )  # rows, not shuffled ones


def test_unpermute_undoes_the_interleaved_order_per_head() -> None:
    # two heads of four rows; the file interleaves halves: (0, 2, 1, 3)
    stored = np.array([0, 2, 1, 3, 10, 12, 11, 13], np.float32)[:, None]
    assert unpermute(stored, 2)[:, 0].tolist() == [0, 1, 2, 3, 10, 11, 12, 13]


def test_gemma_norms_lose_the_one_that_the_converter_adds(tmp_path: Path) -> None:
    path = tmp_path / "gemma.gguf"
    writer = gguf.GGUFWriter(path, "gemma3")
    for add, value in [
        (writer.add_block_count, 7),
        (writer.add_context_length, 64),
        (writer.add_embedding_length, 32),
        (writer.add_feed_forward_length, 32),
        (writer.add_head_count, 4),
        (writer.add_head_count_kv, 1),
        (writer.add_key_length, 16),
        (writer.add_sliding_window, 8),
    ]:
        add(value)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)
    norm = np.linspace(0.5, 1.5, 32, dtype=np.float32)
    for name in (
        "output_norm",
        "blk.0.attn_q_norm",
        "blk.0.post_attention_norm",
        "blk.0.ffn_norm",
        "blk.0.post_ffw_norm",
    ):
        writer.add_tensor(f"{name}.weight", norm)
    writer.add_tensor("token_embd.weight", np.ones((16, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    checkpoint = GgufCheckpoint(GgufFile(path))
    for name in (
        "model.norm",
        "model.layers.0.self_attn.q_norm",
        "model.layers.0.post_attention_layernorm",
        "model.layers.0.pre_feedforward_layernorm",
        "model.layers.0.post_feedforward_layernorm",
    ):
        np.testing.assert_array_equal(checkpoint.read(f"{name}.weight"), norm - 1)
    np.testing.assert_array_equal(checkpoint.read("model.embed_tokens.weight"), 1)
    config = checkpoint.config
    assert config["model_type"] == "gemma3_text"
    assert (config["head_dim"], config["query_pre_attn_scalar"], config["sliding_window"]) == (16, 16, 8)
    assert [i for i, kind in enumerate(config["layer_types"]) if kind == "full_attention"] == [5]
    assert (config["rope_theta"], config["rope_local_base_freq"]) == (1e6, 1e4)


def test_wrong_magic(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(b"PK\x03\x04 something else")
    with pytest.raises(PieError, match=r"x\.gguf is not a GGUF file: it starts with b'PK"):
        GgufFile(path)


def test_empty_file(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.touch()
    with pytest.raises(PieError, match="is not a GGUF file"):
        GgufFile(path)


def test_truncation_anywhere_is_named(tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "whole.gguf").read_bytes()
    path = tmp_path / "cut.gguf"
    messages = set()
    for size in [5, 12, 30, 100, 400, 900, 1400, 2000, len(whole) // 2, len(whole) - 1]:
        path.write_bytes(whole[:size])
        with pytest.raises(PieError, match="is truncated") as caught:
            GgufFile(path)
        messages.add(caught.value.message.split("inside ")[-1].split(" needs")[0])
    assert any("tokenizer.ggml" in message for message in messages)
    assert any("tensor" in message for message in messages)


def test_flipped_counts_do_not_exhaust_memory(tmp_path: Path) -> None:
    whole = bytearray(write_gguf(tmp_path / "whole.gguf").read_bytes())
    at = whole.index(b"tokenizer.ggml.tokens") + len(b"tokenizer.ggml.tokens") + 8  # past the types: the array's count
    whole[at : at + 8] = (1 << 60).to_bytes(8, "little")
    path = tmp_path / "lie.gguf"
    path.write_bytes(whole)
    with pytest.raises(PieError, match=r"truncated.*tokenizer\.ggml\.tokens"):
        GgufFile(path)


def test_unknown_architecture_names_the_nearest(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "x.gguf", architecture="qwen2moe")
    with pytest.raises(PieError, match="architecture 'qwen2moe' is not known; the nearest is 'qwen2'"):
        GgufCheckpoint(GgufFile(path))


def test_unknown_version(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(b"GGUF" + (3).to_bytes(4, "big") + bytes(16))
    with pytest.raises(PieError, match="big endian"):
        GgufFile(path)


def test_missing_tensor_is_named(tmp_path: Path) -> None:
    checkpoint = GgufCheckpoint(GgufFile(write_gguf(tmp_path / "x.gguf", drop=("blk.1.ffn_up.weight",))))
    with pytest.raises(PieError, match=r"layers\.1\.mlp\.up_proj"):
        plan_weights(checkpoint, "float32")


def test_unexpected_tensor_is_named(tmp_path: Path) -> None:
    arrays = tensors() | {"blk.0.strange.weight": np.zeros((4, 4), np.float32)}
    checkpoint = GgufCheckpoint(GgufFile(write_gguf(tmp_path / "x.gguf", arrays)))
    with pytest.raises(PieError, match=r"blk\.0\.strange\.weight"):
        plan_weights(checkpoint, "float32")


def test_rope_scaling_that_the_file_does_not_say_in_full_is_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "x.gguf", extra={"llama.rope.scaling.type": "yarn"})
    with pytest.raises(PieError, match="rope scaling 'yarn'"):
        GgufCheckpoint(GgufFile(path))


def test_flipped_bytes_are_damage_never_a_crash(tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "whole.gguf").read_bytes()
    header = whole.index(b"blk.1.ffn_norm")
    rng = np.random.default_rng(3)
    path = tmp_path / "flipped.gguf"
    refused = 0
    for _ in range(150):
        data = bytearray(whole)
        for at in rng.integers(4, header, 3):
            data[at] = rng.integers(0, 256)
        path.write_bytes(data)
        try:
            plan_weights(from_gguf(path).checkpoint, "float32")
        except PieError:
            refused += 1
    assert refused > 75


def test_split_file_is_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "x.gguf", extra={"split.count": 3})
    with pytest.raises(PieError, match="one of 3 files of a split GGUF"):
        GgufFile(path)
