"""Build the CPU kernels: with the system's C++ compiler, once per version of their source, into the cache; a wheel may carry them."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pie_xla.errors import PieError
from pie_xla.progress import Progress

SOURCES = Path(__file__).parent / "native"
PREBUILT = Path(__file__).resolve().parents[1] / "_kernels"  # of a wheel
COMPILERS = ("c++", "g++", "clang++")
COMMON = ("-std=c++17", "-fPIC", "-fno-math-errno", "-ffp-contract=fast")
X86 = {
    "attention_avx512.cc": ("-O3", "-mavx512f", "-mavx512dq", "-mavx512vl", "-mavx2", "-mfma"),
    "attention_avx2.cc": ("-O3", "-mavx2", "-mfma"),
}
ANY = {"attention_base.cc": ("-O3",), "attention.cc": ("-O2",), "rows.cc": ("-O3",), "binding.cc": ("-O2", "-w")}


def library(cache: Path, progress: Progress) -> Path:
    """The kernels for this machine: shipped, built before, or built now.

    Raises:
        PieError: there is no compiler, or it fails; plain XLA does the work then.
    """
    name = f"attention-{key()}{'.dylib' if sys.platform == 'darwin' else '.so'}"
    for place in (PREBUILT, cache / "kernels"):
        if (place / name).exists():
            return place / name
    with progress.task("building the CPU kernels (once)"):
        return build(cache / "kernels" / name)


def key() -> str:
    """A digest of all that decides the library: 16 hex digits."""
    import jaxlib.version

    digest = hashlib.sha256(
        f"{platform.machine()} {sys.platform} {jaxlib.version.__version__} {COMMON} {X86} {ANY}".encode()
    )
    for path in sorted(SOURCES.iterdir()):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def build(target: Path, extra: tuple[str, ...] = ()) -> Path:
    """Compile and link into `target`, whole or not at all; `extra` flags are for checks (sanitizers)."""
    import jax

    compiler = next((found for found in map(shutil.which, COMPILERS) if found), None)
    if compiler is None:
        raise PieError(f"no C++ compiler ({', '.join(COMPILERS)})", "on Debian and Ubuntu: apt-get install g++")
    units = {**ANY, **(X86 if platform.machine() in ("x86_64", "AMD64") else {})}
    target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        objects = [str(Path(folder) / f"{name}.o") for name in units]

        def compile_one(name: str, flags: tuple[str, ...], into: str) -> None:
            _run(
                [compiler, *COMMON, *flags, *extra, "-I", jax.ffi.include_dir(), "-c", str(SOURCES / name), "-o", into]
            )

        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            list(pool.map(compile_one, units, units.values(), objects))
        whole = Path(folder) / "whole"
        _run([compiler, "-shared", *extra, *objects, "-o", str(whole)])
        whole.replace(target)
    return target


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr[:200])
        raise PieError(f"the C++ compiler failed: {said}")


def main() -> None:
    """What `make wheel` runs: build into a folder under the name that `library` looks for."""
    name = f"attention-{key()}{'.dylib' if sys.platform == 'darwin' else '.so'}"
    print(build(Path(sys.argv[1]) / name))


if __name__ == "__main__":
    main()
