"""The checks of `headgate doctor` that look at the database: its schema, its commits, its key files, and what was written off."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import TypeVar

from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection

from accounting.database import migrate
from accounting.database.db import Database, first_line
from accounting.ledger.write_off_sums import recent_losses
from accounting.lifecycle import master_key
from accounting.values.errors import AccountingError, SchemaNewer, SchemaOlder
from gateway.base.home import Home, HomeError
from gateway.cli.finding import Finding, Installation, failing
from gateway.cli.start_checks import refuse_new_secrets
from workers.process import masked

T = TypeVar("T")

NUM_NAMED = 5
"""The number of tenants that one finding names."""


def database(installation: Installation) -> Iterator[Finding]:
    given = installation.environ.get("HEADGATE_DATABASE_URL")
    url = given or installation.home.database_url
    shown = masked.text(url)
    if not given and not installation.home.database.exists():
        yield Finding("database", "ok", "There is none yet: `headgate up` makes it")
        return
    try:
        migrate.check(url)
    except SchemaOlder as error:
        yield Finding("database", "failing", str(error), "headgate migrate")
    except SchemaNewer as error:
        said, _, remedy = str(error).partition(": ")
        yield Finding("database", "failing", said, remedy.capitalize())
    except AccountingError as error:
        said, _, remedy = str(error).partition(". ")
        yield Finding("database", "failing", said, remedy or "Set HEADGATE_DATABASE_URL.")
    else:
        yield _commits(url) or Finding("database", "ok", f"{shown}, schema current")
        yield from _key_files(installation.home, url)


def write_offs(installation: Installation) -> Iterator[Finding]:
    """Names tenants of whom much was written off lately. A database that cannot be read is told of by `database`."""
    url = installation.environ.get("HEADGATE_DATABASE_URL") or installation.home.database_url
    try:
        migrate.check(url)
        lost = _read(url, lambda conn: recent_losses(conn, int(time.time() * 1000)))
    except (AccountingError, SQLAlchemyError, OSError):
        return
    if not lost:
        yield Finding("write-offs", "ok", "at most 1 % of each tenant's tokens of the last hours were written off")
        return
    named = ", ".join(f"{loss.tenant_id} {loss.share:.1%} ({loss.reason})" for loss in lost[:NUM_NAMED])
    more = f" and of {len(lost) - NUM_NAMED} more" if len(lost) > NUM_NAMED else ""
    said = f"more than 1 % of the last hours' tokens were written off of {named}{more}"
    yield Finding(
        "write-offs", "warning", said, "docs/runbooks.md says what each reason means (HeadgateTenantWriteOffs)."
    )


def _key_files(home: Home, url: str) -> Iterator[Finding]:
    """Says whether the home has the key files that belong to its database. `secrets` tells of damaged ones."""
    try:
        refuse_new_secrets(home, url)
    except HomeError as error:
        if not home.database.exists():
            yield failing("secrets", str(error))
        return
    try:
        master = home.read_secret("master.key")
    except HomeError:
        return
    try:
        if _read(url, lambda conn: master_key.is_foreign(conn, master)):
            yield failing("secrets", master_key.FOREIGN)
    except SQLAlchemyError as error:  # the database answered a moment ago
        yield Finding("database", "failing", first_line(error), "See that it runs.")


def _commits(url: str) -> Finding | None:
    """Returns what is wrong with PostgreSQL's commits, if anything is."""
    try:
        unsafe = migrate.unsafe_settings(url)
    except AccountingError as error:
        return Finding("database", "failing", str(error), "See that it runs.")
    if not unsafe:
        return None
    said = f"PostgreSQL has {' and '.join(f'{name} = off' for name in unsafe)}: a crash may lose charges that it has confirmed"
    fix = f"Set {' and '.join(unsafe)} to on in postgresql.conf, or for the database by ALTER DATABASE."
    return Finding("database", "failing", said, fix)


def _read(url: str, ask: Callable[[AsyncConnection], Awaitable[T]]) -> T:
    """Asks the database one thing, by a connection of its own. Raises `SQLAlchemyError` and `OSError`."""

    async def asked() -> T:
        database = Database(url)
        try:
            async with database.read() as conn:
                return await ask(conn)
        finally:
            await database.close()

    return asyncio.run(asked())
