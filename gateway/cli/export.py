"""`headgate export`: ledger, usage and FOCUS rows as files, read from SQL."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import click

from accounting.database.db import Database
from accounting.exports import exports, focus
from accounting.values.progress import Told
from gateway.cli.books_access import with_books
from gateway.cli.common import example_text, home_option
from gateway.cli.groups import Commands
from gateway.cli.progress import progress
from gateway.cli.row_files import FORMATS, Columns, Format
from gateway.cli.times import MOMENT, refuse_empty_span
from gateway.cli.whole_file import whole_file

Pages = AsyncIterator[Sequence[Sequence[Any]]]


@click.group(cls=Commands)
def export() -> None:
    """Write rows of the books as files for other programs. A file appears when it is whole, or not at all."""


def _command(name: str, summary: str, columns: Columns, pages: Callable[..., Pages]) -> None:
    @export.command(
        name, help=summary, epilog=example_text(f"export {name} --from 2026-10-01 --to 2026-11-01 --out {name}.csv")
    )
    @click.option("--from", "start", type=MOMENT, required=True, help="Start of the range, included, in UTC.")
    @click.option("--to", "end", type=MOMENT, required=True, help="End of the range, not included, in UTC.")
    @click.option(
        "--format",
        "kind",
        type=click.Choice(list(FORMATS)),
        default="csv",
        show_default=True,
        help="Format of the file.",
    )
    @click.option(
        "--out",
        type=click.Path(path_type=Path, dir_okay=False),
        default="-",
        show_default="standard output",
        help="File to write.",
    )
    @home_option
    def command(start: int, end: int, kind: Format, out: Path, home: Path) -> None:
        refuse_empty_span(start, end)

        async def work(database: Database, told: Told) -> int:
            place = nullcontext(sys.stdout.buffer) if out == Path("-") else whole_file(out)
            num_rows = 0
            with place as file:
                target = FORMATS[kind](file, columns)
                async for page in pages(database, start, end, told=told):
                    target.write(page)
                    num_rows += len(page)
                target.close()
            return num_rows

        with progress("Exporting") as told:
            num_rows = with_books(home, lambda database: work(database, told))
        click.echo(f"{num_rows} rows", err=True)


_command(
    "ledger",
    "Write every ledger row of requests that began in the range: settles, voids, write-offs and credits.",
    Columns(exports.LEDGER_COLUMNS, exports.INTEGERS),
    exports.ledger_rows,
)
_command(
    "usage",
    "Write sums by day, tenant, key, model, tier and price. Amounts are in micro-units.",
    Columns(exports.USAGE_COLUMNS, exports.INTEGERS),
    exports.usage_rows,
)
_command(
    "focus",
    "Write the format FOCUS 1.2: a row for each day, key, model, tier and token class, and one for each credit.",
    Columns(focus.COLUMNS, focus.INTEGERS, focus.DECIMALS),
    focus.rows,
)

COMMANDS: tuple[click.Command, ...] = (export,)
