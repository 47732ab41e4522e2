"""`pie-xla cache`: what is compiled and kept, and clearing it. Everything in it is made again when needed."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import click

from pie_xla import config as settings
from pie_xla.cli.console import show_amount
from pie_xla.config import Config, Environment
from pie_xla.errors import PieError, UsageError


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
    """List and clear what is compiled and cached."""


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
