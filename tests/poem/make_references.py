"""Makes reference/*.npz with transformers and torch: `python tests/poem/make_references.py [case ...]`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from poem_cases import CASES, prompts, tensor


def reference(config: dict[str, Any]) -> dict[str, np.ndarray[Any, Any]]:
    """logits_i f32[T, V] of each prompt alone, and the checkpoint's tensor names with their shapes."""
    kinds = dict(config)
    settings = transformers.AutoConfig.for_model(kinds.pop("model_type"), **kinds)
    settings._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(settings, dtype=torch.float32).eval()
    saved = model.state_dict()
    if config["tie_word_embeddings"]:
        saved = {name: value for name, value in saved.items() if name != "lm_head.weight"}
    with torch.no_grad():
        for name, value in saved.items():
            value.copy_(torch.from_numpy(tensor(name, tuple(value.shape))))
        logits = [
            model(torch.from_numpy(ids).long()[None], use_cache=False).logits[0].numpy()
            for ids in prompts(settings.vocab_size)
        ]
    names = np.array([f"{name} {' '.join(map(str, value.shape))}" for name, value in saved.items()])
    return {"tensors": names, **{f"logits_{i}": value for i, value in enumerate(logits)}}


def main() -> None:
    """Write the cases named on the command line, or all."""
    folder = Path(__file__).parent / "reference"
    for name in sys.argv[1:] or CASES:
        values = reference(CASES[name])
        np.savez_compressed(folder / f"{name}.npz", **values)  # type: ignore[arg-type]
        print(name, f"max|logit| {max(np.abs(values[f'logits_{i}']).max() for i in range(3)):.2f}")


if __name__ == "__main__":
    main()
