"""Models on disk: import, store, tokenizer, chat template. Heavy modules are loaded by the functions that need them."""

from __future__ import annotations

from pie_xla.hub.importing import Remotes, import_model
from pie_xla.hub.known import DEFAULT_MODEL, DEFAULT_SOURCE, GEMMA_SOURCE
from pie_xla.hub.store import Generation, ModelEntry, Store

__all__ = [
    "DEFAULT_MODEL",
    "DEFAULT_SOURCE",
    "GEMMA_SOURCE",
    "Generation",
    "ModelEntry",
    "Remotes",
    "Store",
    "import_model",
]
