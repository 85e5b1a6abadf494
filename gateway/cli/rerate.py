"""`headgate rerate`: the cost of a month under another price sheet."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import msgspec

from accounting.database.db import Database
from accounting.prices import rerating
from accounting.prices.rerating import Difference
from accounting.values.progress import Told
from gateway.cli.answers import Grid, show
from gateway.cli.books_access import with_books
from gateway.cli.common import example_text, home_option, json_option
from gateway.cli.money import cost
from gateway.cli.progress import progress

MONEY = ("charged", "rerated", "difference")


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

    async def work(database: Database, told: Told) -> list[Difference]:
        async with database.read() as conn:
            return await rerating.rerate(conn, period, sheet, tenant, told)

    with progress("Rerating", quiet=as_json) as told:
        found = with_books(home, lambda database: work(database, told))
    values = [{**msgspec.structs.asdict(line), "difference": line.difference} for line in found]
    columns = ("tenant_id", "model", "tier", "token_class", "quantity")
    rows = [(*(value[name] for name in columns), *_money(value)) for value in values]
    totals = [
        ("total", *("" for _ in columns[1:]), *_money(_total(currency, values)))
        for currency in sorted({line.currency for line in found})
    ]
    show(values, Grid((*columns, *MONEY), [*rows, *totals]), as_json)


def _total(currency: str, values: list[dict[str, Any]]) -> dict[str, Any]:
    """Adds the lines of one currency."""
    mine = [value for value in values if value["currency"] == currency]
    return {"currency": currency, **{name: sum(value[name] for value in mine) for name in MONEY}}


def _money(value: dict[str, Any]) -> list[str]:
    return [cost(value[name], value["currency"]) for name in MONEY]


COMMANDS: tuple[click.Command, ...] = (rerate,)
