"""The fake engine, for every test of a process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fake_engine import FakeEngine


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    engine = FakeEngine()
    yield engine
    engine.close()
