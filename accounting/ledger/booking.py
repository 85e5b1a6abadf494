"""Writes the legs of ledger entries that are in SQL already.

An ending has about 13 legs. The database makes them itself from its own rows. So PostgreSQL is not sent what it has,
and SQLite's driver does not stop for the interpreter at each leg.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from sqlalchemy import (
    BigInteger,
    Case,
    Insert,
    Text,
    and_,
    bindparam,
    case,
    column,
    func,
    insert,
    literal,
    literal_column,
    or_,
    select,
    true,
    union_all,
    values,
)
from sqlalchemy.dialects import sqlite
from sqlalchemy.dialects.postgresql import ARRAY
from sqlalchemy.engine import Compiled, make_url
from sqlalchemy.ext.asyncio import AsyncConnection

from accounting.ledger.legs import RULES, TAKERS, Rule
from accounting.tables.models import LedgerEntry, LedgerLeg
from accounting.values.types import BILLED, LedgerRow

KEY = ("request_id", "kind", "attempt")


async def book(conn: AsyncConnection, entries: Sequence[LedgerRow]) -> None:
    """Writes the legs, in the transaction that wrote the entries."""
    if not entries:
        return
    if conn.dialect.name == "sqlite":
        wanted = [[entry[name] for name in KEY] for entry in entries]
        await conn.exec_driver_sql(_BOOK_ON_SQLITE, {"keys": msgspec.json.encode(wanted).decode()})
        return
    keys = {f"{name}s": [entry[name] for entry in entries] for name in KEY}
    await conn.exec_driver_sql(_BOOK.string, {**_BOOK.params, **keys})


def _compiled() -> Compiled:
    """Compiles the statement once: SQLAlchemy does not cache a compiled statement that contains a VALUES."""
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


def _on_sqlite() -> str:
    """Returns the same statement for SQLite, which has neither LATERAL nor names for the columns of VALUES. SQLite
    keeps the order of a CROSS JOIN; else it would look for the entries anew for each rule.
    """
    entry = LedgerEntry
    wanted = func.json_each(literal_column(":keys")).table_valued("value", name="wanted")
    of_rules = (
        select(
            literal(number).label("number"),
            literal(rule.account, Text).label("account"),
            literal(rule.unit, Text).label("unit"),
            literal(rule.token_class).label("token_class"),
        )
        for number, rule in enumerate(RULES)
    )
    rule = union_all(*of_rules).subquery("rule")
    legs = [_leg(one) for one in RULES]
    amount = case({number: leg[-1] for number, leg in enumerate(legs)}, value=rule.c.number)
    account = func.coalesce(rule.c.account, _taker())
    keys = [getattr(entry, name) for name in KEY]
    matches = and_(*(key == func.json_extract(wanted.c.value, f"$[{place}]") for place, key in enumerate(keys)))
    source = (
        select(*keys, account, func.coalesce(rule.c.unit, entry.currency), rule.c.token_class, amount)
        .select_from(wanted.join(entry, matches).join(rule, true()))
        .where(amount != 0)
    )
    made = insert(LedgerLeg).from_select([*KEY, "account", "unit", "token_class", "amount"], source)
    text = str(made.compile(dialect=sqlite.dialect(), compile_kwargs={"literal_binds": True}))
    return text.replace(" JOIN ", " CROSS JOIN ")


def _leg(rule: Rule) -> tuple[Any, ...]:
    amount = rule.sign * getattr(LedgerEntry, rule.column)
    return rule.account or _taker(), rule.unit or LedgerEntry.currency, rule.token_class, amount


def _taker() -> Case[str]:
    billed, other = TAKERS
    return case((or_(*(LedgerEntry.kind == kind for kind in BILLED)), billed), else_=other)


_BOOK = _compiled()
_BOOK_ON_SQLITE = _on_sqlite()
