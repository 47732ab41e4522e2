"""`pie-xla run`: one inferlet, its words on stdout, everything else on stderr."""

from __future__ import annotations

import json
import queue
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TextIO

import click

from pie_xla import config as settings
from pie_xla.cli.arguments import parse_input, parse_models
from pie_xla.cli.console import BarProgress, stderr_progress
from pie_xla.config import Environment
from pie_xla.errors import UsageError
from pie_xla.launch import Event, Failed, Launch, Logged, Returned, Sent, Service, read_source
from pie_xla.timings import Timings


def result_text(value: Any) -> str | None:
    """What is printed for a return value: text itself, nothing for None, else JSON."""
    match value:
        case None:
            return None
        case str():
            return value
        case _:
            return json.dumps(value, ensure_ascii=False)


class Folder:
    """`-o DIR`: sent.txt and log.txt as they come, result.json or error.txt at the end."""

    def __init__(self, path: Path, stack: ExitStack) -> None:
        self._path = path
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._sent, self._log = (
                stack.enter_context((path / name).open("w", encoding="utf-8", errors="replace"))
                for name in ("sent.txt", "log.txt")
            )
            for stale in ("result.json", "error.txt"):
                (path / stale).unlink(missing_ok=True)
        except OSError as error:
            raise UsageError(f"{path} cannot be written to: {error.strerror}", "give another folder to -o") from None

    def hear(self, event: Event) -> None:
        match event:
            case Sent(text):
                self._sent.write(text)
            case Logged(_, text):
                self._log.write(text)
            case Returned(value):
                document = json.dumps(value, ensure_ascii=False, indent=2) + "\n"
                (self._path / "result.json").write_text(document, "utf-8", "replace")
            case Failed(message):
                (self._path / "error.txt").write_text(message + "\n", "utf-8", "replace")


class Printer:
    """Events on the two streams. The return value always starts a line of its own."""

    def __init__(self, out: TextIO, err: TextIO) -> None:
        self._out, self._err = out, err
        self._mid_line = False

    def hear(self, event: Event) -> None:
        match event:
            case Sent(text):
                self._out.write(text)
                self._out.flush()
                if text:
                    self._mid_line = not text.endswith("\n")
            case Logged(_, text):
                self._err.write(text if text.endswith("\n") else text + "\n")
                self._err.flush()
            case Returned(value):
                self._end_line()
                line = result_text(value)
                if line is not None:
                    self._out.write(line + "\n")
                self._out.flush()
            case Failed(message):
                self._end_line()
                self._out.flush()
                self._err.write(message.rstrip("\n") + "\n")
                self._err.flush()

    def _end_line(self) -> None:
        if self._mid_line:
            self._out.write("\n")
            self._mid_line = False


def follow(service: Service, launch: Launch, listeners: Sequence[Any], timings: Timings | None = None) -> int:
    """Run a program to its end; 0, or 1 if it failed. Ctrl-C ends the program first."""
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    launched = service.launch(launch, events.put)
    first = True
    try:
        while True:
            event = events.get()
            if first and timings is not None:
                timings.mark("first word from the program")
            first = False
            for listener in listeners:
                listener.hear(event)
            match event:
                case Returned():
                    return 0
                case Failed():
                    return 1
    finally:
        launched.kill("interrupted")


class RunCommand(click.Command):
    """Says where an inferlet's own options go."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            message = (
                f"{error.message} What the inferlet gets stands after `--`: pie-xla run FILE -- {error.option_name} ..."
            )
            raise click.UsageError(message, ctx) from None


@click.command(cls=RunCommand)
@click.argument("file", type=click.Path(path_type=Path))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.option("--native", is_flag=True, help="Run in this process under plain JAX, trusted, not in the sandbox.")
@click.option("--model", help="A model of the store; see `pie-xla model list`.")
@click.option(
    "--with",
    "others",
    multiple=True,
    metavar="NAME=MODEL",
    help="Another model, which programs call NAME: ForwardPass(model=NAME); may be repeated. [models] of the settings names some.",
)
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Folder for result.json, sent.txt and log.txt.")
@click.option("--seed", type=click.IntRange(0, 2**32 - 1), help="Seed of the program's random streams.")
@click.option("--timings", is_flag=True, help="Print where the start's time went.")
@click.pass_obj
def command(
    environment: Environment,
    file: Path,
    arguments: tuple[str, ...],
    native: bool,
    model: str | None,
    others: tuple[str, ...],
    output: Path | None,
    seed: int | None,
    timings: bool,
) -> int:
    """Run the inferlet FILE; ARGUMENTS after `--` become its input.

    `--key value` is input["key"], read as JSON where it is JSON and as text otherwise; `--flag` is True and `--no-flag`
    False. What the program sends streams to stdout and its return value is the last line.
    """
    clock = Timings()
    config = settings.load(environment)
    launch = Launch(read_source(file), str(file), parse_input(arguments), native, seed)
    with ExitStack() as stack:
        listeners: list[Any] = [Printer(sys.stdout, sys.stderr)]
        if output is not None:
            listeners.append(Folder(output, stack))
        progress = stderr_progress()

        from pie_xla.runtime import open_runtime

        named = parse_models(others)
        opened = open_runtime(config, model, others=named, native=native, progress=progress, timings=clock)
        runtime = stack.enter_context(opened)
        if isinstance(progress, BarProgress):
            progress.muted = sys.stdout.isatty()
        code = follow(runtime, launch, listeners, clock)
        if timings:
            click.echo(clock.table(), err=True)
        return code
