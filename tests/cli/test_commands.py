"""The small commands, called in this process: what they print, what they change, how they refuse."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pie_xla import __version__
from pie_xla.cli.doctor import Verdict, hardware, store, versions
from pie_xla.cli.main import COMMANDS, invoke
from pie_xla.config import DEFAULT_SOURCE, Environment, load


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PIE_XLA_HOME", str(tmp_path))
    return tmp_path


Said = pytest.CaptureFixture[str]


def test_version_and_every_commands_help(capsys: Said) -> None:
    assert invoke(["--version"]) == 0
    assert capsys.readouterr().out == f"pie-xla, version {__version__}\n"
    for name in COMMANDS:
        assert invoke([name, "--help"]) == 0
        assert capsys.readouterr().out.startswith(f"Usage: pie-xla {name}")


def test_config_init_set_show(home: Path, capsys: Said) -> None:
    assert invoke(["config", "init"]) == 0
    assert capsys.readouterr().out == f"{home / 'config.toml'}\n"
    assert invoke(["config", "init"]) == 2
    assert "exists already" in capsys.readouterr().err
    assert invoke(["config", "set", "engine.max_rows", "4"]) == 0
    assert invoke(["config", "set", "engine.max_row", "4"]) == 2
    assert "did you mean 'engine.max_rows'?" in capsys.readouterr().err
    assert invoke(["config", "show"]) == 0
    shown = capsys.readouterr().out
    line = (home / "config.toml").read_text().splitlines().index("max_rows = 4") + 1
    assert f"max_rows = 4  # {home / 'config.toml'}:{line}\n" in shown and "page_size = 16\n" in shown
    assert invoke(["config", "init", "--force"]) == 0
    assert load(Environment.read()).engine.max_rows == 32


def test_config_set_makes_a_file_where_there_is_none(home: Path) -> None:
    assert invoke(["config", "set", "server.port", "9"]) == 0
    assert load(Environment.read()).server.port == 9
    assert "# kv_memory" in (home / "config.toml").read_text()


def test_a_broken_file_stops_every_command_that_reads_it(home: Path, capsys: Said) -> None:
    (home / "config.toml").write_text("[engine]\nmax_rowz = 1\n")
    for words in (["config", "show"], ["cache", "list"], ["model", "list"]):
        assert invoke(words) == 2
        assert f"{home / 'config.toml'}:2: unknown setting 'max_rowz'" in capsys.readouterr().err
    assert invoke(["doctor"]) == 1
    assert capsys.readouterr().out.startswith("fail  config")


def test_cache_list_and_clear(home: Path, capsys: Said) -> None:
    for part in ("executables", "component"):
        (home / "cache" / part).mkdir(parents=True)
        (home / "cache" / part / "file").write_bytes(b"x" * 100_000)
    assert invoke(["cache", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:4] for line in lines] == [
        [part, "1", "files", "0.1"] for part in ("executables", "component")
    ]
    assert invoke(["cache", "clear", "executable"]) == 2
    assert "parts: executables, component" in capsys.readouterr().err
    assert invoke(["cache", "clear", "executables"]) == 0
    assert sorted(path.name for path in (home / "cache").iterdir()) == ["component"]
    assert invoke(["cache", "clear"]) == 0
    assert list((home / "cache").iterdir()) == []
    assert invoke(["cache", "clear"]) == 0


def test_cache_warm_refuses_before_it_loads(home: Path, capsys: Said) -> None:
    assert invoke(["cache", "warm", str(home / "none.py")]) == 2
    assert "none.py" in capsys.readouterr().err
    assert invoke(["cache", "warm", "--model", "nobody"]) == 2
    assert "nobody" in capsys.readouterr().err


def test_an_empty_store_says_how_to_fill_it(home: Path, capsys: Said) -> None:
    assert invoke(["model", "list"]) == 0
    said = capsys.readouterr()
    assert said.out == "" and f"pie-xla model import {DEFAULT_SOURCE}" in said.err
    (home / "ok.py").write_text("async def main(input): ...")
    assert invoke(["run", str(home / "ok.py")]) == 2
    assert f"hint: pie-xla model import {DEFAULT_SOURCE}" in capsys.readouterr().err
    for words in (["model", "info", "x"], ["model", "remove", "x"], ["run", str(home / "ok.py"), "--model", "x"]):
        assert invoke(words) == 2
        assert "there is no model 'x'" in capsys.readouterr().err


@pytest.mark.parametrize("source", ["nonsense", "./none", "none.gguf", "pypi:", "a/b/c"])
def test_import_refuses_what_is_no_source(home: Path, capsys: Said, source: str) -> None:
    assert invoke(["model", "import", source]) == 2
    assert source in capsys.readouterr().err


def test_doctor_sees_a_damaged_model(home: Path) -> None:
    config = load(Environment.read())
    assert [finding.verdict for finding in store(config)] == [Verdict.OK, Verdict.WARN]
    (home / "models" / "broken").mkdir(parents=True)
    found = list(store(config))
    assert found[1].verdict is Verdict.FAIL and "'broken' is damaged" in found[1].detail
    assert found[2].hint == f"pie-xla model import {DEFAULT_SOURCE}"


def test_doctor_measures_this_machine(home: Path) -> None:
    config = load(Environment.read())
    assert not [finding for finding in (*versions(config), *hardware(config)) if finding.verdict is Verdict.FAIL]


@pytest.mark.model
def test_model_info_and_list_of_a_real_model(
    smollm2: object, model_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Said
) -> None:
    monkeypatch.setenv("PIE_XLA_HOME", str(model_cache / "store"))
    assert invoke(["model", "list"]) == 0
    [line] = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("smollm2")]
    assert line[:6] == ["smollm2-135m-instruct", "134.5", "M", "float32", "538.1", "MB"]
    assert invoke(["model", "info", "smollm2-135m-instruct"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["parameters"], facts["license"]["id"], facts["stop_tokens"][0]) == (134515008, "apache-2.0", 2)
    assert invoke(["model", "info", "smollm2-135m-instrukt"]) == 2
    assert "smollm2-135m-instruct" in capsys.readouterr().err
