"""What cannot be built is refused by name: architectures, variants, configs, checkpoints."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from poem_cases import CASES
from poem_runner import lowered

from poem.spec import PoemError, Transform
from poem.weights import assign

LLAMA, GEMMA = CASES["llama"], CASES["gemma3"]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({**LLAMA, "model_type": "llama4"}, "no family for model_type 'llama4'.*nearest known one is 'llama'"),
        ({**LLAMA, "model_type": None}, "no model_type"),
        ({**LLAMA, "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope type 'yarn'.*llama3"),
        ({**LLAMA, "hidden_act": "relu"}, "hidden_act: 'relu' is not supported.*silu"),
        ({k: v for k, v in LLAMA.items() if k != "intermediate_size"}, "has no 'intermediate_size'"),
        ({**LLAMA, "vocab_size": "97"}, "vocab_size: '97' is not a int"),
        ({**LLAMA, "attention_bias": 1}, "attention_bias: 1 is not a bool"),
        ({**CASES["qwen2"], "layer_types": ["chunked_attention"] * 3}, "layer type 'chunked_attention'"),
        ({**CASES["qwen2"], "layer_types": ["full_attention"] * 4}, "layer_types names 4 layers"),
        ({**GEMMA, "attn_logit_softcapping": 50.0}, "attn_logit_softcapping: 50.0 is not supported"),
        ({**GEMMA, "use_bidirectional_attention": True}, "use_bidirectional_attention: True is not supported"),
        ({**GEMMA, "hidden_activation": "relu2"}, "hidden_activation: 'relu2'"),
    ],
)
def test_config_refused(config: dict[str, Any], message: str) -> None:
    """Each names the field or the architecture."""
    with pytest.raises(PoemError, match=f"(?s){message}"):
        lowered(config)


def test_both_spellings_of_rope() -> None:
    """transformers 4 wrote rope_theta, rope_scaling and rope_local_base_freq at the top."""
    older = {k: v for k, v in LLAMA.items() if k != "rope_parameters"} | {"rope_theta": 10000.0, "rope_scaling": None}
    assert lowered(older).outer.graph == lowered(LLAMA).outer.graph
    scaled = CASES["llama_llama3_rope"]
    scaling = {k: v for k, v in scaled["rope_parameters"].items() if k != "rope_theta"}
    older = {k: v for k, v in scaled.items() if k != "rope_parameters"} | {"rope_theta": 500.0, "rope_scaling": scaling}
    assert lowered(older).outer.graph == lowered(scaled).outer.graph
    older = {k: v for k, v in GEMMA.items() if k not in ("rope_parameters", "layer_types")}
    older |= {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "sliding_window_pattern": 3}
    assert lowered(older).outer.graph == lowered(GEMMA).outer.graph
    assert lowered({**GEMMA, "rope_parameters": None}).outer.graph == lowered(GEMMA).outer.graph


def names(config: dict[str, Any]) -> list[str]:
    """The checkpoint tensors a model of this configuration is made of."""
    model = lowered(config)
    out = []
    for target in model.stored:
        name = target.replace(".kernel", ".weight")
        out.append(name if name.startswith("lm_head") else f"model.{name}")
    return out


def test_assignment() -> None:
    """Every parameter has one tensor; a tied head is known and not used."""
    model = lowered(LLAMA)
    made = assign(model.weight_rules, model.stored, [*names(LLAMA), "lm_head.weight"])
    assert [a.target for a in made.used] == list(model.stored)
    assert made.unused == {"lm_head.weight": "the same as the embedding (tie_word_embeddings)"}
    by_target = {a.target: a for a in made.used}
    kernel = by_target["layers.1.self_attn.o_proj.kernel"]
    assert kernel.source == "model.layers.1.self_attn.o_proj.weight"
    assert (kernel.transform, kernel.leaf.shape) == (Transform.SPLIT_IN, (32, 4, 8))


def test_assignment_refused() -> None:
    """Unknown tensors, tensors the config has no place for, missing tensors, wrong shapes."""
    model = lowered(LLAMA)
    known = names(LLAMA)
    with pytest.raises(PoemError, match=re.escape("does not know: model.visual.patch")):
        assign(model.weight_rules, model.stored, [*known, "model.visual.patch"])
    with pytest.raises(PoemError, match=re.escape("does not know: model.layers.0.self_attn.q_proj.bias")):
        assign(model.weight_rules, model.stored, [*known, "model.layers.0.self_attn.q_proj.bias"])
    with pytest.raises(PoemError, match=re.escape("does not know: model.layers.3.input_layernorm.weight")):
        assign(model.weight_rules, model.stored, [*known, "model.layers.3.input_layernorm.weight"])
    with pytest.raises(PoemError, match=re.escape("lacks the tensors of layers.1.mlp.up_proj.kernel")):
        assign(model.weight_rules, model.stored, [n for n in known if n != "model.layers.1.mlp.up_proj.weight"])
    with pytest.raises(PoemError, match=r"tensor x has shape \[32, 31\], but the config says \[32, 32\]"):
        Transform.SPLIT_OUT.apply(np.zeros((32, 31), np.float32), (4, 8, 32), "x")


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_gemma3_of_a_multimodal_checkpoint(prefix: str) -> None:
    """Both spellings of the text tower's names; the vision tower is named and left out."""
    text = {k: v for k, v in GEMMA.items() if k != "model_type"}
    model = lowered({"model_type": "gemma3", "text_config": text, "vision_config": {}})
    tensors = [name.replace("model.", prefix, 1) for name in names(GEMMA)]
    vision = "vision_tower.vision_model.embeddings.patch_embedding.weight"
    made = assign(model.weight_rules, model.stored, [*tensors, vision])
    assert len(made.used) == len(model.stored)
    assert list(made.unused) == [vision]
