"""Build the generic Python component: guest CPython, the standard library, the SDK and what runs an author's file."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from pie_xla.errors import PieError
from pie_xla.process.wasm.immortal import immortalize
from pie_xla.progress import Progress

_PACKAGE = Path(__file__).resolve().parents[2]
WORLD = "inferlet"
# The package has no __main__, and its console script need not be on the PATH.
_SCRIPT = "import sys; from componentize_py import script; sys.argv[0] = 'componentize-py'; sys.exit(script())"


@dataclass(frozen=True)
class Sources:
    """What goes into the component.

    Args:
        wit: directory of the WIT world.
        component: directory of `app.py` and `pie_component/`.
        sdk: directory of the `inferlet` package itself.
    """

    wit: Path
    component: Path
    sdk: Path

    @classmethod
    def default(cls) -> Sources:
        """Those of this installation: inside the package, or in the repository beside it."""
        installed = _PACKAGE / "_sdk"
        if (installed / "inferlet").is_dir():
            return cls(installed / "wit", installed / "component", installed / "inferlet")
        tree = _PACKAGE.parent / "inferlets"
        if not (tree / "wit").is_dir():
            raise PieError(
                f"the inferlet SDK is neither in {installed} nor in {tree}",
                "the installation is incomplete: install pie-xla again",
            )
        return cls(tree / "wit", tree / "sdk" / "python" / "component", tree / "sdk" / "python" / "inferlet")

    def files(self) -> list[tuple[str, Path]]:
        """(path in the build, file), sorted: every WIT and Python file."""
        found = [(f"wit/{path.relative_to(self.wit)}", path) for path in self.wit.rglob("*.wit")]
        found += [(f"{path.relative_to(self.component)}", path) for path in self.component.rglob("*.py")]
        found += [(f"inferlet/{path.relative_to(self.sdk)}", path) for path in self.sdk.rglob("*") if _is_source(path)]
        return sorted(found)

    def key(self) -> str:
        """A hash of all of them: 16 hex digits."""
        digest = hashlib.sha256()
        for name, path in self.files():
            data = path.read_bytes()
            digest.update(f"{name}\0{len(data)}\0".encode())
            digest.update(data)
        return digest.hexdigest()[:16]


def _is_source(path: Path) -> bool:
    return path.is_file() and "__pycache__" not in path.parts and path.suffix != ".pyc"


def shipped(sources: Sources) -> Path | None:
    """The component that an installed wheel carries, if it was built from these very sources."""
    path = _PACKAGE / "_component" / f"python-{sources.key()}.wasm"
    return path if path.is_file() else None


def componentize_version() -> str:
    try:
        return version("componentize-py")
    except PackageNotFoundError:
        raise PieError(
            "the Python language component has to be built, and componentize-py is not installed",
            "pip install 'componentize-py>=0.25,<0.26'",
        ) from None


def build_component(sources: Sources, target: Path, progress: Progress) -> None:
    """Write the component to `target` (all of it or nothing); 10-20 seconds.

    Raises:
        PieError: componentize-py is missing or failed (with its last words), or the disk is full.
    """
    componentize_version()
    with tempfile.TemporaryDirectory(prefix="build-", dir=target.parent) as folder:
        stage = Path(folder)
        for name, path in sources.files():
            (stage / "src" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, stage / "src" / name)
        output = stage / "python.wasm"
        wit, python = stage / "src" / "wit", stage / "src"
        command = ["-d", str(wit), "-w", WORLD, "componentize", "app", "-p", str(python), "-o", str(output)]
        with progress.task("building the Python language component (once)"):
            done = subprocess.run(
                [sys.executable, "-c", _SCRIPT, *command],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
            )
        if done.returncode != 0 or not output.is_file():
            raise PieError(
                "componentize-py could not build the Python language component "
                f"(exit {done.returncode}):\n{_reason(done.stdout)}"
            )
        data, _ = immortalize(output.read_bytes())
        output.write_bytes(data)
        output.replace(target)


def _reason(output: str) -> str:
    """The guest's traceback out of componentize-py's report, which wraps it in its own and adds a native one."""
    report = output.partition("\nStack backtrace")[0].partition("\nCaused by:")[0]
    report = report.rpartition("AssertionError: ")[2]
    return "\n".join(report.strip().splitlines()[-15:])


def main() -> None:
    """`python -m pie_xla.process.wasm.build DIRECTORY`: build the component that a wheel ships."""
    from pie_xla.progress import Silent

    directory = Path(sys.argv[1])
    directory.mkdir(parents=True, exist_ok=True)
    sources = Sources.default()
    target = directory / f"python-{sources.key()}.wasm"
    build_component(sources, target, Silent())
    print(target)


if __name__ == "__main__":
    main()
