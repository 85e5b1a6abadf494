"""Statements that are read together have the rows that each of them has alone, on both dialects."""

from __future__ import annotations

from typing import Any

import aiosqlite
import pytest
from sqlalchemy import bindparam, func, insert, literal, select, text
from sqlalchemy.exc import DBAPIError

from accounting.access import api_keys, principals
from accounting.database.db import Database, among_given, given
from accounting.database.driver_selects import select_together
from accounting.limits import budgets, limiter_books
from accounting.limits.budgets import NewBudget
from accounting.tables.models import ApiKey, JournalOffset, Tenant
from accounting.tenants import tenants

KEY = select(ApiKey.__table__).where(ApiKey.tenant_id == bindparam("tenant_id"))
TENANT = select(Tenant.__table__, literal(7)).where(Tenant.id == bindparam("tenant_id"))
NOBODY = select(func.max(Tenant.created_at), func.count()).where(Tenant.id == "nobody")
NO_TABLE = select(text("1")).select_from(text("nowhere"))


async def a_tenant(db: Database, pepper: bytes) -> str:
    async with db.write() as conn:
        tenant = await tenants.create(conn, "t", now=1)
        await api_keys.create(conn, pepper, tenant_id=tenant.id, now=2, models=["b", "a"])
    return tenant.id


async def test_rows_are_those_of_each_statement_alone(db: Database, pepper: bytes) -> None:
    named = {"tenant_id": await a_tenant(db, pepper)}
    async with db.read() as conn:
        alone: list[Any] = [(await conn.execute(one, named)).all() for one in (KEY, TENANT, NOBODY)]
        together = await select_together(conn, named, KEY, TENANT, NOBODY)
    assert [list(map(tuple, rows)) for rows in together] == [list(map(tuple, rows)) for rows in alone]
    ((key,), (tenant,), (nobody,)) = together
    assert (key.models, key.addresses, key.disabled) == (["a", "b"], None, False)
    assert tenant.id == named["tenant_id"]
    assert tuple(nobody) == (None, 0)


async def test_a_list_of_values_is_one_parameter(db: Database) -> None:
    async with db.write() as conn:
        for slot in range(4):
            await conn.execute(insert(JournalOffset).values(slot=slot, offset=slot * 10, posted_at_ms=1))
    column = JournalOffset.offset
    query = select(JournalOffset.slot).where(among_given(db.dialect, column, "offsets")).order_by(JournalOffset.slot)
    async with db.read() as conn:
        for asked in ([10, 30], [], [0]):
            (rows,) = await select_together(conn, given(conn, asked, "offsets"), query)
            assert [row.slot * 10 for row in rows] == asked


async def test_they_see_one_snapshot_with_what_else_is_read(db: Database) -> None:
    count = select(func.count()).select_from(JournalOffset)
    async with db.read() as conn:
        ((before,),) = await select_together(conn, {}, count)
        async with db.write() as other:
            await other.execute(insert(JournalOffset).values(slot=1, offset=2, posted_at_ms=3))
        ((after,),) = await select_together(conn, {}, count)
        assert before[0] == after[0] == await conn.scalar(count) == 0
    async with db.read() as conn:
        assert await conn.scalar(count) == 1


async def test_an_error_is_sqlalchemys(db: Database) -> None:
    with pytest.raises(DBAPIError, match="nowhere"):
        async with db.read() as conn:
            await select_together(conn, {}, NO_TABLE)
    async with db.read() as conn:
        assert await conn.scalar(select(func.count()).select_from(JournalOffset)) == 0


async def test_what_a_keys_first_request_reads_takes_few_trips(
    db: Database, pepper: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rights took eight trips, and a snapshot of a tenant's limits 14."""
    if db.dialect != "sqlite":
        return
    tenant_id = await a_tenant(db, pepper)
    async with db.write() as conn:
        key = (await api_keys.create(conn, pepper, tenant_id=tenant_id, now=2)).value
        await budgets.create(conn, NewBudget(tenant_id=tenant_id, limit_micro_units=9, period="month"), now=2)
    trips: list[Any] = []
    execute = aiosqlite.Connection._execute

    async def count(connection: aiosqlite.Connection, function: Any, *args: Any) -> Any:
        trips.append(function)
        return await execute(connection, function, *args)

    async with db.read() as conn:
        monkeypatch.setattr(aiosqlite.Connection, "_execute", count)
        await select_together(conn, {"tenant_id": tenant_id}, KEY, TENANT, NOBODY)
        assert len(trips) == 1
        principal = await principals.resolve(conn, pepper, key, 3)
        assert len(trips) == 1 + 3
        (snapshot,) = (await limiter_books.snapshots(conn, {tenant_id: 1}, 10**9)).values()
        assert len(trips) == 1 + 3 + 2
    assert principal is not None
    assert [one.budget for one in snapshot.spent] == list(principal.budgets)
