"""Models on disk: import, store, tokenizer, chat template. Heavy modules are loaded by the functions that need them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pie_xla.hub.known import DEFAULT_MODEL, DEFAULT_SOURCE, GEMMA_SOURCE
from pie_xla.hub.store import Generation, ModelEntry, Store

if TYPE_CHECKING:
    from pie_xla.hub.importing import Remotes, import_model

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


def __getattr__(name: str) -> Any:
    """The importer on first use (PEP 562): a warm run opens the store and needs none of it."""
    if name in ("Remotes", "import_model"):
        from pie_xla.hub import importing

        return getattr(importing, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
