"""Stored expectations, and the second real model."""

from __future__ import annotations

import fcntl
import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from pie_xla.config import Config
from pie_xla.hub import GEMMA_SOURCE, ModelEntry, Store, import_model


@pytest.fixture(scope="session")
def expectations() -> dict[str, Any]:
    path = Path(__file__).with_name("expectations.json.gz")
    return dict(json.loads(gzip.decompress(path.read_bytes())))


@pytest.fixture(scope="session")
def gemma3(real_config: Config) -> ModelEntry:
    """Gemma-3-270M beside the shared SmolLM2; 240 MB to download, so its tests are slow ones."""
    with (real_config.environment.data_dir / "import.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return import_model(GEMMA_SOURCE, Store(real_config.store_dir))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whoever uses a real model's weights is marked so."""
    for item in items:
        if isinstance(item, pytest.Function) and {"smollm2", "gemma3"} & set(item.fixturenames):
            item.add_marker(pytest.mark.model)
