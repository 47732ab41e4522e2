from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pie_xla.process.wasm import Sandbox
from pie_xla.process.wasm.build import Sources

sys.path.insert(0, str(Path(__file__).parent))

from wasm_fake_host import Guests

_TREE = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="session")
def stub_sources() -> Sources:
    """The component with a stand-in for the SDK, so that the SDK's changes do not rebuild it."""
    here = Path(__file__).parent
    inferlets = _TREE / "inferlets"
    return Sources(inferlets / "wit", inferlets / "sdk" / "python" / "component", here / "stub_sdk" / "inferlet")


@pytest.fixture(scope="session")
def component_cache() -> Path:
    """The user's own cache: the component is built once for all test runs."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pie-xla-tests"


@pytest.fixture(scope="session")
def sandbox(stub_sources: Sources, component_cache: Path) -> Iterator[Sandbox]:
    sandbox = Sandbox(component_cache, sources=stub_sources)
    yield sandbox
    sandbox.close()


@pytest.fixture
def guests(sandbox: Sandbox) -> Guests:
    return Guests(sandbox)
