"""`headgate verify-books`, `headgate journals`: the care commands go to SQL themselves, so that they work when nothing else runs."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import click
import msgspec
from sqlalchemy.exc import SQLAlchemyError

from accounting import ledger, migrate
from accounting.db import Database
from accounting.errors import SchemaError
from accounting.types import BooksReport
from gateway.cli import embedded
from gateway.cli.admin import table
from gateway.cli.common import fail, home_option, json_option
from gateway.cli.home import Home
from gateway.journals import (
    JournalState,
    gateway_journals,
    of_gateway,
    of_worker,
    worker_journals,
)
from gateway.limits import limiter_link
from gateway.verification import Verified, verify

REDIS_TIMEOUT_S = 2.0
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
        found = asyncio.run(_verify(Home(home.expanduser().resolve())))
    except (SchemaError, SQLAlchemyError, OSError) as error:
        fail(f"The books cannot be read: {str(error).splitlines()[0]}")
    if as_json:
        click.echo(msgspec.json.encode(found.shape()))
    else:
        _print(found.report, found.unreplayed)
    raise SystemExit(0 if found.report.ok else 1)


@click.group()
def journals() -> None:
    """What gateways and workers wrote down before it came into the books."""


@journals.command("list")
@home_option
@json_option
def list_journals(home: Path, as_json: bool) -> None:
    """Every slot of this machine: sizes, and how many requests run, or ended and are not in SQL yet."""
    try:
        found = asyncio.run(_list(Home(home.expanduser().resolve())))
    except (SchemaError, SQLAlchemyError, OSError) as error:
        fail(f"The journals cannot be read: {str(error).splitlines()[0]}")
    table([msgspec.structs.asdict(one) for one in found], as_json, JournalState.__struct_fields__)


async def _verify(home: Home) -> Verified:
    link = limiter_link(_redis_url(home), timeout_s=REDIS_TIMEOUT_S)
    try:
        async with _books(home) as database:
            return await verify(database, _state_dir(home), link)
    finally:
        await link.close()


async def _list(home: Home) -> list[JournalState]:
    state_dir = _state_dir(home)
    slots = gateway_journals(state_dir)
    async with _books(home) as database, database.read() as conn:
        offsets = {slot: await ledger.journal_offset(conn, slot) or 0 for slot in slots}
    found = [await asyncio.to_thread(of_gateway, n, slots[n], offsets[n]) for n in sorted(slots)]
    workers = sorted(worker_journals(state_dir).items())
    return found + [await asyncio.to_thread(of_worker, slot, path) for slot, path in workers]


@asynccontextmanager
async def _books(home: Home) -> AsyncIterator[Database]:
    url = os.environ.get("HEADGATE_DATABASE_URL") or home.database_url
    await asyncio.to_thread(migrate.check, url)
    database = Database(url)
    try:
        yield database
    finally:
        await database.close()


def _redis_url(home: Home) -> str:
    """Where nobody answers, what is compared with Redis is left out."""
    return os.environ.get("HEADGATE_REDIS_URL") or embedded.redis_url(home.run / "redis.sock")


def _state_dir(home: Home) -> Path:
    return Path(os.environ.get("HEADGATE_STATE_DIR") or home.root / "state")


def _print(report: BooksReport, slots: Sequence[int]) -> None:
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


COMMANDS: tuple[click.Command, ...] = (verify_books, journals)
