"""`pie-xla serve`: the HTTP server around the loaded models."""

from __future__ import annotations

import ipaddress
import socket
import threading
from pathlib import Path

import click

from pie_xla import config as settings
from pie_xla.cli.arguments import parse_models
from pie_xla.cli.console import stderr_progress
from pie_xla.config import Config, Environment
from pie_xla.errors import PieError, UsageError
from pie_xla.launch import read_source
from pie_xla.timings import Timings

_PACKAGE = Path(__file__).resolve().parents[1]
GRACE = 5  # seconds that open streams get when the server stops


def shipped_inferlets() -> dict[str, str]:
    """The examples by folder name: those in the installed package, else those of the tree."""
    for place in (_PACKAGE / "_examples", _PACKAGE.parent / "examples"):
        if place.is_dir():
            return {path.parent.name: path.read_text("utf-8") for path in sorted(place.glob("*/main.py"))}
    return {}


def parse_named(words: tuple[str, ...]) -> dict[str, str]:
    """NAME=FILE pairs as name -> source."""
    found: dict[str, str] = {}
    for word in words:
        name, equals, path = word.partition("=")
        if not (name and equals and path):
            raise UsageError(f"'{word}' is not NAME=FILE", "as in --inferlet chat=examples/chat/main.py")
        found[name] = read_source(Path(path))
    return found


def bind(host: str, port: int) -> socket.socket:
    """A listening socket, or a refusal that says why."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server((str(address[0]), int(address[1])), family=family)
    except OSError as error:
        hint = "choose another with --port, or 0 for any free one"
        raise PieError(f"cannot listen on {host} port {port}: {error.strerror or error}", hint) from None


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach it."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@click.command()
@click.option("--model", help="A model of the store; see `pie-xla model list`.")
@click.option(
    "--with",
    "others",
    multiple=True,
    metavar="NAME=MODEL",
    help="Another model, which programs call NAME: ForwardPass(model=NAME); may be repeated. [models] of the settings names some.",
)
@click.option("--host", help="Address to listen on; server.host of the settings by default.")
@click.option("--port", type=click.IntRange(0, 65535), help="Port to listen on; server.port by default, 0: any.")
@click.option("--inferlet", "named", multiple=True, metavar="NAME=FILE", help="Serve FILE under NAME; may be repeated.")
@click.pass_obj
def command(
    environment: Environment,
    model: str | None,
    others: tuple[str, ...],
    host: str | None,
    port: int | None,
    named: tuple[str, ...],
) -> None:
    """Serve inferlets over HTTP: POST /v1/generate with {"inferlet": NAME} or {"source": TEXT}, and "input"."""
    config = settings.load(environment)
    inferlets = shipped_inferlets() | parse_named(named)
    more = parse_models(others)
    host = config.server.host if host is None else host
    listener = bind(host, config.server.port if port is None else port)
    if not is_loopback(host):
        click.echo(f"warning: {host} is open to other machines, and the server asks nobody who they are", err=True)
    try:
        _serve(config, model or config.model.default, more, inferlets, listener, is_loopback(host))
    finally:
        listener.close()


def _serve(
    config: Config,
    model: str,
    others: dict[str, str],
    inferlets: dict[str, str],
    listener: socket.socket,
    loopback: bool,
) -> None:
    import uvicorn

    from pie_xla.runtime import Runtime, open_runtime
    from pie_xla.server.app import Backend, create_app

    backend = Backend(model, inferlets)
    app = create_app(backend, ["localhost", "127.0.0.1", "[::1]"] if loopback else ["*"])
    options = uvicorn.Config(
        app, log_level="warning", access_log=False, lifespan="off", timeout_graceful_shutdown=GRACE
    )
    server = uvicorn.Server(options)
    loaded: list[Runtime] = []
    failure: list[BaseException] = []
    host, port, *_ = listener.getsockname()

    def load() -> None:
        try:
            progress = stderr_progress()
            runtime = open_runtime(config, model, others=others, serve=True, progress=progress, timings=Timings())
            loaded.append(runtime)
            backend.service = runtime
            click.echo(f"serving {runtime.model_name} on http://{host}:{port}", err=True)
        except BaseException as error:
            failure.append(error)
            server.should_exit = True

    loader = threading.Thread(target=load, name="pie-load", daemon=True)
    loader.start()
    try:
        server.run(sockets=[listener])
    finally:
        for runtime in loaded:
            runtime.close()
    if failure:
        raise failure[0]
