"""What the settings make of the machine, and what a start that fails leaves behind."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from pie_xla import machine, runtime
from pie_xla.config import EngineSettings
from pie_xla.engine import memory
from pie_xla.errors import PieError
from pie_xla.progress import Silent
from pie_xla.timings import Timings

GIB = 1 << 30


def test_state_is_sized_from_the_memory_it_will_lie_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "memory", lambda: (4 * GIB, 2 * GIB))
    assert runtime.engine_options(EngineSettings(), GIB, "cpu").state_bytes == GIB // 4
    assert runtime.engine_options(EngineSettings(), 3 * GIB, "cpu").state_bytes == 0
    assert runtime.engine_options(EngineSettings(), GIB, "gpu").state_bytes is None
    assert runtime.engine_options(EngineSettings(kv_memory=GIB), GIB, "tpu").state_bytes == GIB


def test_more_state_than_memory_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "memory", lambda: (4 * GIB, 3 * GIB))
    monkeypatch.setattr(memory, "free_bytes", lambda: 2 * GIB)
    settings = EngineSettings(kv_memory=2 * GIB)
    runtime.check_state_fits(settings, GIB, "cpu")
    runtime.check_state_fits(EngineSettings(), 9 * GIB, "cpu")
    with pytest.raises(PieError, match=r"engine\.kv_memory is 2GiB, but the weights leave only 1,024 MiB free"):
        runtime.check_state_fits(settings, GIB, "gpu")


def test_a_containers_cached_files_are_available(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_CGROUP", tmp_path)
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("900\n")
    (tmp_path / "memory.stat").write_text("anon 400\nactive_file 200\ninactive_file 300\n")
    assert machine.memory() == (1000, 600)


@pytest.mark.parametrize("failure", [PieError("no such platform"), KeyboardInterrupt()])
def test_a_start_that_fails_closes_the_sandbox(monkeypatch: pytest.MonkeyPatch, failure: BaseException) -> None:
    closed, go = threading.Event(), threading.Event()

    class Slow:
        def close(self) -> None:
            closed.set()

    def load(*ignored: Any) -> Slow:
        go.wait(10)
        return Slow()

    def fail(platform: str) -> None:
        raise failure

    monkeypatch.setattr(runtime, "wanted_models", lambda config, name, others: [])
    monkeypatch.setattr(runtime, "_load_language", lambda entry: None)
    monkeypatch.setattr(runtime, "_load_sandbox", load)
    monkeypatch.setattr(runtime, "import_jax", fail)
    config: Any = type("Config", (), {"engine": EngineSettings()})
    with pytest.raises(type(failure)):
        runtime.open_runtime(config, progress=Silent(), timings=Timings())
    assert not closed.is_set()  # nobody waited for it
    go.set()
    assert closed.wait(10)


def test_a_sandbox_that_failed_has_nothing_to_close() -> None:
    made: Future[Any] = Future()
    runtime._close_when_made(made)
    made.set_exception(PieError("no sandbox"))
