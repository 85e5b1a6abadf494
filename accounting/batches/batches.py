"""Batches as their owner sees them: create, read, list, cancel. Every query names the owner.

Batches are run by batch_runs.py (the batch as a whole), claims.py (chunks), batch_lines.py (lines) and `workers.jobs`.
The state changes by compare-and-set. Money is not stored here: it is a sum over the ledger.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Literal

import msgspec
from sqlalchemy import Row, Select, bindparam, func, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from accounting.batches import files
from accounting.batches.files import FileInfo
from accounting.database import audit
from accounting.database.db import among
from accounting.database.paging import Page, newest_first, one, shaped
from accounting.tables.batch_models import Batch
from accounting.tables.models import BatchCharge, LedgerEntry, Tenant
from accounting.values.errors import ConflictError, InvalidError, TooManyError
from accounting.values.ids import new_id
from accounting.values.types import ENDED_BATCH, Usage

State = Literal["validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"]
InvalidLines = Literal["reject", "skip"]

MAX_OPEN = 200
"""The most batches of a tenant that have not ended. Each claim looks at all of them."""
OPEN = ("validating", "in_progress", "finalizing", "cancelling")
WINDOWS = {"24h": 86_400}
ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses", "/v1/embeddings")
DOORBELL, QUEUE = "headgate.look", "headgate.batch"
"""Name and queue of the message that says "there is work" and nothing else."""
RING_EXPIRES_S = 30
"""A message that no worker took within this time is dropped; the sweeper sends another one anyway."""
TIMESTAMPS = (
    "in_progress_at",
    "finalizing_at",
    "completed_at",
    "failed_at",
    "expired_at",
    "cancelling_at",
    "cancelled_at",
)


class Progress(msgspec.Struct, frozen=True):
    """How far a batch has come."""

    state: str
    num_ended: int


class BatchInfo(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    tenant_id: str
    key_id: str
    endpoint: str
    model: str | None
    completion_window: str
    input_file_id: str
    output_file_id: str | None
    error_file_id: str | None
    state: State
    created_at: int
    expires_at: int
    at: dict[str, int | None]
    """The timestamps of all other states, by name."""
    paused_reason: str | None
    invalid_lines: InvalidLines
    output_expires_after_s: int | None
    num_total: int
    num_completed: int
    num_failed: int
    num_invalid: int
    usage: Usage
    errors: list[Any] | None
    metadata: dict[str, Any] | None
    traceparent: str

    @property
    def progress(self) -> Progress:
        return Progress(self.state, self.num_completed + self.num_failed)


async def create(
    conn: AsyncConnection,
    tenant_id: str,
    key_id: str,
    *,
    input_file_id: str,
    endpoint: str,
    completion_window: str,
    now: int,
    invalid_lines: InvalidLines = "reject",
    output_expires_after_s: int | None = None,
    metadata: dict[str, Any] | None = None,
    traceparent: str = "",
) -> BatchInfo:
    """Creates a batch. Raises NotFoundError for an input file that the tenant does not have, InvalidError for a file
    that is no batch input, and TooManyError while `MAX_OPEN` batches of the tenant have not ended."""
    await check_input(conn, tenant_id, input_file_id, endpoint, completion_window, now)
    await _check_open(conn, tenant_id)
    batch_id = new_id("batch")
    await conn.execute(
        insert(Batch).values(
            id=batch_id,
            tenant_id=tenant_id,
            key_id=key_id,
            endpoint=endpoint,
            state="validating",
            completion_window=completion_window,
            input_file_id=input_file_id,
            created_at=now,
            expires_at=now + WINDOWS[completion_window],
            invalid_lines=invalid_lines,
            output_expires_after_s=output_expires_after_s,
            metadata_=metadata,
            traceparent=traceparent,
        )
    )
    await audit.record(
        conn,
        "headgate.batch.created",
        actor=key_id,
        now=now,
        tenant_id=tenant_id,
        object_id=batch_id,
        detail={"endpoint": endpoint, "input_file_id": input_file_id},
    )
    return await get(conn, tenant_id, batch_id)


async def check_input(
    conn: AsyncConnection, tenant_id: str, input_file_id: str, endpoint: str, completion_window: str, now: int
) -> FileInfo:
    """Returns the input file of a batch with this endpoint and window. Raises what `create` raises."""
    if endpoint not in ENDPOINTS:
        raise InvalidError(f"A batch's endpoint is one of {', '.join(ENDPOINTS)}.", "endpoint")
    if completion_window not in WINDOWS:
        raise InvalidError("The completion window must be '24h'.", "completion_window")
    file = await files.get(conn, tenant_id, input_file_id, now)
    if file.purpose != "batch":
        raise InvalidError("The input file must have the purpose 'batch'.", "input_file_id")
    return file


async def _check_open(conn: AsyncConnection, tenant_id: str) -> None:
    # The lock on the tenant's row makes callers take turns: the next one sees the batch that this transaction adds.
    await conn.execute(select(Tenant.id).where(Tenant.id == tenant_id).with_for_update(key_share=True))
    # The states are no parameters: `ix_batch_open` is used only where the statement itself has them.
    is_open = Batch.state.in_(bindparam("open", OPEN, expanding=True, literal_execute=True))
    num_open = await conn.scalar(select(func.count()).where(Batch.tenant_id == tenant_id, is_open))
    if int(num_open or 0) >= MAX_OPEN:
        raise TooManyError(
            f"At most {MAX_OPEN} batches of a project may be open at once: wait until one ends, or cancel one."
        )


async def get(conn: AsyncConnection, tenant_id: str | None, batch_id: str) -> BatchInfo:
    """Returns a batch of the tenant, or of any tenant for None. Raises NotFoundError, also for another tenant's
    batch."""
    return batch_info(await one(conn, _owned(tenant_id).where(Batch.id == batch_id), "No such Batch object."))


async def progress(conn: AsyncConnection, batch_ids: Collection[str]) -> dict[str, Progress]:
    """Returns the progress of batches of any owner, without those that are not there any more."""
    query = select(Batch.id, Batch.state, Batch.num_completed + Batch.num_failed).where(
        among(conn, Batch.id, batch_ids)
    )
    return {batch_id: Progress(state, num_ended) for batch_id, state, num_ended in await conn.execute(query)}


async def list_batches(
    conn: AsyncConnection, tenant_id: str | None, *, running: bool = False, after: str | None = None, limit: int = 20
) -> Page[BatchInfo]:
    """Returns batches of the tenant, or of all tenants for None, newest first; only those that have not ended, if
    `running`."""
    query = _owned(tenant_id)
    if running:
        query = query.where(Batch.state.not_in(ENDED_BATCH))
    page = await newest_first(conn, query, Batch, after, limit, ever=_owned(tenant_id))
    return page.of(batch_info)


async def cancel(conn: AsyncConnection, tenant_id: str | None, batch_id: str, now: int, *, actor: str) -> BatchInfo:
    """Cancels a batch of the tenant, or of any tenant for None. Raises ConflictError for a batch that has ended;
    cancelling one twice is no error."""
    await get(conn, tenant_id, batch_id)
    await stop(conn, batch_id, now)
    found = await get(conn, tenant_id, batch_id)
    if found.state != "cancelling":
        raise ConflictError("The batch has ended and cannot be cancelled.")
    await audit.record(
        conn, "headgate.batch.cancelled", actor=actor, now=now, tenant_id=found.tenant_id, object_id=batch_id
    )
    return found


async def stop(conn: AsyncConnection, batch_id: str, now: int) -> None:
    """Moves a batch to `cancelling` if it can still be cancelled; its runners see it within a second."""
    running = Batch.state.in_(("validating", "in_progress", "finalizing"))
    await conn.execute(
        update(Batch)
        .where(Batch.id == batch_id, running)
        .values(state="cancelling", cancelling_at=now, claimed_until_ms=None)
    )


async def stop_all(conn: AsyncConnection, tenant_id: str, now: int) -> None:
    """Moves every open batch of a tenant to `cancelling`."""
    query = select(Batch.id).where(
        Batch.tenant_id == tenant_id, Batch.state.in_(("validating", "in_progress", "finalizing"))
    )
    for batch_id in (await conn.scalars(query)).all():
        await stop(conn, batch_id, now)


async def charge(conn: AsyncConnection, batch_id: str) -> int:
    """Returns the micro-units that the batch has cost so far."""
    paid = select(func.coalesce(func.sum(LedgerEntry.charge), 0)).join(
        BatchCharge, BatchCharge.request_id == LedgerEntry.request_id
    )
    query = paid.where(BatchCharge.batch_id == batch_id, LedgerEntry.kind == "settle")
    return int(await conn.scalar(query) or 0)


def batch_info(row: Row[Any]) -> BatchInfo:
    return shaped(
        BatchInfo,
        row,
        at={name: getattr(row, name) for name in TIMESTAMPS},
        usage=Usage(row.cache_read, row.cache_write, row.uncached, row.output),
    )


def _owned(tenant_id: str | None) -> Select[Any]:
    query = select(Batch.__table__)
    return query if tenant_id is None else query.where(Batch.tenant_id == tenant_id)
