"""What `pip install .` brings: the packages, the SDK, the WIT world, the examples, and nothing else."""

from __future__ import annotations

import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def tracked(folder: str) -> set[str]:
    """Files of a folder as git knows them, or as they lie there in a tree without git."""
    listed = subprocess.run(["git", "ls-files", folder], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode == 0 and listed.stdout:
        return set(listed.stdout.split())
    files = (path for path in (ROOT / folder).rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {path.relative_to(ROOT).as_posix() for path in files}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--quiet", "--wheel-dir", str(out), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    (path,) = out.glob("pie_xla-*.whl")
    return path


@pytest.mark.slow
def test_the_wheel_carries_sdk_wit_and_examples(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    moved = {
        "inferlets/sdk/python/inferlet/": "pie_xla/_sdk/inferlet/",
        "inferlets/sdk/python/component/": "pie_xla/_sdk/component/",
        "inferlets/wit/": "pie_xla/_sdk/wit/",
        "examples/": "pie_xla/_examples/",
        "pie_xla/": "pie_xla/",
        "poem/": "poem/",
    }
    for source, target in moved.items():
        expected = {target + name.removeprefix(source) for name in tracked(source)}
        assert expected and expected <= names, f"{source}: missing {sorted(expected - names)[:5]}"
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"pie_xla", "poem"}
    assert any(name.endswith("licenses/LICENSE") for name in names)


@pytest.mark.slow
def test_an_installed_wheel_runs_away_from_the_tree(wheel: Path, tmp_path: Path) -> None:
    env_dir = tmp_path / "venv"
    # The dependencies are those of this interpreter; only the package itself must come from the wheel.
    venv.create(env_dir, with_pip=False)
    (site,) = env_dir.glob("lib/python*/site-packages")
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--no-deps", "--quiet", "--target", str(site), str(wheel)], check=True
    )
    ours = [path for path in sys.path if path.endswith("site-packages")]
    (site / "dependencies.pth").write_text("\n".join(ours))
    script = (
        "import pie_xla, poem, pathlib, importlib.metadata as m\n"
        "root = pathlib.Path(pie_xla.__file__).parent\n"
        "print(root); print(m.version('pie-xla') == pie_xla.__version__)\n"
        "print(all((root / '_sdk' / part).exists() for part in ('inferlet/__init__.py', 'component/app.py', 'wit')))\n"
    )
    python = env_dir / "bin" / "python"
    run = subprocess.run([python, "-I", "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert run.stdout.split() == [str(site / "pie_xla"), "True", "True"]
    command = [python, "-I", "-m", "pie_xla", "--version"]
    shown = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (shown.returncode, shown.stdout) == (0, f"pie-xla, version {wheel.name.split('-')[1]}\n")
