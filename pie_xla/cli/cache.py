"""`pie-xla cache`: what is compiled and kept, compiling ahead, and clearing. Everything in it is made again when needed."""

from __future__ import annotations

import queue
import shutil
from dataclasses import dataclass
from pathlib import Path

import click

from pie_xla import config as settings
from pie_xla.cli.arguments import parse_models
from pie_xla.cli.console import show_amount, stderr_progress
from pie_xla.config import Config, Environment
from pie_xla.errors import PieError, UsageError
from pie_xla.launch import Event, Failed, Launch, Returned, read_source
from pie_xla.timings import Timings


@dataclass(frozen=True)
class Part:
    """One sort of cached thing and its folder under the cache."""

    name: str
    doc: str


EXECUTABLES = Part("executables", "compiled steps and epilogues, per model and machine")
COMPONENT = Part("component", "the Python language component, built and compiled")
PARTS = (EXECUTABLES, COMPONENT)


def part_dir(config: Config, part: Part) -> Path:
    """Where a part lies; not necessarily there yet."""
    return config.cache_dir / part.name


def measure(folder: Path) -> tuple[int, int]:
    """(files, bytes) under a folder; (0, 0) if it is not there."""
    files = [path.lstat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    return len(files), sum(files)


@click.group()
def command() -> None:
    """Fill, list and clear what is compiled and cached."""


@command.command(name="list")
@click.pass_obj
def list_(environment: Environment) -> None:
    """Print each part of the cache: name, files, size, folder."""
    config = settings.load(environment)
    for part in PARTS:
        folder = part_dir(config, part)
        files, size = measure(folder)
        click.echo(f"{part.name:<12} {files:>5} files {show_amount(size):>10}  {folder}")


@command.command()
@click.argument("files", nargs=-1, type=click.Path(path_type=Path))
@click.option("--model", help="A model of the store; see `pie-xla model list`.")
@click.option("--with", "others", multiple=True, metavar="NAME=MODEL", help="Another model, as for `run`.")
@click.pass_obj
def warm(environment: Environment, files: tuple[Path, ...], model: str | None, others: tuple[str, ...]) -> None:
    """Compile every step, and the epilogues of the inferlets FILES, so that no later start does.

    Each of FILES is run once in the sandbox, without input, and what it says is dropped: the epilogues it uses then are compiled for
    every number of passes. Fused steps are compiled later, for epilogues that prove to be used much.
    """
    config = settings.load(environment)
    launches = [Launch(read_source(file), str(file), seed=0) for file in files]
    progress = stderr_progress()

    from pie_xla.runtime import open_runtime

    with open_runtime(
        config, model, others=parse_models(others), native=not files, serve=True, progress=progress, timings=Timings()
    ) as runtime:
        for launch in launches:
            progress.note(f"running {launch.file}")
            heard: queue.SimpleQueue[Event] = queue.SimpleQueue()
            launched = runtime.launch(launch, heard.put)
            try:
                while not isinstance(event := heard.get(), Returned | Failed):
                    pass
            finally:
                launched.kill("interrupted")
            if isinstance(event, Failed):
                hint = "give `cache warm` programs that run without input"
                raise PieError(f"{launch.file} failed, so its epilogues are not known:\n{event.message}", hint)
        epilogues = runtime.warm_programs(progress)
        stats = runtime.engine.stats()
    compiled, loaded = sum(stats["compiled"].values()), sum(stats["loaded"].values())
    click.echo(f"{compiled} executables compiled, {loaded} were there; {epilogues} epilogues", err=True)


@command.command()
@click.argument("parts", nargs=-1)
@click.pass_obj
def clear(environment: Environment, parts: tuple[str, ...]) -> None:
    """Delete the named PARTS of the cache, or all of it. Models stay."""
    config = settings.load(environment)
    known = {part.name: part for part in PARTS}
    if unknown := [name for name in parts if name not in known]:
        raise UsageError(f"the cache has no part '{unknown[0]}'", "parts: " + ", ".join(known))
    for name in parts or known:
        folder = part_dir(config, known[name])
        files, size = measure(folder)
        if folder.exists():
            try:
                shutil.rmtree(folder)
            except OSError as error:
                raise PieError(f"{folder} cannot be deleted: {error.strerror}") from None
        click.echo(f"{name}: {files} files, {show_amount(size)} deleted", err=True)
