"""Every subcommand shares these: `--home` and `--json`, before and after it, and one clear sentence with a status."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import click
from click.core import ParameterSource

from gateway.base.home import HomeError, default_home, why_no_home
from gateway.cli.exit_codes import CONFIG, FAILED

HOME, JSON = "headgate.home", "headgate.json"
"""Keys of the context: what was typed before the subcommand."""
WORDS = "headgate.words"
"""The key of the whole command line."""
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
        fail(str(error), CONFIG)


def _named(ctx: click.Context, param: click.Parameter, value: str) -> Path:
    if not value:
        raise click.BadParameter("must not be empty.", ctx, param)
    try:
        home = Path(value).expanduser().resolve()
    except (OSError, RuntimeError, ValueError) as error:
        raise click.BadParameter(f"{value!r} names no directory: {error}", ctx, param) from None
    why = why_no_home(home)
    if why is None:
        return home
    is_typed = ctx.get_parameter_source("home") is not ParameterSource.DEFAULT or ctx.meta.get(HOME) is not None
    if not is_typed and "HEADGATE_HOME" in os.environ:
        fail(f"The environment variable HEADGATE_HOME = {value!r} {why}: name a directory, or unset it.", CONFIG)
    raise click.BadParameter(f"{value!r} {why}: name a directory.", ctx, param)


def _either(ctx: click.Context, param: click.Parameter, value: bool) -> bool:
    return value or bool(ctx.meta.get(JSON))


class _Directory(click.Path):
    """A directory that `_named` checks, because only it knows where the name was given."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return value


home_option = click.option(
    "--home",
    type=_Directory(file_okay=False),
    callback=_named,
    default=_default_home,
    show_default=_HOME_DEFAULT,
    help=_HOME_HELP,
)
json_option = click.option("--json", "as_json", is_flag=True, callback=_either, help=_JSON_HELP)


def confirmation(question: str | Callable[[click.Context], str]) -> Callable[[Any], Any]:
    """Returns an option `--yes`, without which the question is asked: on standard error, because a program may read the
    output. A function makes the question of what was typed.
    """

    def ask(ctx: click.Context, _: click.Parameter, value: bool) -> None:
        if not value and not ctx.resilient_parsing:
            click.confirm(question if isinstance(question, str) else question(ctx), abort=True, err=True)

    return click.option(
        "--yes", is_flag=True, expose_value=False, callback=ask, help="Confirm the action without prompting."
    )


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


def fail(message: str, status: int = FAILED, code: str | None = None) -> NoReturn:
    """Ends the command with one sentence. `code` is the API's own word for the error, if it has one."""
    ctx = click.get_current_context(silent=True)
    tell(message, status, code, as_json=ctx is not None and json_is_asked(ctx.meta.get(WORDS, ())))
    raise SystemExit(status)


def tell(message: str, status: int, code: str | None = None, *, as_json: bool) -> None:
    """Says on standard error what went wrong; and on standard output as an object, for a program that reads JSON there."""
    click.echo(f"headgate: {message}", err=True)
    if as_json:
        with contextlib.suppress(OSError, ValueError):  # the output may be what went wrong
            click.echo(json.dumps({"error": {"message": message, "code": code, "status": status}}))


def json_is_asked(words: Sequence[str]) -> bool:
    """Says whether `--json` stands anywhere in a command line, also in one that cannot be understood."""
    options = words[: words.index("--")] if "--" in words else words
    return "--json" in options
