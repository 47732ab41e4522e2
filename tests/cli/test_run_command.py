"""`pie-xla run` around a stand-in for the model: what goes to which stream, what the exit codes are, what -o leaves."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pie_xla.cli.run import Printer, follow, result_text
from pie_xla.errors import UsageError
from pie_xla.launch import Event, Failed, Launch, Listener, Logged, Returned, Sent, read_source

ROOT = Path(__file__).parents[2]


class Script:
    """A service that says the given events and remembers how it was ended."""

    def __init__(self, *events: Event) -> None:
        self.events = events
        self.launches: list[Launch] = []
        self.killed: list[str] = []

    def launch(self, launch: Launch, listener: Listener) -> Script:
        self.launches.append(launch)
        for event in self.events:
            listener(event)
        return self

    def kill(self, reason: str) -> None:
        self.killed.append(reason)


def shown(*events: Event) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    code = follow(Script(*events), Launch("", "f.py"), [Printer(out, err)])
    return code, out.getvalue(), err.getvalue()


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"a": "é"}, '{"a": "é"}'),
        ([1, None], "[1, null]"),
        ("plain", "plain"),
        (None, None),
        (True, "true"),
        (1.5, "1.5"),
    ],
)
def test_return_values_as_text(value: Any, text: str | None) -> None:
    assert result_text(value) == text


def test_sent_text_streams_and_the_result_has_its_own_last_line() -> None:
    code, out, err = shown(
        Sent("Hel"), Logged(20, "thinking\n"), Sent("lo"), Logged(30, "no newline"), Returned({"n": 2})
    )
    assert (code, out, err) == (0, 'Hello\n{"n": 2}\n', "thinking\nno newline\n")
    assert shown(Sent("line\n"), Returned("x"))[1] == "line\nx\n"
    assert shown(Returned(None)) == (0, "", "")
    assert shown(Sent("a"), Returned(None))[1] == "a\n"


def test_a_failure_is_exit_one_with_the_traceback_on_stderr() -> None:
    assert shown(Sent("half"), Failed("Traceback ...\nValueError: x\n")) == (
        1,
        "half\n",
        "Traceback ...\nValueError: x\n",
    )


def test_an_exception_while_following_ends_the_program() -> None:
    class Broken:
        def hear(self, event: Event) -> None:
            raise BrokenPipeError

    service = Script(Sent("x"))
    with pytest.raises(BrokenPipeError):
        follow(service, Launch("", "f.py"), [Broken()])
    assert service.killed == ["interrupted"]


# The command as a process, with the model replaced: `open_runtime` is what a stranger's machine would be slow at.
STAND_IN = """
import contextlib, sys, types
from pie_xla.launch import *

class Service:
    def launch(self, launch, listener):
        self.launched = launch
        if "FOREVER" in launch.source:
            print("ready", file=sys.stderr, flush=True)
            return self
        listener(Sent("hi"))
        listener(Logged(20, "a log line"))
        if "BOOM" in launch.source:
            listener(Failed("Traceback (most recent call last):\\n  main.py:1\\nRuntimeError: boom"))
        elif "FLOOD" in launch.source:
            for _ in range(100_000):
                listener(Sent("x" * 100 + chr(10)))
            listener(Returned(None))
        else:
            listener(Returned({"input": launch.input, "native": launch.native, "seed": launch.seed}))
        return self
    def kill(self, reason):
        print("killed:", reason, file=sys.stderr)

@contextlib.contextmanager
def open_runtime(config, model, *, others, native, progress, timings):
    yield Service()

