"""Option reading and output of the commands that administrate over HTTP."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

import click
import msgspec
from rich.console import Console
from rich.table import Table

from accounting.values.errors import AccountingError
from gateway.base.home import HomeError
from gateway.cli.api import ApiFailed, NotThere
from gateway.cli.common import fail

FIELDS = ("field", "value")


class OrNone(click.IntRange):
    """A parameter type: a number, or `none` for the default."""

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        return value if value == "none" else super().convert(value, param, ctx)


def body_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options that were given, with `none` as null. Raises UsageError if there is none."""
    body = {
        name: None if value == "none" else value for name, value in given.items() if value is not None and value != ()
    }
    if not body:
        raise click.UsageError("Give at least one option.")
    return body


@contextmanager
def one_sentence() -> Iterator[None]:
    try:
        yield
    except NotThere as error:
        fail(_what_is_not_there() or str(error))
    except (ApiFailed, AccountingError, HomeError) as error:
        fail(str(error))


def _what_is_not_there() -> str:
    """Names the missing object by the command's own arguments, and says where to look for others. A missing tenant is
    reported elsewhere.
    """
    ctx = click.get_current_context()
    arguments = [one.name for one in ctx.command.params if isinstance(one, click.Argument)]
    given = [ctx.params[name] for name in arguments if name and name != "tenant"]
    named = [value for value in given if isinstance(value, str)]
    if not named or ctx.parent is None:
        return ""
    group = ctx.parent.command
    listed = isinstance(group, click.Group) and "list" in group.commands
    hint = f" `headgate {ctx.parent.info_name} list` shows what there is." if listed else ""
    return f"Not found: {', '.join(named)}.{hint}"


def warn(sentence: str) -> None:
    """Prints a warning to standard error, because a program may read the output."""
    click.echo(f"headgate: Warning: {sentence}", err=True)


def show_fields(value: dict[str, Any], as_json: bool) -> None:
    """Prints every field on a line of its own."""
    print_rows(value, as_json, FIELDS, list(value.items()))


def show(value: dict[str, Any], as_json: bool, field: str) -> None:
    """Prints the one field that matters, for `$(headgate ...)`; or the whole object as JSON."""
    click.echo(msgspec.json.encode(value) if as_json else value[field])


def table(objects: Sequence[dict[str, Any]], as_json: bool, columns: Sequence[str]) -> None:
    rows = [] if as_json else [tuple(o[name] for name in columns) for o in objects]
    print_rows(list(objects), as_json, columns, rows)


def print_rows(value: Any, as_json: bool, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    if as_json:
        click.echo(msgspec.json.encode(value))
        return
    drawn = Table(box=None, pad_edge=False)
    for name in columns:
        drawn.add_column(name, overflow="fold")
    one_a_line = tuple(columns) == FIELDS
    for row in rows:
        names = (row[0], row[0]) if one_a_line else columns
        drawn.add_row(*(_cell(name, cell) for name, cell in zip(names, row, strict=True)))
    # The table is never cut: output to a file or another program must be whole.
    console = Console()
    if not console.is_terminal:
        console = Console(width=250)
    console.print(drawn)


def _cell(name: str, cell: Any) -> str:
    """Formats one cell. Times of the API are Unix seconds; people read them in UTC."""
    if type(cell) is int and (name.endswith("_at") or name in ("from", "until")):
        return f"{datetime.fromtimestamp(cell, UTC):%Y-%m-%d %H:%M:%S}"
    return "" if cell is None else str(cell)
