"""`pie-xla doctor`: one line per thing that must be right, with what to do where it is not."""

from __future__ import annotations

import enum
import importlib.metadata
import os
import platform
import stat
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import click

from pie_xla import __version__, machine
from pie_xla import config as settings
from pie_xla.cli.cache import COMPONENT, EXECUTABLES, measure, part_dir
from pie_xla.cli.console import show_amount
from pie_xla.config import DEFAULT_MODEL, DEFAULT_SOURCE, Config, Environment
from pie_xla.errors import PieError

LITTLE_MEMORY = 2 << 30
LITTLE_DISK = 2 << 30


class Verdict(enum.Enum):
    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    verdict: Verdict
    what: str
    detail: str
    hint: str | None = None


def ok(what: str, detail: str) -> Finding:
    return Finding(Verdict.OK, what, detail)


def warn(what: str, detail: str, hint: str) -> Finding:
    return Finding(Verdict.WARN, what, detail, hint)


def fail(what: str, detail: str, hint: str) -> Finding:
    return Finding(Verdict.FAIL, what, detail, hint)


def versions(config: Config) -> Iterator[Finding]:
    """The interpreter, and every dependency against the range it was tested with."""
    from packaging.requirements import Requirement

    yield ok("python", f"{platform.python_version()} on {platform.platform()}")
    try:
        required = importlib.metadata.requires("pie-xla") or []
    except importlib.metadata.PackageNotFoundError:
        yield warn("pie-xla", f"{__version__}, run from its tree and not installed", "install it: pip install -e .")
        return
    yield ok("pie-xla", __version__)
    good: list[tuple[Requirement, str]] = []
    bad: list[tuple[Requirement, str]] = []
    for text in required:
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            yield fail("packages", f"{requirement.name} is missing", f"pip install '{requirement}'")
            continue
        (good if requirement.specifier.contains(version, prereleases=True) else bad).append((requirement, version))
    yield ok("packages", ", ".join(f"{requirement.name} {version}" for requirement, version in good))
    for requirement, version in bad:
        hint = f"pip install '{requirement.name}{requirement.specifier}'"
        yield warn("packages", f"{requirement.name} {version} is outside the tested {requirement.specifier}", hint)


def hardware(config: Config) -> Iterator[Finding]:
    """Cores, memory, disk."""
    yield ok("cores", str(machine.usable_cores()))
    total, available = machine.memory()
    text = f"{show_amount(available)} free of {show_amount(total)}"
    if available < LITTLE_MEMORY:
        yield warn("memory", text, "a small model needs about 2 GB; close something, or use dtype bfloat16")
    else:
        yield ok("memory", text)
    free = machine.disk_free(config.store_dir)
    if free < LITTLE_DISK:
        yield warn("disk", f"{show_amount(free)} free for models", "make room, or move the store: model.store")
    else:
        yield ok("disk", f"{show_amount(free)} free for models")


def devices(config: Config) -> Iterator[Finding]:
    """What JAX sees, and which attention kernel it gets."""
    try:
        from pie_xla.progress import SILENT
        from pie_xla.runtime import import_jax, kernel_for

        found = import_jax(config.engine.platform)
        kernel, library = kernel_for(found[0], config, SILENT)
    except (PieError, ImportError) as error:
        yield fail("devices", str(error), "check engine.platform, JAX_PLATFORMS and the accelerator's plugin")
        return
    kinds = sorted({f"{device.platform} ({device.device_kind})" for device in found})
    yield ok("devices", f"{len(found)} x {', '.join(kinds)}")
    yield _kernels(found[0].platform, kernel.value, library, config)


def _kernels(platform: str, kernel: str, library: str, config: Config) -> Finding:
    """Which attention kernels are used, and why not better ones."""
    if library:
        from pie_xla.kernels.cpu import load

        return ok("kernels", f"attention: {kernel} ({load(Path(library))})")
    if platform == "cpu" and config.engine.kernels == "auto":
        return warn("kernels", "attention: xla; the CPU kernels could not be built", "apt-get install g++")
    return ok("kernels", f"attention: {kernel}")


def store(config: Config) -> Iterator[Finding]:
    """The settings file and the imported models."""
    from pie_xla.hub.store import Store

    path = config.environment.config_file
    yield ok("config", str(path) if path.exists() else f"{path} is not there: all defaults")
    models = Store(config.store_dir)
    good = []
    for name in models.names():
        try:
            models.open(name)
            good.append(name)
        except PieError as error:
            yield fail("store", error.message, error.hint or "import the model again")
    if good:
        yield ok("store", f"{models.root}: {', '.join(good)}")
    if config.model.default not in good:
        source = DEFAULT_SOURCE if config.model.default == DEFAULT_MODEL else "SOURCE"
        detail = f"the default model {config.model.default} is not in {models.root}"
        yield warn("store", detail, f"pie-xla model import {source}")
    for name, extra in config.models.items():
        if extra.model not in good:
            detail = f"the model {extra.model}, which [models] calls {name}, is not in {models.root}"
            yield warn("store", detail, "pie-xla model import SOURCE")


def cached(config: Config) -> Iterator[Finding]:
    """Executables and the language component."""
    cache = config.cache_dir
    if not cache.exists():
        yield ok("cache", f"{cache} will be made")
    elif cache.stat().st_uid != os.getuid() or cache.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        yield fail("cache", f"{cache} can be written by others; it holds machine code", f"chmod 700 {cache}")
    else:
        files, size = measure(part_dir(config, EXECUTABLES))
        yield ok("cache", f"{cache}: {files} executables, {show_amount(size)}")
    from pie_xla.process.wasm.build import Sources, componentize_version, shipped

    try:
        sources = Sources.default()
        compiled = list(part_dir(config, COMPONENT).glob(f"python-{sources.key()}*.cwasm"))
        if compiled:
            yield ok("component", f"compiled: {compiled[0].name}")
        elif shipped(sources) is not None:
            yield ok("component", "shipped with this installation; compiled on first use (5 s)")
        else:
            yield ok("component", f"built on first use (20 s) by componentize-py {componentize_version()}")
    except PieError as error:
        yield fail("component", error.message, error.hint or "install pie-xla again")


CHECKS: tuple[Callable[[Config], Iterator[Finding]], ...] = (versions, hardware, devices, store, cached)
COLORS = {Verdict.OK: "green", Verdict.WARN: "yellow", Verdict.FAIL: "red"}


@click.command()
@click.pass_obj
def command(environment: Environment) -> int:
    """Check the machine and the installation; exit 1 if something would not work."""
    try:
        config = settings.load(environment)
    except PieError as error:
        _say(fail("config", error.message, error.hint or "see `pie-xla config`"))
        return 1
    failed = False
    for check in CHECKS:
        for finding in check(config):
            failed |= finding.verdict is Verdict.FAIL
            _say(finding)
    return 1 if failed else 0


def _say(finding: Finding) -> None:
    mark = click.style(f"{finding.verdict.value:<4}", fg=COLORS[finding.verdict])
    click.echo(f"{mark}  {finding.what:<10} {finding.detail}")
    if finding.hint is not None:
        click.echo(f"      {'':<10} -> {finding.hint}")
    sys.stdout.flush()
