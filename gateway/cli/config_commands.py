"""`headgate config`: what the settings file says, whether it can be used, and one to begin with."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import click

from accounting.values import environment
from gateway.base.settings import PREFIX, ModelSource, SettingsError
from gateway.base.settings import load as load_gateway
from gateway.cli import setting_rows
from gateway.cli.common import example_text, fail, home_option, json_option
from gateway.cli.groups import Commands
from gateway.cli.main import config_path
from gateway.cli.setting_rows import Row
from gateway.configuration import model_sources
from gateway.configuration.file import OF_ONE_PROCESS, ConfigFile, read
from gateway.configuration.place import CONFIG, CONFIG_NAMES
from gateway.generation.model_files import check_names
from gateway.schema.settings import MASK, without_secrets

_SECRET = re.compile(r"SECRET|PASSWORD|API_KEY")


@click.group(cls=Commands, epilog=example_text("config check\nconfig show\nconfig example > headgate.toml"))
def config() -> None:
    """Look at headgate.toml and at the settings in force."""


@config.command()
@home_option
@click.pass_context
def check(ctx: click.Context, home: Path) -> None:
    """Say whether the settings can be used. It ends with status 0, or with 78 after one sentence about a fault."""
    path = config_path(ctx)
    try:
        file = None if path is None else read(path)
        fault = next(faults(file, home), None)
    except SettingsError as error:
        fail(str(error), os.EX_CONFIG)
    if fault is not None:
        fail(fault, os.EX_CONFIG)
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
    click.echo("\n".join(_example()))


def faults(file: ConfigFile | None, home: Path) -> Iterator[str]:
    """Yields what is wrong with the settings, one sentence each: names first, then values as each process reads them."""
    unknown = environment.unknown(os.environ)
    if unknown is not None:
        yield unknown
    base = {name: value for name, value in os.environ.items() if name not in (CONFIG, CONFIG_NAMES)}
    environ = {**base, **(file.added_to(base) if file else {})}
    environ.setdefault("HEADGATE_HOME", str(home))
    try:
        load_gateway(environ)
        if file is not None:
            check_names(
                {name: ModelSource.model_validate({"path": "/", **one.source}) for name, one in file.models.items()},
                model_sources.foreign(environ),
            )
    except SettingsError as error:
        yield str(error)
    yield from _paths(file)
    needed = {"HEADGATE_URL": "http://localhost", "HEADGATE_BROKER_URL": "memory://", "HEADGATE_MODEL": "any"}
    environ = {**needed, **environ}
    yield from _of_process("workers.jobs.base.settings", environ)
    yield from _of_process("workers.engine.settings", environ)
    for name, entry in {} if file is None else file.models.items():
        if own := entry.added_to(environ):
            yield from (f"models.{name}: {said}" for said in _of_process("workers.engine.settings", {**environ, **own}))


def _paths(file: ConfigFile | None) -> Iterator[str]:
    for name, entry in {} if file is None else file.models.items():
        path = entry.told.path
        if path.startswith("/") and not Path(path, "config.json").is_file():
            yield f"models.{name}.path is {path}, which is not a directory with a config.json: name another, or a hub id."


def _of_process(module: str, environ: Mapping[str, str]) -> Iterator[str]:
    done = subprocess.run([sys.executable, "-m", module], capture_output=True, text=True, env=environ, check=False)
    if done.returncode == os.EX_CONFIG:
        yield done.stderr.strip()


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
        found.append({"name": row.name, "value": _masked(row, value), "unit": row.unit, "from": origin})
    return found


def _masked(row: Row, value: str) -> str:
    if _SECRET.search(row.name) and value not in ("", row.default):
        return MASK
    return without_secrets(value) if "://" in value else value


def _model(file: ConfigFile, name: str) -> dict[str, object]:
    entry = file.models[name]
    return {**entry.told.model_dump(mode="json", exclude_defaults=True), **_plain(entry.env)}


def _plain(variables: Mapping[str, str]) -> dict[str, str]:
    return {name.removeprefix(PREFIX).lower(): value for name, value in variables.items()}


def _example() -> Iterator[str]:
    yield "# Settings of Headgate. A variable HEADGATE_NAME wins over `name` of this file, and a flag over both."
    yield "# `headgate config check` says whether this file can be used. Restart after a change; models alone are read again"
    yield "# by `headgate reload`."
    yield ""
    yield "# Models. Each has a table, whose name is what clients put into `model`."
    yield "# [models.demo]"
    rows = setting_rows.read()
    for row in rows:
        if row.process == "Models":
            yield f"# {row.name} = {_model_default(row)}  # {row.text}"
    yield "# engine_max_running = 64  # Any setting of workers that begins with engine_, for this model alone."
    process = ""
    for row in rows:
        if row.name in OF_ONE_PROCESS or not row.name.startswith(PREFIX):
            continue
        if row.process != process:
            process = row.process
            yield f"\n# --- {process} ---"
        yield f"\n# {row.text}"
        yield f"# {row.name.removeprefix(PREFIX).lower()} = {_toml(row.default)}"


def _model_default(row: Row) -> str:
    examples = {
        "tool_format": '"hermes"',
        "reasoning_format": '"think"',
        "path": '"/models/demo"',
        "price": "{ input = 0.10, output = 0.40 }",
        "max_model_len": "8192",
    }
    if row.name in ("aliases", "fallbacks"):
        return "[]"
    return examples.get(row.name, "4096" if row.default == "unset" else row.default)


def _toml(default: str) -> str:
    if default in ("true", "false"):
        return default
    try:
        float(default)
    except ValueError:
        return json.dumps("" if default in ("unset", "must be set") else default)
    return default


COMMANDS = [config]
