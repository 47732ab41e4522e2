from __future__ import annotations

import os
import queue
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from pie_xla.process.wasm import GuestExit, GuestHandle, Limits, Sandbox
from pie_xla.process.wasm.build import Sources

sys.path.insert(0, str(Path(__file__).parent))

from wasm_fake_host import FakeHost

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


@dataclass
class Run:
    """A started guest."""

    host: FakeHost
    handle: GuestHandle
    exits: queue.SimpleQueue[GuestExit] = field(default_factory=queue.SimpleQueue)

    def exit(self, timeout: float = 60.0) -> GuestExit:
        return self.exits.get(timeout=timeout)


class Guests:
    """Starts programs in one sandbox."""

    def __init__(self, sandbox: Sandbox) -> None:
        self.sandbox = sandbox

    def start(self, source: str, value: Any = None, limits: Limits | None = None, host: FakeHost | None = None) -> Run:
        host = host or FakeHost()
        exits: queue.SimpleQueue[GuestExit] = queue.SimpleQueue()
        handle = self.sandbox.spawn(source, "main.py", value, host, exits.put, limits or Limits())
        return Run(host, handle, exits)

    def run(
        self, source: str, value: Any = None, limits: Limits | None = None, host: FakeHost | None = None
    ) -> GuestExit:
        return self.start(source, value, limits, host).exit()


@pytest.fixture(scope="session")
def sandbox(stub_sources: Sources, component_cache: Path) -> Iterator[Sandbox]:
    sandbox = Sandbox(component_cache, sources=stub_sources)
    yield sandbox
    sandbox.close()


@pytest.fixture
def guests(sandbox: Sandbox) -> Guests:
    return Guests(sandbox)
