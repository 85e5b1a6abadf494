"""S9: the disk quota of a tenant on both databases."""

from __future__ import annotations

import asyncio

import pytest

from accounting.batches import files
from accounting.tenants import tenants
from accounting.values.errors import NoRoomError


async def test_s9_files_registered_at_the_same_time_keep_the_quota(db):
    async with db.write() as conn:
        mine, other = [(await tenants.create(conn, name, now=1)).id for name in ("a", "b")]

    async def register(tenant: str, number: int) -> int:
        async with db.write() as conn:
            try:
                await files.create(
                    conn,
                    tenant,
                    purpose="batch",
                    name="x",
                    num_bytes=300 * 1024,
                    sha256="0" * 64,
                    storage_key=f"{tenant}-{number}",
                    now=1,
                    most_bytes=1000 * 1024,
                )
            except NoRoomError:
                return 0
            await asyncio.sleep(0.01)  # registered and not yet committed
            return 1

    done = await asyncio.gather(*(register(mine, i) for i in range(8)), register(other, 0))
    assert (sum(done[:8]), done[8]) == (3, 1)
    async with db.read() as conn:
        assert await files.tenant_bytes(conn, mine) == 900 * 1024


async def test_a_file_counts_at_least_what_it_takes_beside_its_bytes(db):
    async with db.write() as conn:
        mine = (await tenants.create(conn, "a", now=1)).id
        of_file = {"purpose": "batch", "name": "x", "sha256": "0" * 64, "now": 1, "most_bytes": 3 * files.LEAST_BYTES}
        for number, num_bytes in enumerate((0, 2 * files.LEAST_BYTES)):
            await files.create(conn, mine, num_bytes=num_bytes, storage_key=f"k{number}", **of_file)
        assert await files.tenant_bytes(conn, mine) == 3 * files.LEAST_BYTES
        with pytest.raises(NoRoomError):
            await files.create(conn, mine, num_bytes=0, storage_key="k2", **of_file)


async def test_whoever_asks_for_a_row_waits_for_the_transaction_that_makes_it(db):
    """A COMMIT whose answer was lost may still be under way."""

    async def asked() -> bool:
        async with db.write() as conn:
            return await files.is_registered(conn, "k")

    assert not await asked()
    async with db.write() as conn:
        tenant = (await tenants.create(conn, "a", now=1)).id
        await files.create(conn, tenant, purpose="batch", name="x", num_bytes=1, sha256="0", storage_key="k", now=1)
        asking = asyncio.create_task(asked())
        await asyncio.sleep(0.2)
        assert not asking.done()
    assert await asking


async def test_what_is_not_bounded_is_registered_whatever_there_is(conn):
    tenant = (await tenants.create(conn, "a", now=1)).id
    for number, most_bytes in enumerate((files.LEAST_BYTES, None)):
        await files.create(
            conn,
            tenant,
            purpose="batch",
            name="x",
            num_bytes=100,
            sha256="0" * 64,
            storage_key=str(number),
            now=1,
            most_bytes=most_bytes,
        )
    with pytest.raises(NoRoomError):
        await files.create(
            conn,
            tenant,
            purpose="batch",
            name="x",
            num_bytes=1,
            sha256="0" * 64,
            storage_key="2",
            now=1,
            most_bytes=200,
        )
