"""O4: a name that commands find an object by is given once, also to those who ask at the same moment."""

from __future__ import annotations

import asyncio

import pytest
from sqlalchemy import update

from accounting.lifecycle import tenant_status
from accounting.prices import prices
from accounting.tables.models import Tenant
from accounting.tenants import adapters, tenants
from accounting.values.errors import ConflictError, InvalidError


async def test_o4_a_tenant_cannot_take_the_name_of_another(conn):
    await tenants.create(conn, "acme", now=1)
    other = await tenants.create(conn, "apex", now=1)
    async with conn.begin_nested() as savepoint:
        with pytest.raises(ConflictError, match="The name is taken"):
            await tenants.create(conn, "acme", now=2)
        await savepoint.rollback()
    async with conn.begin_nested() as savepoint:
        with pytest.raises(ConflictError, match="The name is taken"):
            await tenants.rename(conn, other.id, "acme", now=2)
        await savepoint.rollback()
    assert (await tenants.rename(conn, other.id, "apex", now=3)).name == "apex"
    assert (await tenants.create(conn, "Operator", now=3)).name == "Operator"


async def test_o4_an_archived_tenants_name_is_free_again(conn):
    old = await tenants.create(conn, "acme", now=1)
    await tenant_status.archive(conn, old.id, now=2)
    assert (await tenants.create(conn, "acme", now=3)).id != old.id


async def test_o4_a_name_is_not_taken_for_an_id(conn):
    with pytest.raises(InvalidError, match="proj_"):
        await tenants.create(conn, "proj_acme", now=1)


@pytest.mark.parametrize("character", ["\x01", "\n", "\x7f", "\u202e", "\ue000"])
async def test_o4_a_name_has_no_character_that_nobody_sees(conn, character):
    with pytest.raises(InvalidError, match=r"invisible character U\+"):
        await tenants.create(conn, f"ac{character}me", now=1)
    assert (await tenants.create(conn, "شرکت\u200cها", now=1)).name


async def test_o4_names_that_were_given_twice_before_can_be_told_apart_again(conn):
    """By an older version."""
    first, second = [await tenants.create(conn, name, now=1) for name in ("acme", "other")]
    await conn.execute(update(Tenant).where(Tenant.id == second.id).values(name="acme"))
    assert (await tenants.rename(conn, second.id, "apex", now=2)).name == "apex"
    assert (await tenants.rename(conn, first.id, "acme", now=3)).name == "acme"


async def _at_once(db, make) -> list[object]:
    """What became of four who ask in transactions of their own."""

    async def one() -> object:
        async with db.write() as conn:
            made = await make(conn)
            await asyncio.sleep(0.05)  # the others come while this one is not committed
            return made

    return await asyncio.gather(*(one() for _ in range(4)), return_exceptions=True)


async def test_o4_of_those_who_take_a_name_at_once_one_gets_it(db):
    for make in (
        lambda conn: tenants.create(conn, "acme", now=1),
        lambda conn: prices.create_sheet(conn, "gold", "USD", 1),
        lambda conn: adapters.create(conn, model="m", name="a", path="/p", tenant_id=None, now=1, actor="cli"),
    ):
        ended = await _at_once(db, make)
        refused = [one for one in ended if isinstance(one, BaseException)]
        assert len(refused) == 3, ended
        assert {type(one).__name__ for one in refused} == {"NameTakenError"}, ended
