"""The compiled component's cache, with a build that takes no time."""

from __future__ import annotations

import errno
import os
import stat
import threading
import time
from contextlib import nullcontext
from pathlib import Path

import pytest
import wasmtime

from pie_xla.errors import PieError
from pie_xla.process.wasm import Sandbox, build, cache
from pie_xla.process.wasm.build import Sources
from pie_xla.process.wasm.engine_config import new_engine


class Notes:
    def __init__(self) -> None:
        self.tasks: list[str] = []
        self.notes: list[str] = []

    def task(self, name: str, total: float | None = None):
        self.tasks.append(name)
        return nullcontext()

    def note(self, text: str) -> None:
        self.notes.append(text)


class Fixture:
    """A cache with tiny sources, and a build that writes the smallest component there is."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("wit/world.wit", "component/app.py", "sdk/__init__.py"):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text("x")
        self.sources = Sources(folder / "wit", folder / "component", folder / "sdk")
        self.directory = folder / "cache" / "component"
        self.folder = folder
        self.progress = Notes()
        self.builds = 0
        monkeypatch.setattr(cache, "build_component", self._build)

    def _build(self, sources: Sources, target: Path, progress: Notes) -> None:
        self.builds += 1
        time.sleep(0.05)
        target.write_bytes(b"(component)")

    def ensure(self, verify=None):
        return cache.ensure_component(new_engine(), self.folder / "cache", self.progress, self.sources, verify)

    def one(self, pattern: str) -> Path:
        (path,) = self.directory.glob(pattern)
        return path


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fixture:
    return Fixture(tmp_path, monkeypatch)


def test_built_once_and_said_aloud(made):
    made.ensure()
    made.ensure()
    assert made.builds == 1
    assert made.progress.tasks == ["compiling the Python language component (once)"]
    assert not made.progress.notes


def test_a_changed_sdk_is_built_again(made):
    made.ensure()
    (made.sources.sdk / "new.py").write_text("y")
    made.ensure()
    assert made.builds == 2
    (made.sources.sdk / "__pycache__").mkdir()
    (made.sources.sdk / "__pycache__" / "new.pyc").write_text("z")
    made.ensure()
    assert made.builds == 2


def test_old_components_are_forgotten(made):
    for text in "abcde":
        (made.sources.sdk / "new.py").write_text(text)
        made.ensure()
    assert len(list(made.directory.glob("*.wasm"))) == len(list(made.directory.glob("*.cwasm"))) == 3
    assert len(list(made.directory.glob("*.json"))) == 3


def test_what_is_in_use_is_not_forgotten(made):
    made.ensure()
    used = made.one("*.cwasm").name
    for text in "abcde":
        (made.sources.sdk / "new.py").write_text(text)
        made.ensure()
        (made.sources.sdk / "new.py").unlink()
        made.ensure()
    assert made.builds == 6
    assert used in {path.name for path in made.directory.glob("*.cwasm")}


def test_left_overs_of_killed_builders_are_removed(made):
    made.ensure()
    (made.directory / "build-dead" / "src").mkdir(parents=True)
    (made.directory / ".new-dead").write_text("x")
    os.utime(made.directory / ".new-dead", (1, 1))
    (made.directory / ".new-live").write_text("x")
    (made.sources.sdk / "new.py").write_text("y")
    made.ensure()
    assert [path.name for path in made.directory.iterdir() if path.name.startswith((".new", "build"))] == [".new-live"]


def test_the_directory_is_private(made):
    made.directory.mkdir(parents=True)
    made.directory.chmod(0o777)
    made.ensure()
    assert stat.S_IMODE(made.directory.stat().st_mode) == 0o700


def test_a_directory_of_another_user_is_refused(made, monkeypatch):
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(PieError, match="belongs to another user"):
        made.ensure()


@pytest.mark.parametrize(
    "damage", [lambda data: data[: len(data) // 2], lambda data: data[:99] + b"?" + data[100:], lambda data: b""]
)
def test_a_damaged_file_is_made_again(made, damage):
    made.ensure()
    compiled = made.one("*.cwasm")
    good = compiled.read_bytes()
    compiled.write_bytes(damage(good))
    os.utime(compiled, ns=(1, 1))
    made.ensure()
    assert "damaged" in made.progress.notes[0] and compiled.name in made.progress.notes[0]
    assert compiled.stat().st_size == len(good)
    assert made.builds == 1  # only compiled again
    made.ensure()
    assert len(made.progress.notes) == 1


def test_a_touched_file_is_still_good(made):
    made.ensure()
    os.utime(made.one("*.cwasm"))
    made.ensure()
    assert not made.progress.notes and len(made.progress.tasks) == 1


def test_a_damaged_component_is_built_again(made):
    made.ensure()
    made.one("*.wasm").write_bytes(b"\0asm rubbish")
    made.one("*.cwasm").unlink()
    made.ensure()
    assert made.builds == 2 and "damaged" in made.progress.notes[0]


def test_another_engine_setting_compiles_again(made, monkeypatch):
    made.ensure()
    monkeypatch.setattr(cache.engine_config, "fingerprint", lambda: "another wasmtime")
    made.ensure()
    assert made.builds == 1 and len(made.progress.tasks) == 2


def test_a_failed_self_test_leaves_no_entry(made):
    def verify(component):
        raise PieError("not this wasmtime")

    for _ in range(2):
        with pytest.raises(PieError, match="not this wasmtime"):
            made.ensure(verify)
    assert not list(made.directory.glob("*.json"))
    seen = []
    made.ensure(seen.append)
    made.ensure(seen.append)
    assert len(seen) == 1  # once for each compiled component


def test_concurrent_builders(made):
    failures: list[BaseException] = []

    def ensure() -> None:
        try:
            made.ensure()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=ensure) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures and made.builds == 1
    assert len(made.progress.tasks) == 1


def test_full_disk(made, monkeypatch):
    made.ensure()
    made.one("*.cwasm").unlink()

    def full(self: Path, data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        with pytest.raises(PieError, match="No space left on device") as caught:
            made.ensure()
    assert "150 MB" in caught.value.hint
    assert not [path for path in made.directory.iterdir() if path.name.startswith((".new", "build"))]
    made.ensure()


def test_shipped_component_is_used_when_it_matches(made, monkeypatch, tmp_path):
    shipped = tmp_path / "package" / "_component" / f"python-{made.sources.key()}.wasm"
    shipped.parent.mkdir(parents=True)
    shipped.write_bytes(b"(component)")
    monkeypatch.setattr(build, "_PACKAGE", tmp_path / "package")
    made.ensure()
    assert made.builds == 0
    (made.sources.sdk / "new.py").write_text("changed")
    made.ensure()
    assert made.builds == 1


def test_default_sources_are_the_ones_of_this_tree():
    names = [name for name, _ in Sources.default().files()]
    assert "app.py" in names and "inferlet/__init__.py" in names and "wit/inferlet.wit" in names
    assert not [name for name in names if "__pycache__" in name]


@pytest.mark.slow
def test_a_build_that_fails_says_why(stub_sources, tmp_path):
    sdk = tmp_path / "inferlet"
    sdk.mkdir()
    (sdk / "__init__.py").write_text("")
    (sdk / "_host.py").write_text("import no_such_module_at_all\n")
    sources = Sources(stub_sources.wit, stub_sources.component, sdk)
    with pytest.raises(PieError, match="no_such_module_at_all"):
        Sandbox(tmp_path / "cache", sources=sources)
    left = [path.name for path in (tmp_path / "cache" / "component").iterdir()]
    assert left == ["lock"]


def test_wasmtime_reads_text_components():
    assert isinstance(wasmtime.component.Component(new_engine(), b"(component)"), wasmtime.component.Component)
