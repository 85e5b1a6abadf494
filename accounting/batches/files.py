"""Rows of files: their owner, purpose and expiry. Every query names the owner; file_store.py has the bytes."""

from __future__ import annotations

from typing import Any

import msgspec
from sqlalchemy import Row, Select, case, exists, func, insert, or_, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from accounting.database import audit
from accounting.database.paging import Page, newest_first, one, shaped
from accounting.tables.batch_models import Batch, File
from accounting.tables.models import Tenant
from accounting.values.errors import NoRoomError
from accounting.values.ids import new_id
from accounting.values.types import ENDED_BATCH

DEFAULT_EXPIRY_S = 30 * 86_400
MIN_EXPIRY_S, MAX_EXPIRY_S = 3_600, 2_592_000
LEAST_BYTES = 16 * 1024
"""The least that a file counts: an empty one takes an inode, a block and rows, too."""
_REGISTRATION = 0x66696C65  # "file"


class FileInfo(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    tenant_id: str
    purpose: str
    name: str
    num_bytes: int
    sha256: str
    storage_key: str
    created_at: int
    expires_at: int | None


async def create(
    conn: AsyncConnection,
    tenant_id: str,
    *,
    purpose: str,
    name: str,
    num_bytes: int,
    sha256: str,
    storage_key: str,
    now: int,
    expires_after_s: int = DEFAULT_EXPIRY_S,
    actor: str | None = None,
    most_bytes: int | None = None,
) -> FileInfo:
    """Inserts a file's row once its bytes are on disk, in the transaction that needs the file to exist. `actor` is None
    for a file that Headgate made. `most_bytes` bounds all files of the tenant: NoRoomError beyond it, however many are
    created at the same time."""
    await _take_turn(conn, storage_key)
    if most_bytes is not None:
        await _check_room(conn, tenant_id, num_bytes, most_bytes)
    info = FileInfo(
        id=new_id("file"),
        tenant_id=tenant_id,
        purpose=purpose,
        name=name,
        num_bytes=num_bytes,
        sha256=sha256,
        storage_key=storage_key,
        created_at=now,
        expires_at=now + expires_after_s,
    )
    await conn.execute(insert(File).values(msgspec.structs.asdict(info)))
    if actor is not None:
        await audit.record(
            conn,
            "headgate.file.created",
            actor=actor,
            now=now,
            tenant_id=tenant_id,
            object_id=info.id,
            detail={"purpose": purpose, "bytes": num_bytes},
        )
    return info


async def is_registered(conn: AsyncConnection, storage_key: str) -> bool:
    """Says whether those bytes have a row. A transaction that inserts it is waited for, even if its connection is gone:
    call this in a transaction that may write."""
    await _take_turn(conn, storage_key)
    return (await conn.execute(select(File.id).where(File.storage_key == storage_key).limit(1))).first() is not None


async def _take_turn(conn: AsyncConnection, storage_key: str) -> None:
    # On SQLite every writer has the whole database.
    if conn.dialect.name == "postgresql":
        await conn.execute(select(func.pg_advisory_xact_lock(func.hashtextextended(storage_key, _REGISTRATION))))


async def _check_room(conn: AsyncConnection, tenant_id: str, num_bytes: int, most_bytes: int) -> None:
    # The lock on the tenant's row makes callers take turns: the next one sees the bytes that this transaction adds.
    mine = select(Tenant.id).where(Tenant.id == tenant_id)
    await conn.execute(mine.with_for_update(key_share=True))
    if await tenant_bytes(conn, tenant_id) + max(num_bytes, LEAST_BYTES) > most_bytes:
        raise NoRoomError("The files of your project take up all of their space.")


async def get(conn: AsyncConnection, tenant_id: str, file_id: str, now: int) -> FileInfo:
    """Returns a file of the tenant. Raises NotFoundError, also for another tenant's file, an expired and a deleted
    one."""
    return _info(await one(conn, _living(tenant_id, now).where(File.id == file_id), "No such File object."))


async def list_files(
    conn: AsyncConnection,
    tenant_id: str,
    now: int,
    *,
    purpose: str | None = None,
    after: str | None = None,
    limit: int = 10_000,
    oldest_first: bool = False,
) -> Page[FileInfo]:
    query, ever = _living(tenant_id, now), select(File.__table__).where(File.tenant_id == tenant_id)
    if purpose is not None:
        query = query.where(File.purpose == purpose)
    page = await newest_first(conn, query, File, after, limit, ever=ever, oldest_first=oldest_first)
    return page.of(_info)


async def delete(conn: AsyncConnection, tenant_id: str, file_id: str, now: int, *, actor: str) -> None:
    """Hides a file from its owner at once. A running batch keeps the bytes until it ends (`purgeable`)."""
    await get(conn, tenant_id, file_id, now)
    await conn.execute(update(File).where(File.id == file_id, File.tenant_id == tenant_id).values(deleted_at=now))
    await audit.record(conn, "headgate.file.deleted", actor=actor, now=now, tenant_id=tenant_id, object_id=file_id)


async def of_batch(conn: AsyncConnection, batch_id: str) -> FileInfo:
    """Returns a batch's input, deleted or not, as a batch keeps its input."""
    query = select(File.__table__).join(Batch, Batch.input_file_id == File.id)
    row = (await conn.execute(query.where(Batch.id == batch_id))).one()
    return _info(row)


async def tenant_bytes(conn: AsyncConnection, tenant_id: str) -> int:
    """Returns the bytes that the tenant's files count, each at least `LEAST_BYTES`, deleted files included until they
    are purged."""
    counted = case((File.num_bytes > LEAST_BYTES, File.num_bytes), else_=LEAST_BYTES)
    query = select(func.coalesce(func.sum(counted), 0)).where(
        File.tenant_id == tenant_id, File.storage_key.is_not(None)
    )
    return int(await conn.scalar(query) or 0)


async def purgeable(conn: AsyncConnection, now: int, limit: int = 100, *, after: str = "") -> list[tuple[str, str]]:
    """Returns (id, storage key) of files whose bytes nobody may read any more, by id, those behind the file `after`."""
    in_use = exists().where(Batch.input_file_id == File.id, Batch.state.not_in(ENDED_BATCH))
    gone = or_(File.deleted_at.is_not(None), File.expires_at <= now)
    query = select(File.id, File.storage_key).where(gone, File.storage_key.is_not(None), ~in_use, File.id > after)
    return [(row.id, row.storage_key) for row in await conn.execute(query.order_by(File.id).limit(limit))]


async def purged(conn: AsyncConnection, file_id: str) -> None:
    await conn.execute(update(File).where(File.id == file_id).values(storage_key=None))


def _living(tenant_id: str, now: int) -> Select[Any]:
    return select(File.__table__).where(
        File.tenant_id == tenant_id,
        File.deleted_at.is_(None),
        File.storage_key.is_not(None),
        or_(File.expires_at.is_(None), File.expires_at > now),
    )


def _info(row: Row[Any]) -> FileInfo:
    return shaped(FileInfo, row)
