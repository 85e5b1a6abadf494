"""`headgate verify-books`: the care commands go to SQL themselves, so that they work when nothing else runs."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Any

import click
import msgspec
from sqlalchemy.exc import SQLAlchemyError

from accounting import books, ledger, migrate
from accounting.db import Database
from accounting.errors import SchemaError
from accounting.types import BooksReport
from gateway.cli.common import fail, home_option, json_option
from gateway.cli.home import Home
from gateway.unshipped import unshipped

NAMED = 5
"""Failures printed per equation; --json has them all."""


@click.command("verify-books")
@home_option
@json_option
def verify_books(home: Path, as_json: bool) -> None:
    """Check that every engine token is a tenant's or a write-off, and every sum is the sum of its rows.

    Requests that still run, or whose journal is not shipped yet, are left out; their slots are named.
    """
    try:
        report, slots = asyncio.run(_verify(Home(home.expanduser().resolve())))
    except (SchemaError, SQLAlchemyError, OSError) as error:
        fail(f"The books cannot be read: {str(error).splitlines()[0]}")
    if as_json:
        click.echo(msgspec.json.encode(_json(report, slots)))
    else:
        _print(report, slots)
    raise SystemExit(0 if report.ok else 1)


async def _verify(home: Home) -> tuple[BooksReport, list[int]]:
    url = os.environ.get("HEADGATE_DATABASE_URL") or home.database_url
    await asyncio.to_thread(migrate.check, url)
    database = Database(url)
    try:
        # Journals after the snapshot would miss what was shipped in between; before it, nothing can be missed.
        left = {
            slot: unshipped(path, await _offset(database, slot))
            for slot, path in _journals(home).items()
        }
        running = frozenset().union(*(slot.requests for slot in left.values()))
        async with database.read() as conn:
            report = await books.verify(conn, running=running)
    finally:
        await database.close()
    return report, sorted(slot for slot, found in left.items() if found.requests)


async def _offset(database: Database, slot: int) -> int:
    async with database.read() as conn:
        return await ledger.journal_offset(conn, slot) or 0


def _journals(home: Home) -> dict[int, Path]:
    state = Path(os.environ.get("HEADGATE_STATE_DIR") or home.root / "state")
    found = {}
    for path in state.glob("gateway-*/journal"):
        slot = path.parent.name.removeprefix("gateway-")
        if slot.isdigit():
            found[int(slot)] = path
    return found


def _json(report: BooksReport, slots: list[int]) -> dict[str, Any]:
    return {
        "ok": report.ok,
        "as_of": int(time.time()),
        "equations": [
            {
                "id": e.id,
                "name": e.name,
                "ok": e.ok,
                "num_checked": e.num_checked,
                "failures": e.failures,
            }
            for e in report.equations
        ],
        "unreplayed": slots,
    }


def _print(report: BooksReport, slots: list[int]) -> None:
    for equation in report.equations:
        verdict = "ok" if equation.ok else "FAILED"
        click.echo(
            f"{equation.id:<4} {equation.name:<20} {verdict:<7} {equation.num_checked} checked"
        )
        for name in equation.failures[:NAMED]:
            click.echo(f"       {name}")
    if slots:
        click.echo(
            f"Left out: requests of gateway slots {', '.join(map(str, slots))} that are not in SQL yet."
        )


COMMANDS: tuple[click.Command, ...] = (verify_books,)
