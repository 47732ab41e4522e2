"""Makes reference/qwen3_5*.npz with transformers and torch: `python tests/poem/make_qwen3_5_references.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from poem_cases import tensor
from qwen3_5_cases import CASES, prompts


def text_config(config: dict[str, Any]) -> Any:
    """The transformers config, with its plain attention."""
    kinds = dict(config)
    settings = transformers.AutoConfig.for_model(kinds.pop("model_type"), **kinds)
    settings._attn_implementation = "eager"
    return settings


def reference(config: dict[str, Any]) -> dict[str, np.ndarray[Any, Any]]:
    """logits_i f32[T, V] of each prompt alone, the checkpoint's tensor names, and a multimodal checkpoint's."""
    model = transformers.AutoModelForCausalLM.from_config(text_config(config), dtype=torch.float32).eval()
    with torch.no_grad():
        for name, value in model.state_dict().items():
            if name != "lm_head.weight" or not config["tie_word_embeddings"]:
                value.copy_(torch.from_numpy(tensor(name, tuple(value.shape))))
        logits = [model(torch.from_numpy(ids).long()[None], use_cache=False).logits[0].numpy() for ids in prompts()]
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
    both = transformers.Qwen3_5Config(
        text_config=dict(config), vision_config=vision, tie_word_embeddings=config["tie_word_embeddings"]
    )
    with torch.device("meta"):
        multimodal = transformers.Qwen3_5ForConditionalGeneration(both)
    return {
        "tensors": np.array(list(model.state_dict())),
        "multimodal": np.array(list(multimodal.state_dict())),
        **{f"logits_{i}": value for i, value in enumerate(logits)},
    }


def main() -> None:
    """Write all cases."""
    for name, config in CASES.items():
        values = reference(config)
        np.savez_compressed(Path(__file__).parent / "reference" / f"{name}.npz", **values)  # type: ignore[arg-type]
        print(name, f"max|logit| {max(np.abs(values[f'logits_{i}']).max() for i in range(3)):.2f}")


if __name__ == "__main__":
    main()
