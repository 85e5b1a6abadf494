"""Batches of the endpoint `/v1/messages`, as Anthropic's API knows them. Every query names the owner.

They are ordinary batches. One exists as long as its input file does, so it is deleted with that file, and not while
another batch has the same one.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import Select, func, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from accounting.batches.batches import BatchInfo, batch_info
from accounting.database import audit
from accounting.database.paging import Page, newest_first, one
from accounting.tables.batch_models import Batch, BatchLine, File
from accounting.values.errors import ConflictError
from accounting.values.types import ENDED_BATCH

ENDPOINT = "/v1/messages"
INPUT_NAME = "message_batch.jsonl"
"""The name of an input file that was made with its batch, from the requests in a body."""


async def get(conn: AsyncConnection, tenant_id: str, batch_id: str) -> BatchInfo:
    """Returns a batch of the tenant. Raises NotFoundError, also for another tenant's batch and for a deleted one."""
    return batch_info(await one(conn, _living(tenant_id).where(Batch.id == batch_id), "No such Message Batch."))


async def list_batches(
    conn: AsyncConnection, tenant_id: str, *, after: str | None, before: str | None, limit: int
) -> Page[BatchInfo]:
    """Returns a page, newest first: the batches that follow `after`, or those directly before `before`."""
    query, ever = _living(tenant_id), _owned(tenant_id)
    if before is None:
        page = await newest_first(conn, query, Batch, after, limit, ever=ever)
        return page.of(batch_info)
    page = await newest_first(conn, query, Batch, before, limit, ever=ever, oldest_first=True)
    return Page([batch_info(row) for row in reversed(page.items)], page.has_more)


async def ended_lines(conn: AsyncConnection, batch_id: str) -> dict[str, int]:
    """Returns the number of lines in each of the states in which lines end."""
    query = (
        select(BatchLine.state, func.count().label("num_lines"))
        .where(BatchLine.batch_id == batch_id)
        .group_by(BatchLine.state)
    )
    return {row.state: row.num_lines for row in await conn.execute(query)}


async def has_uploaded_input(conn: AsyncConnection, tenant_id: str, batch_id: str) -> bool:
    """Returns whether somebody uploaded the input file of a batch. Raises NotFoundError."""
    batch = await get(conn, tenant_id, batch_id)
    return await conn.scalar(select(File.name).where(File.id == batch.input_file_id)) != INPUT_NAME


async def delete(conn: AsyncConnection, tenant_id: str, batch_id: str, now: int, *, actor: str) -> None:
    """Deletes a batch that has ended, with its input and its results. Raises NotFoundError and ConflictError."""
    batch = await get(conn, tenant_id, batch_id)
    if batch.state not in ENDED_BATCH:
        raise ConflictError("A Message Batch can be deleted once it has ended: cancel it first.")
    same = (Batch.tenant_id == tenant_id, Batch.input_file_id == batch.input_file_id, Batch.id != batch_id)
    if (await conn.execute(select(Batch.id).where(*same).limit(1))).first() is not None:
        raise ConflictError("Another batch has the same input file. Once all have ended, delete that file instead.")
    mine = [file_id for file_id in (batch.input_file_id, batch.output_file_id, batch.error_file_id) if file_id]
    own = (File.tenant_id == tenant_id, File.id.in_(mine), File.deleted_at.is_(None))
    await conn.execute(update(File).where(*own).values(deleted_at=now))
    await audit.record(conn, "headgate.batch.deleted", actor=actor, now=now, tenant_id=tenant_id, object_id=batch_id)


def _owned(tenant_id: str) -> Select[Any]:
    return select(Batch.__table__).where(Batch.tenant_id == tenant_id, Batch.endpoint == ENDPOINT)


def _living(tenant_id: str) -> Select[Any]:
    return _owned(tenant_id).join(File, File.id == Batch.input_file_id).where(File.deleted_at.is_(None))
