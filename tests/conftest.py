"""What every test runs under: strict JAX, warnings as errors, four virtual CPU devices, a real model imported once."""

from __future__ import annotations

import fcntl
import os
import queue
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pie_xla.config import Config
    from pie_xla.hub.store import ModelEntry
    from pie_xla.runtime import Runtime

# Before JAX is imported anywhere, here and in the processes that tests start.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_NUMPY_DTYPE_PROMOTION"] = "strict"
os.environ["JAX_NUMPY_RANK_PROMOTION"] = "raise"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4".strip()
for name in ("HF_TOKEN", "HF_HUB_OFFLINE", "PIE_XLA_CONFIG", "PIE_XLA_HOME"):
    os.environ.pop(name, None)

DEADLINE = 120.0  # seconds for one inferlet of a test


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--share", metavar="K/N", help="run only share K (from 0) of N of the selected tests")


@pytest.hookimpl(trylast=True)  # after -m, so that each share gets its part of what that selects
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    share = config.getoption("--share")
    if share is None:
        return
    number, total = map(int, share.split("/"))
    kept = [item for item in items if zlib.crc32(item.nodeid.encode()) % total == number]
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept


@pytest.fixture(scope="session")
def model_cache() -> Path:
    """A folder that outlives the run, for real models and what is compiled for them."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = base / "pie-xla-tests"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def real_config(model_cache: Path) -> Config:
    """Settings under which everything lies in `model_cache`; a small state pool, and limits that are reached soon."""
    from pie_xla import config

    environment = config.Environment.read({"PIE_XLA_HOME": str(model_cache)})
    settings = f"""
        [model]
        store = "{model_cache / "store"}"
        [engine]
        kv_memory = "512MiB"
        max_rows = 16
        [limits]
        memory = "192MiB"
        cpu_time = "5s"
        output = "1MiB"
    """
    return config.parse(settings, environment)


@pytest.fixture(scope="session")
def smollm2(real_config: Config) -> ModelEntry:
    """SmolLM2-135M-Instruct, imported once from the package that ships it."""
    from pie_xla.config import DEFAULT_SOURCE
    from pie_xla.hub.importing import import_model
    from pie_xla.hub.store import Store

    # Workers of one run, and runs side by side, wait for the first.
    with (real_config.environment.data_dir / "import.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return import_model(DEFAULT_SOURCE, Store(real_config.store_dir))


@pytest.fixture(scope="session")
def engine_runtime(real_config: Config, smollm2: ModelEntry) -> Iterator[Runtime]:
    """A running engine on SmolLM2, with the sandbox and native mode."""
    from pie_xla.progress import Silent
    from pie_xla.runtime import open_runtime
    from pie_xla.timings import Timings

    with open_runtime(real_config, smollm2.name, progress=Silent(), timings=Timings()) as runtime:
        yield runtime
        assert runtime.engine.stats()["misses"] == {}, "a step waited for a compile"


@dataclass
class Outcome:
    """How an inferlet of a test ended, and all it said. `failure` is None if it returned."""

    sent: str = ""
    logs: list[tuple[int, str]] = field(default_factory=list)
    result: Any = None
    failure: str | None = None

    @property
    def log(self) -> str:
        return "".join(text for _, text in self.logs)


RunInferlet = Callable[..., Outcome]


@pytest.fixture
def run_inferlet(engine_runtime: Runtime) -> RunInferlet:
    """Run a program's text on SmolLM2 to its end: `run_inferlet(source, input={}, native=False, seed=None)`."""
    from pie_xla.launch import Event, Failed, Launch, Logged, Returned, Sent

    def run(source: str, input: dict[str, Any] | None = None, native: bool = False, seed: int | None = None) -> Outcome:
        events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        launched = engine_runtime.launch(Launch(source, "main.py", input or {}, native, seed), events.put)
        outcome = Outcome()
        try:
            while True:
                match events.get(timeout=DEADLINE):
                    case Sent(text):
                        outcome.sent += text
                    case Logged(level, text):
                        outcome.logs.append((level, text))
                    case Returned(value):
                        outcome.result = value
                        return outcome
                    case Failed(message):
                        outcome.failure = message
                        return outcome
        finally:
            launched.kill("the test is over")

    return run