runtime = types.ModuleType("pie_xla.runtime")
runtime.open_runtime = open_runtime
sys.modules["pie_xla.runtime"] = runtime
from pie_xla.cli.main import main
main()
"""

Cli = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path) -> Cli:
    (tmp_path / "cli.py").write_text(STAND_IN)
    for name, body in {"ok": "", "boom": "BOOM", "forever": "FOREVER", "flood": "FLOOD"}.items():
        (tmp_path / f"{name}.py").write_text(f"async def main(input):\n    '{body}'\n")
    env = os.environ | {"PYTHONPATH": str(ROOT), "PIE_XLA_HOME": str(tmp_path / "home"), "PYTHONWARNINGS": "default"}

    def start(*words: str, stdout: Any = subprocess.PIPE) -> subprocess.Popen[str]:
        command = [sys.executable, "cli.py", *words]
        return subprocess.Popen(command, cwd=tmp_path, env=env, text=True, stdout=stdout, stderr=subprocess.PIPE)

    return start


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


def test_the_words_after_the_dashes_are_the_input(start: Cli) -> None:
    code, out, err = finish(
        start("run", "ok.py", "--native", "--seed", "7", "--", "--prompt", "a b", "--max-tokens", "3")
    )
    assert code == 0, err
    assert out == 'hi\n{"input": {"prompt": "a b", "max_tokens": 3}, "native": true, "seed": 7}\n'
    assert "a log line\n" in err


def test_failures_exit_one(start: Cli, tmp_path: Path) -> None:
    code, out, err = finish(start("run", "boom.py", "-o", "out"))
    assert (code, out) == (1, "hi\n")
    assert "main.py:1\nRuntimeError: boom" in err
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"sent.txt", "log.txt", "error.txt"}
    assert (tmp_path / "out/error.txt").read_text().endswith("RuntimeError: boom\n")


def test_an_output_folder_holds_all_of_it_and_nothing_stale(start: Cli, tmp_path: Path) -> None:
    finish(start("run", "boom.py", "-o", "out/deep"))
    assert finish(start("run", "ok.py", "-o", "out/deep"))[0] == 0
    folder = tmp_path / "out/deep"
    assert json.loads((folder / "result.json").read_text())["input"] == {}
    assert ((folder / "sent.txt").read_text(), (folder / "log.txt").read_text()) == ("hi", "a log line")
    assert not (folder / "error.txt").exists()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["run"], "Missing argument 'FILE'"),
        (["run", "none.py"], "there is no file none.py"),
        (["run", "."], "is a directory, not an inferlet"),
        (["run", "ok.py", "--prompt", "x"], "pie-xla run FILE -- --prompt"),
        (["run", "ok.py", "stray"], "'stray' belongs to no key"),
        (["run", "ok.py", "--seed", "-1"], "Invalid value for '--seed'"),
        (["run", "ok.py", "-o", "ok.py"], "ok.py cannot be written to"),
        (["--config", "none.toml", "run", "ok.py"], "there is no config file none.toml"),
        (["rnu", "ok.py"], "did you mean 'run'?"),
    ],
)
def test_wrong_command_lines_exit_two(start: Cli, words: list[str], expected: str) -> None:
    code, out, err = finish(start(*words))
    assert (code, out) == (2, "") and expected in err and "Traceback" not in err


def test_interrupt_ends_the_program_and_exits_130(start: Cli) -> None:
    process = start("run", "forever.py")
    assert process.stderr is not None and process.stderr.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    began = time.monotonic()
    code, out, err = finish(process)
    assert (code, out) == (130, "") and "interrupted\n" in err and "Traceback" not in err
    assert time.monotonic() - began < 5


def test_termination_ends_the_program_and_exits_143(start: Cli) -> None:
    process = start("run", "forever.py")
    assert process.stderr is not None and process.stderr.readline() == "ready\n"
    process.terminate()
    assert finish(process)[0] == 143


def test_a_reader_that_goes_away_is_no_crash(start: Cli) -> None:
    process = start("run", "flood.py")
    assert process.stdout is not None and process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    with process.stderr:
        said = process.stderr.read()
    assert process.wait(timeout=60) == 141
    assert "Traceback" not in said


def test_a_full_disk_under_stdout_is_said(start: Cli) -> None:
    with open("/dev/full", "w") as full:
        code, _, err = finish(start("run", "ok.py", stdout=full))
    assert code == 1 and "No space left on device" in err and "Traceback" not in err


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"\x7fELF\x02\x01\xff\xfe", "not UTF-8 text"),
        (b"a\0b", "NUL bytes"),
        (b"print('hello')\n", "defines no `main`"),
        (b"def helper():\n    return main\n", "defines no `main`"),
        (b"x" * (5 << 20), "an inferlet may have"),
    ],
)
def test_what_is_no_inferlet_is_refused_before_a_model_is_loaded(tmp_path: Path, data: bytes, expected: str) -> None:
    path = tmp_path / "f.py"
    path.write_bytes(data)
    with pytest.raises(UsageError, match=expected):
        read_source(path)


@pytest.mark.parametrize(
    "source",
    [
        "async def main(input): ...",
        "def main(input): return '\\d'",
        "from lib import main",
        "from lib import *",
        "from lib import run as main",
        "main = lambda input: 1",
        "if True:\n    async def main(input): ...",
        "async def main(input) ->:\n",  # its own error is shown by the Python that runs it
    ],
)
def test_what_may_be_an_inferlet_is_read(tmp_path: Path, source: str) -> None:
    path = tmp_path / "f.py"
    path.write_text(source)
    assert read_source(path) == source


def test_help_is_quick_and_imports_neither_jax_nor_rich() -> None:
    script = textwrap.dedent("""
        import sys
        from pie_xla.cli.main import invoke
        assert invoke(["--help"]) == 0
        heavy = {"jax", "numpy", "rich", "wasmtime", "starlette", "orbax", "tokenizers"} & set(sys.modules)
        assert not heavy, heavy
    """)
    command = [sys.executable, "-X", "importtime", "-c", script]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "Run an inferlet." in run.stdout
    best = min(_seconds([sys.executable, "-m", "pie_xla", "--help"]) for _ in range(5))
    assert best < 0.3, f"--help took {best:.2f} s"


def _seconds(command: list[str]) -> float:
    began = time.monotonic()
    subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    return time.monotonic() - began
