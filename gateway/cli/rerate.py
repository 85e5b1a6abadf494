"""`headgate rerate`: the cost of a month under another price sheet."""

from __future__ import annotations

from pathlib import Path

import click
import msgspec

from accounting.database.db import Database
from accounting.prices import rerating
from accounting.prices.rerating import Difference
from gateway.cli.answers import Grid, show
from gateway.cli.books_access import with_books
from gateway.cli.common import example_text, home_option, json_option
from gateway.schema.money import decimal


@click.command(epilog=example_text("rerate --period 2026-10 --sheet standard@2"))
@click.option("--period", required=True, metavar="YYYY-MM", help="The month, in UTC.")
@click.option(
    "--sheet",
    required=True,
    metavar="SHEET[@VERSION]",
    help="Price sheet. Without a version, each request has the version in force at its start.",
)
@click.option("--tenant", help="Id of the one tenant.  [default: every tenant]")
@home_option
@json_option
def rerate(period: str, sheet: str, tenant: str | None, home: Path, as_json: bool) -> None:
    """Compute what a month would have cost under another price sheet, line by line. This writes nothing: to act on it,
    give credits.
    """

    async def work(database: Database) -> list[Difference]:
        async with database.read() as conn:
            return await rerating.rerate(conn, period, sheet, tenant)

    found = with_books(home, work)
    columns = ("tenant_id", "model", "tier", "token_class", "quantity", "charged", "rerated", "difference")
    values = [{**msgspec.structs.asdict(line), "difference": line.difference} for line in found]
    money = columns[-3:]
    rows = [(*(value[name] for name in columns[:5]), *(decimal(value[name], 2) for name in money)) for value in values]
    totals = [decimal(sum(value[name] for value in values), 2) for name in money]
    show(values, Grid(columns, [*rows, ("total", "", "", "", "", *totals)]), as_json)


COMMANDS: tuple[click.Command, ...] = (rerate,)
