"""Which family file answers for a checkpoint's `model_type`."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Mapping
from typing import Any, cast

from poem.family import Family
from poem.spec import PoemError

FAMILIES: Mapping[str, str] = {
    "llama": "poem.models.llama",
    "qwen2": "poem.models.qwen2",
    "qwen3": "poem.models.qwen3",
    "gemma3": "poem.models.gemma3",
    "gemma3_text": "poem.models.gemma3",
    "qwen3_5": "poem.models.qwen3_5",
    "qwen3_5_text": "poem.models.qwen3_5",
}


def family_of(config: Mapping[str, Any]) -> Family:
    """The family module for a config.json; PoemError names the nearest known one when there is none."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise PoemError("config.json has no model_type", f"known: {', '.join(FAMILIES)}")
    if model_type not in FAMILIES:
        near = difflib.get_close_matches(model_type, FAMILIES, n=1, cutoff=0.3)
        hint = f"the nearest known one is {near[0]!r}; " if near else ""
        raise PoemError(f"no family for model_type {model_type!r}", f"{hint}known: {', '.join(FAMILIES)}")
    return cast(Family, importlib.import_module(FAMILIES[model_type]))
