"""Every subcommand shares these: `--home` and `--json`, before and after it, and one clear sentence with a status."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import click

from gateway.base.home import HomeError, default_home
from gateway.cli.exit_codes import FAILED

HOME, JSON = "headgate.home", "headgate.json"
"""Keys of the context: what was typed before the subcommand."""
_HOME_HELP = "State directory, which holds the database, keys, journals and sockets."
_HOME_DEFAULT = "$HEADGATE_HOME, else .headgate here, else ~/.headgate"
_JSON_HELP = "Print JSON instead of text."


def _default_home() -> str:
    ctx = click.get_current_context(silent=True)
    if ctx is not None and (given := ctx.meta.get(HOME)) is not None:
        return str(given)
    try:
        return str(default_home())
    except HomeError as error:
        raise click.UsageError(str(error)) from None


def _named(ctx: click.Context, param: click.Parameter, value: str) -> Path:
    if not value:
        raise click.BadParameter("must not be empty.", ctx, param)
    try:
        return Path(value).expanduser().resolve()
    except (RuntimeError, ValueError) as error:
        raise click.BadParameter(f"{value!r} names no directory: {error}", ctx, param) from None


def _either(ctx: click.Context, param: click.Parameter, value: bool) -> bool:
    return value or bool(ctx.meta.get(JSON))


home_option = click.option(
    "--home",
    type=click.Path(file_okay=False),
    callback=_named,
    default=_default_home,
    show_default=_HOME_DEFAULT,
    help=_HOME_HELP,
)
json_option = click.option("--json", "as_json", is_flag=True, callback=_either, help=_JSON_HELP)


def _remembered(key: str) -> Callable[..., None]:
    def remember(ctx: click.Context, param: click.Parameter, value: Any) -> None:
        if value:
            ctx.meta[key] = value

    return remember


def options_before(*, hidden: bool) -> list[click.Parameter]:
    """Returns `--home` and `--json` for a group, which keeps them for the command that follows."""
    how = {"expose_value": False, "hidden": hidden}
    home = click.Option(["--home"], callback=_remembered(HOME), metavar="DIRECTORY", help=_HOME_HELP, **how)
    return [home, click.Option(["--json"], callback=_remembered(JSON), is_flag=True, help=_JSON_HELP, **how)]


def example_text(lines: str) -> str | None:
    """Returns the end of a command's help: what an operator would type. Each line lacks the word `headgate`."""
    return "\b\nExample:\n" + "".join(f"  headgate {line}\n" for line in lines.splitlines()) if lines else None


def fail(message: str, status: int = FAILED) -> NoReturn:
    click.echo(f"headgate: {message}", err=True)
    raise SystemExit(status)
