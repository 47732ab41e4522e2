"""The `pie-xla` command: its subcommands by name, and what every failure becomes.

Subcommands are imported when they are called: `pie-xla --help` loads neither JAX nor the engine.
"""

from __future__ import annotations

import importlib
import io
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import NoReturn

import click

from pie_xla import __version__
from pie_xla.config import Environment
from pie_xla.errors import PieError

INTERRUPTED = 130
TERMINATED = 143
BROKEN_PIPE = 141

# name -> (module that defines the click command `command`, one line of help)
COMMANDS = {
    "run": ("pie_xla.cli.run", "Run an inferlet."),
    "model": ("pie_xla.cli.model", "Import, list, show and remove models."),
    "serve": ("pie_xla.cli.serve", "Serve inferlets over HTTP."),
    "config": ("pie_xla.cli.config", "Write, show and change the settings."),
    "doctor": ("pie_xla.cli.doctor", "Check the machine and the installation."),
    "cache": ("pie_xla.cli.cache", "List and clear what is compiled and cached."),
}


class ReaderGoneError(Exception):
    """Whoever read stdout has closed it."""


class LazyGroup(click.Group):
    """A group whose subcommands are imported on use."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command = importlib.import_module(COMMANDS[cmd_name][0]).command
        assert isinstance(command, click.Command)
        return command

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            raise ReaderGoneError from None  # click would make it exit code 1, like a program that failed

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            from difflib import get_close_matches

            close = get_close_matches(args[0], list(COMMANDS), n=1)
            known = f"did you mean '{close[0]}'?" if close else "commands: " + ", ".join(COMMANDS)
            raise click.UsageError(f"there is no command '{args[0]}'; {known}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="pie-xla")
@click.option("--config", "config_file", type=click.Path(path_type=Path), help="Settings file to use.")
@click.pass_context
def cli(ctx: click.Context, config_file: Path | None) -> None:
    """Serve programs, not prompts: inferlets run next to the model and drive it pass by pass."""
    environment = Environment.read()
    if config_file is not None:
        environment = replace(environment, config_file=config_file, config_named=True)
    ctx.obj = environment


def _terminated(signum: int, frame: FrameType | None) -> None:
    # Raised in the main thread, so that half-done work is taken back as on Ctrl-C.
    raise SystemExit(TERMINATED)


def invoke(arguments: list[str] | None = None) -> int:
    """Run the command line; its exit code. Every failure is said on stderr."""
    try:
        code = cli.main(args=arguments, prog_name="pie-xla", standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except PieError as error:
        click.echo(f"error: {error}", err=True)
        return error.exit_code
    except (KeyboardInterrupt, click.Abort):
        click.echo("\ninterrupted", err=True)
        return INTERRUPTED
    except (ReaderGoneError, BrokenPipeError):
        # The reader of stdout is gone; leave nothing for the interpreter's own flush to trip over.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except OSError as error:  # a full disk, most of all
        click.echo(f"error: {error}", err=True)
        return 1
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else 1


def main() -> NoReturn:
    """The console script."""
    signal.signal(signal.SIGTERM, _terminated)
    for stream in (sys.stdout, sys.stderr):
        # A program's text may hold half a surrogate pair, or the terminal may know fewer characters.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    code = invoke()
    sys.stderr.flush()
    # What a command opened it has closed. Taking JAX and the interpreter down costs a second, and after Ctrl-C it would
    # wait for a compile in another thread.
    os._exit(code)
