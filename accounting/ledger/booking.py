"""Writes the legs of ledger entries that are in SQL already.

An ending has about 13 legs. PostgreSQL makes them itself from its own rows, so that they are neither encoded nor sent
nor parsed; SQLite runs in this process and would gain nothing from that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import BigInteger, Insert, Text, and_, bindparam, case, column, func, insert, or_, select, true, values
from sqlalchemy.dialects.postgresql import ARRAY
from sqlalchemy.engine import Compiled, make_url
from sqlalchemy.ext.asyncio import AsyncConnection

from accounting.database.db import insert_all
from accounting.ledger.legs import RULES, TAKERS, Rule, legs
from accounting.tables.models import LedgerEntry, LedgerLeg
from accounting.values.types import BILLED, LedgerRow

KEY = ("request_id", "kind", "attempt")


async def book(conn: AsyncConnection, entries: Sequence[LedgerRow]) -> None:
    """Write the legs, in the transaction that wrote the entries."""
    if not entries:
        return
    if conn.dialect.name == "sqlite":
        booked = [leg for entry in entries for leg in legs(entry)]
        await insert_all(conn, LedgerLeg.__table__, booked)
        return
    keys = {f"{name}s": [entry[name] for entry in entries] for name in KEY}
    await conn.exec_driver_sql(_BOOK.string, {**_BOOK.params, **keys})


def _compiled() -> Compiled:
    """Compile the statement once: SQLAlchemy does not cache a compiled statement that contains a VALUES."""
    return _statement().compile(dialect=make_url("postgresql+psycopg://").get_dialect()())


def _statement() -> Insert:
    entry = LedgerEntry
    wanted = (
        func.unnest(
            bindparam("request_ids", type_=ARRAY(Text)),
            bindparam("kinds", type_=ARRAY(Text)),
            bindparam("attempts", type_=ARRAY(BigInteger)),
        )
        .table_valued(*KEY, name="wanted")
        .render_derived()
    )
    leg = (
        values(
            column("account", Text),
            column("unit", Text),
            column("token_class", Text),
            column("amount", BigInteger),
            name="leg",
        )
        .data([_leg(rule) for rule in RULES])
        .lateral()
    )
    keys = [getattr(entry, name) for name in KEY]
    matches = and_(*(key == wanted.c[key.name] for key in keys))
    rows = wanted.join(entry, matches).join(leg, true())
    source = select(*keys, leg).select_from(rows).where(leg.c.amount != 0)
    return insert(LedgerLeg).from_select([*KEY, *leg.c.keys()], source)


def _leg(rule: Rule) -> tuple[Any, ...]:
    billed, other = TAKERS
    taker = case((or_(*(LedgerEntry.kind == kind for kind in BILLED)), billed), else_=other)
    amount = rule.sign * getattr(LedgerEntry, rule.column)
    return rule.account or taker, rule.unit or LedgerEntry.currency, rule.token_class, amount


_BOOK = _compiled()
