"""`pie-xla config`: write a commented file, show what holds and why, change one setting in place."""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path
from typing import Any

import click

from pie_xla import config as settings
from pie_xla.config import MODELS, SECTIONS, SIZE, TEXT, Auto, Config, Environment, kind_of, settings_of
from pie_xla.errors import UsageError


def template() -> str:
    """A config file in which every setting is explained and commented out at its default."""
    lines = ["# pie-xla settings. Sizes and times carry their unit: 512MiB, 2GB, 30s, 500ms."]
    for section, cls in SECTIONS.items():
        lines += ["", *(f"# {line.strip()}" for line in (cls.__doc__ or "").splitlines()), f"[{section}]"]
        for name, item in settings_of(section).items():
            lines += [f"# {item.metadata['doc']}", f"# {name} = {kind_of(item).show(item.default)}"]
    lines += [
        "",
        '# Models beside the default one, by the name that programs call them by: ForwardPass(model="draft").',
        "# Each takes its state memory from engine.kv_memory: a share, or kv_memory of its own.",
        f"[{MODELS}]",
        '# draft = "smollm2-135m-instruct"',
        '# expert = {model = "NAME", kv_memory = "256MiB"}',
    ]
    return "\n".join(lines) + "\n"


def with_setting(text: str, dotted: str, value: str, environment: Environment, name: str) -> str:
    """The file's text with one setting changed; comments, order and layout stay.

    Raises:
        UsageError: unknown setting, wrong value, or a layout in which the line cannot be found.
    """
    section, item = settings.find_setting(dotted)
    kind = kind_of(item)
    try:
        parsed = kind.parse(kind.from_text(value))
    except ValueError as error:
        raise UsageError(f"{dotted} cannot be '{value}': it must be {error}") from None
    before = settings.parse(text, environment, name)
    literal = f"{item.name} = {kind.show(parsed)}"
    lines = text.splitlines()
    at = settings.find_line(text, section, item.name)
    header = settings.find_line(text, section, None)
    if at is not None:
        lines[at] = literal + _comment_of(lines[at])
    elif header is not None:
        lines.insert(_place(lines, header, item.name), literal)
    else:
        lines += ["", f"[{section}]", literal]
    edited = "\n".join(lines) + "\n"
    try:
        after = settings.parse(edited, environment, name)
    except UsageError:
        after = before
    if _values(after) != _values(before) | {dotted: parsed}:
        raise UsageError(f"{name} is laid out in a way that cannot be edited in place", f"write by hand: {literal}")
    return edited


def _place(lines: list[str], header: int, key: str) -> int:
    """After the template's commented default of `key` if it is there, else right under the header."""
    for number in range(header + 1, len(lines)):
        if lines[number].lstrip().startswith("["):
            break
        if lines[number].lstrip("# ").startswith((f"{key} =", f"{key}=")):
            return number + 1
    return header + 1


def _comment_of(line: str) -> str:
    quote = ""
    for position, char in enumerate(line):
        if quote:
            quote = "" if char == quote else quote
        elif char in "\"'":
            quote = char
        elif char == "#":
            return "  " + line[position:]
    return ""


def _values(config: Config) -> dict[str, Any]:
    return {f"{s}.{key}": getattr(getattr(config, s), key) for s in SECTIONS for key in settings_of(s)}


def write_whole(path: Path, text: str) -> None:
    """Replace a file at once: a crash leaves the old one or the new one."""
    path = path.resolve()  # a linked file is changed where it lies
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


@click.group()
def command() -> None:
    """Write, show and change the settings."""


@command.command()
@click.option("--force", is_flag=True, help="Replace an existing file.")
@click.pass_obj
def init(environment: Environment, force: bool) -> None:
    """Write a config file with every setting explained."""
    path = environment.config_file
    if path.exists() and not force:
        raise UsageError(f"{path} exists already", "change it with `pie-xla config set`, or replace it with --force")
    _write(path, template())
    click.echo(str(path))


@command.command()
@click.pass_obj
def show(environment: Environment) -> None:
    """Print every setting in force, with where it comes from, as TOML."""
    config = settings.load(environment)
    values = _values(config)
    read = bool(config.origins) or environment.config_file.exists()
    click.echo(f"# {environment.config_file}" if read else f"# {environment.config_file} does not exist: all defaults")
    for section in SECTIONS:
        click.echo(f"\n[{section}]")
        for key, item in settings_of(section).items():
            line = f"{key} = {kind_of(item).show(values[f'{section}.{key}'])}"
            origin = config.origins.get(f"{section}.{key}")
            click.echo(line if origin is None else f"{line}  # {origin}")
    click.echo(f"\n[{MODELS}]")
    for name, extra in config.models.items():
        memory = "" if isinstance(extra.kv_memory, Auto) else f", kv_memory = {SIZE.show(extra.kv_memory)}"
        value = f"{{model = {TEXT.show(extra.model)}{memory}}}" if memory else TEXT.show(extra.model)
        key = name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else TEXT.show(name)
        click.echo(f"{key} = {value}  # {config.origins[f'{MODELS}.{name}']}")
    click.echo(f"\n# models: {config.store_dir}\n# cache:  {config.cache_dir}")


@command.command(name="set")
@click.argument("name")
@click.argument("value")
@click.pass_obj
def set_(environment: Environment, name: str, value: str) -> None:
    """Set NAME (as in engine.max_rows) to VALUE; comments in the file stay."""
    path = environment.config_file
    try:
        text = path.read_text("utf-8")
    except FileNotFoundError:
        text = template()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"the config file {path} cannot be read: {error}") from None
    _write(path, with_setting(text, name, value, environment, str(path)))
    click.echo(f"{name} = {value}  # {path}", err=True)


def _write(path: Path, text: str) -> None:
    try:
        write_whole(path, text)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from None
