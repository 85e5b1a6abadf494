"""How the answer of a command is shown: one field, every field, a table, or JSON. A refusal is one sentence."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import click
import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from accounting.values.errors import AccountingError
from gateway.base.home import HomeError
from gateway.cli.api import ApiFailed, NotThere
from gateway.cli.common import fail
from gateway.cli.times import moment

FIELDS = ("field", "value")
_NUMBER = re.compile(r"(-?[\d,]+(\.\d+)?( ([A-Z]{3}|%|s|ms|MB))?)?")
WIDTH = 250
"""The width of a table that is not printed to a terminal."""


@dataclass(frozen=True, slots=True)
class Grid:
    """A table before it is drawn."""

    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]


Drawn = Grid | str
Shows = str | tuple[str, ...] | Grid | Callable[[Any], Drawn | tuple[Drawn, ...]]
"""This says what is printed without `--json`. A name is the one field that matters, for `$(headgate ...)`. Several names are the
columns of a table, with a row for each object of the answer. A function makes a table or a text of the answer, or
several of them, which stand one below the other.
"""


def show(answer: Any, shows: Shows, as_json: bool) -> None:
    """Prints the answer as `shows` says, or all of it as JSON."""
    if as_json:
        click.echo(msgspec.json.encode(answer))
        return
    drawn = _drawn(answer, shows)
    for one in drawn if isinstance(drawn, tuple) else (drawn,):
        if isinstance(one, Grid):
            _print(one)
        else:
            click.echo(one)


def fields(answer: dict[str, Any]) -> Grid:
    """Returns a table with every field on its own line."""
    return Grid(FIELDS, list(answer.items()))


def warn(sentence: str) -> None:
    """Prints a warning to standard error, because a program may read the output."""
    click.echo(f"headgate: Warning: {sentence}", err=True)


@contextmanager
def one_sentence() -> Iterator[None]:
    """Ends the command with one sentence if the API, the books or the home refuse it."""
    try:
        yield
    except NotThere as error:
        fail(_what_is_not_there() or str(error), code="not_found")
    except ApiFailed as error:
        fail(str(error), code=error.code)
    except (AccountingError, HomeError) as error:
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
    where = "requests" if any(value.startswith("req_") for value in named) else ctx.parent.info_name
    hint = f" `headgate {where} list` shows what there is." if listed else ""
    return f"Not found: {', '.join(named)}.{hint}"


def _drawn(answer: Any, shows: Shows) -> Drawn | tuple[Drawn, ...]:
    if isinstance(shows, str):
        return str(answer[shows])
    if isinstance(shows, tuple):
        objects = answer if isinstance(answer, list) else [answer]
        return Grid(shows, [[one[name] for name in shows] for one in objects])
    return shows if isinstance(shows, Grid) else shows(answer)


def _print(grid: Grid) -> None:
    # The table is never cut: output to a file or another program must be whole.
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)
    with console.capture() as captured:  # rich would end the command by itself where the reader has gone
        console.print(drawn(grid))
    click.echo(captured.get(), nl=False)


def drawn(grid: Grid) -> Table:
    """Returns the table as it is printed: padded columns, numbers and amounts to the right."""
    table = Table(box=None, pad_edge=False)
    cells = [[_cell(name, cell) for name, cell in zip(_names(grid, row), row, strict=True)] for row in grid.rows]
    for at, name in enumerate(grid.columns):
        is_number = grid.columns != FIELDS and all(_NUMBER.fullmatch(row[at]) for row in cells)
        table.add_column(name, overflow="fold", justify="right" if is_number and cells else "left")
    for row in cells:
        table.add_row(*row)
    return table


def _names(grid: Grid, row: Sequence[Any]) -> Sequence[str]:
    return (row[0], row[0]) if grid.columns == FIELDS else grid.columns


def _cell(name: str, cell: Any) -> str:
    """Formats one cell. Times of the API are Unix seconds; people read them in UTC."""
    if type(cell) is int and (name.endswith("_at") or name in ("from", "until")):
        return moment(cell)
    return "" if cell is None else harmless(str(cell))


def harmless(text: str) -> str:
    """Returns a text that a terminal shows and does not obey: no control characters, no markup."""
    return escape("".join(char if char.isprintable() else f"\\u{ord(char):04x}" for char in text))
