"""qwen2 (biases) and qwen3 (QK-norm): the same parameters from a directory and from a GGUF file, not permuted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_checkpoint import CONFIG, tensors, write_directory, write_gguf

from pie_xla.hub import ModelEntry, Store, import_model
from pie_xla.hub.load import load_params
from pie_xla.hub.weights import Shapes
from poem.lower import lower


def arrays(family: str) -> dict[str, np.ndarray[Any, Any]]:
    rng = np.random.default_rng(5)
    sizes = {
        "qwen2": {"q_proj.bias": 32, "k_proj.bias": 16, "v_proj.bias": 16},
        "qwen3": {"q_norm.weight": 8, "k_norm.weight": 8},
    }
    extra = {
        f"model.layers.{i}.self_attn.{name}": rng.standard_normal(size, np.float32)
        for i in range(2)
        for name, size in sizes[family].items()
    }
    return tensors() | extra


def params(entry: ModelEntry) -> dict[str, Any]:
    return load_params(entry, lower(entry.config, ops=Shapes()).stored)


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_directory_and_gguf_agree(family: str, tmp_path: Path) -> None:
    source = arrays(family)
    store = Store(tmp_path / "store")
    config = CONFIG | {"model_type": family, "attention_bias": False, "use_sliding_window": False}
    directory = import_model(str(write_directory(tmp_path / "d", source, config)), store)
    gguf = import_model(str(write_gguf(tmp_path / "g.gguf", source, family)), store)
    assert directory.manifest.model_type == gguf.manifest.model_type == family
    ours, theirs = params(directory), params(gguf)
    assert ours.keys() == theirs.keys()
    assert len(ours) == len(source)
    for path, value in ours.items():
        np.testing.assert_array_equal(value, theirs[path], err_msg=path)
    flat = np.asarray(theirs["layers.1.self_attn.q_proj.kernel"]).reshape(32, 32)
    np.testing.assert_array_equal(flat, source["model.layers.1.self_attn.q_proj.weight"])
    added = "q_proj.bias" if family == "qwen2" else "q_norm.weight"
    np.testing.assert_array_equal(
        np.asarray(theirs[f"layers.0.self_attn.{added}"]).reshape(-1), source[f"model.layers.0.self_attn.{added}"]
    )
