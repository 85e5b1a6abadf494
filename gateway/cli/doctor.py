"""`headgate doctor`: looks at the configuration and at everything that Headgate needs, and says what to do about it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from gateway.base.home import Home
from gateway.base.settings import SettingsError
from gateway.cli import configuration
from gateway.cli.answers import Grid, show
from gateway.cli.common import example_text, home_option, json_option
from gateway.cli.config_check import problems
from gateway.cli.config_commands import shown
from gateway.cli.doctor_checks import CHECKS
from gateway.cli.exit_codes import FAILED
from gateway.cli.finding import Finding, Installation
from gateway.cli.main import config_path
from gateway.configuration.file import ConfigFile, read


@click.command(epilog=example_text("doctor\ndoctor --json"))
@home_option
@json_option
@click.pass_context
def doctor(ctx: click.Context, home: Path, as_json: bool) -> None:
    """Check the settings, ports, versions, database, Redis, clock, disk and GPU. Each finding comes with a remedy.

    It changes nothing, and works whether Headgate runs or not. It ends with status 1 if something fails; a warning
    alone ends with 0.
    """
    file, found = _settings(config_path(ctx), home)
    settings = [one for one in shown(file, os.environ) if one["from"] != "default"]
    if file is not None:
        configuration.load(file.path)
    installation = Installation(Home(home), os.environ)
    for check in CHECKS:
        found += check(installation)
    show({"findings": found, "settings": settings}, lambda _: _drawn(found, settings), as_json)
    if any(one.state == "failing" for one in found):
        raise SystemExit(FAILED)


def _settings(path: Path | None, home: Path) -> tuple[ConfigFile | None, list[Finding]]:
    """Returns the settings file if it can be used, and what there is to say of the settings."""
    fix = "`headgate config show` says where each value comes from; docs/configuration.md has them all."
    file, sentences = None, []
    try:
        file = None if path is None else read(path)
    except SettingsError as error:
        sentences.append(str(error))
    said = (one.message for one in problems(file, home))
    wrong = [Finding("settings", "failing", sentence, fix) for sentence in dict.fromkeys((*sentences, *said))]
    where = "no headgate.toml" if file is None else str(file.path)
    return (file, wrong) if wrong else (file, [Finding("settings", "ok", where)])


def _drawn(found: list[Finding], settings: list[dict[str, str]]) -> tuple[Grid | str, ...]:
    rows: list[Grid | str] = []
    for state, title in (("failing", "To mend:"), ("warning", "To look at:"), ("ok", "In order:")):
        those = [one for one in found if one.state == state]
        if those:
            rows += [title, *_lines(those), ""]
    if settings:
        rows += ["Settings that are not the default:", *(_setting(one) for one in settings), ""]
    failing, warnings = (sum(one.state == state for one in found) for state in ("failing", "warning"))
    return (*rows, f"{failing} to mend, {warnings} to look at, {len(found) - failing - warnings} in order.")


def _lines(found: list[Finding]) -> list[str]:
    width = max(len(one.name) for one in found)
    lines = []
    for one in found:
        lines.append(f"  {one.name:<{width}}  {one.says}")
        if one.fix:
            lines.append(f"  {'':<{width}}  -> {one.fix}")
    return lines


def _setting(one: dict[str, Any]) -> str:
    unit = f" {one['unit']}" if one["unit"] else ""
    return f"  {one['name']} = {one['value']}{unit}  ({one['from']})"


COMMANDS: tuple[click.Command, ...] = (doctor,)
