"""`headgate config`: what the settings file says, whether it can be used, and one to begin with."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import click

from accounting.values import setting_rows
from gateway.base.settings import PREFIX, SettingsError
from gateway.cli import config_example
from gateway.cli.common import example_text, fail, home_option, json_option
from gateway.cli.config_check import of_error, problems
from gateway.cli.groups import Commands
from gateway.cli.main import config_path
from gateway.configuration.file import ConfigFile, read
from workers.process import masked


@click.group(cls=Commands, epilog=example_text("config check\nconfig show\nconfig example > headgate.toml"))
def config() -> None:
    """Look at headgate.toml and at the settings in force."""


@config.command()
@home_option
@json_option
@click.pass_context
def check(ctx: click.Context, home: Path, as_json: bool) -> None:
    """Say whether the settings can be used. It ends with status 0, or with 78 after one sentence about a fault.

    With --json it lists all faults: of the file's form first, and once it has none, those of values. Of the table of a
    model it lists the first one.
    """
    path = config_path(ctx)
    file = None
    try:
        file = None if path is None else read(path)
        found = problems(file, home)
    except SettingsError as error:
        found = of_error(error, str(path))
    if as_json:
        click.echo(json.dumps({"ok": not found, "problems": [asdict(one) for one in found]}, indent=2))
        ctx.exit(os.EX_CONFIG if found else 0)
    if found:
        fail(found[0].message, os.EX_CONFIG)
    where = "There is no headgate.toml, and the" if file is None else f"{file.path}: the"
    number = "" if file is None else f" and {len(file.models)} models" if len(file.models) != 1 else " and 1 model"
    click.echo(f"{where} settings{number} can be used.")


@config.command()
@home_option
@click.option("--all", "everything", is_flag=True, help="Show the settings that have their defaults, too.")
@json_option
@click.pass_context
def show(ctx: click.Context, home: Path, everything: bool, as_json: bool) -> None:
    """Show each setting: its value, its unit, and where the value comes from. Secrets are masked."""
    path = config_path(ctx)
    try:
        file = None if path is None else read(path)
    except SettingsError as error:
        fail(str(error), os.EX_CONFIG)
    found = [one for one in shown(file, os.environ) if everything or one["from"] != "default"]
    if as_json:
        models = {} if file is None else {name: _model(file, name) for name in file.models}
        click.echo(json.dumps({"file": file and str(file.path), "settings": found, "models": models}, indent=2))
        return
    for one in found:
        unit = f" {one['unit']}" if one["unit"] and one["value"] not in ("", "unset") else ""
        click.echo(f"{one['name']} = {one['value']}{unit}  ({one['from']})")
    for name in () if file is None else file.models:
        click.echo(f"models.{name}: {json.dumps(_model(file, name))}  ({file.path})" if file else "")
    if not found and (file is None or not file.models):
        click.echo("Every setting has its default: `headgate config show --all` lists them.")


@config.command()
def example() -> None:
    """Print a headgate.toml with every setting, its default and what it does, all commented out."""
    click.echo("\n".join(config_example.lines()))


def shown(file: ConfigFile | None, environ: Mapping[str, str]) -> list[dict[str, str]]:
    """Returns each setting with its value, its unit and where the value comes from; secrets are masked."""
    found = []
    for row in setting_rows.read():
        if not row.name.startswith(PREFIX):
            continue
        origin, value = "default", row.default
        if file is not None and row.name in file.variables:
            origin, value = str(file.path), file.variables[row.name]
        if row.name in environ:
            origin, value = "environment", environ[row.name]
        found.append(
            {
                "name": row.name,
                "value": masked.setting(row.name, value) if origin != "default" else value,
                "unit": row.unit,
                "from": origin,
            }
        )
    return found


def _model(file: ConfigFile, name: str) -> dict[str, object]:
    entry = file.models[name]
    return {**entry.told.model_dump(mode="json", exclude_defaults=True), **_plain(entry.env)}


def _plain(variables: Mapping[str, str]) -> dict[str, str]:
    return {name.removeprefix(PREFIX).lower(): masked.setting(name, value) for name, value in variables.items()}


COMMANDS = [config]
