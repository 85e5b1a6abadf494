"""`headgate adapters`: LoRA adapters loaded and unloaded while serving. The command uses the same HTTP API as any
program of the operator.
"""

from __future__ import annotations

from pathlib import Path

import click

from gateway.cli.admin import one_sentence, show, table
from gateway.cli.api import AdminApi
from gateway.cli.common import home_option, json_option
from gateway.cli.groups import Commands

PATH = "/admin/v1/adapters"


@click.group(cls=Commands)
def adapters() -> None:
    """Serve LoRA adapters of a model, as MODEL:NAME."""


@adapters.command("add")
@click.argument("model")
@click.argument("name")
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--tenant", help="Only this tenant sees it.  [default: every tenant]")
@home_option
@json_option
def add(model: str, name: str, path: Path, tenant: str | None, home: Path, as_json: bool) -> None:
    """Load the adapter in PATH for MODEL. PATH is a directory in PEFT's form on the workers' machines."""
    body = {"model": model, "name": name, "path": str(path.absolute()), "tenant": tenant}
    with one_sentence():
        show(AdminApi.of(home).call("POST", PATH, body), as_json, "id")


@adapters.command("list")
@home_option
@json_option
def list_adapters(home: Path, as_json: bool) -> None:
    """List adapters, the newest first; `loaded` means that every worker of the model has it."""
    with one_sentence():
        columns = ("id", "served_as", "state", "tenant", "path")
        table(AdminApi.of(home).every(PATH), as_json, columns)


@adapters.command("remove")
@click.argument("adapter_id")
@home_option
@json_option
def remove(adapter_id: str, home: Path, as_json: bool) -> None:
    """Remove an adapter, by its id; requests that run with it end first."""
    with one_sentence():
        show(AdminApi.of(home).call("DELETE", f"{PATH}/{adapter_id}"), as_json, "id")


COMMANDS: tuple[click.Command, ...] = (adapters,)
