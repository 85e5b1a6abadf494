"""A batch as a whole: runners claim it to validate or finalise it, and move its state.

A claim on a batch has a fence, as a claim on a chunk has, and it ends by the database's clock. The module knows neither
the bytes of files nor HTTP.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from typing import Any, Literal

import msgspec
from sqlalchemy import and_, exists, func, or_, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from accounting.batches import batch_lines
from accounting.batches.batch_lines import LineEnd
from accounting.batches.batches import BatchInfo, batch_info
from accounting.batches.claims import ClaimLost
from accounting.events import events, outbox
from accounting.tables.batch_models import Batch, BatchChunk, BatchLine, IdempotentReply
from accounting.tables.models import ApiKey, Tenant
from accounting.tenants import model_permissions

Work = Literal["validate", "complete", "cancel", "expire"]
Outcome = Literal["completed", "cancelled", "expired"]
OUTCOMES: dict[Work, Outcome] = {"complete": "completed", "cancel": "cancelled", "expire": "expired"}
Pause = Literal["tenant_suspended", "key_disabled"]
Standing = Literal["run", "stop", "revoked"] | Pause


class BatchClaim(msgspec.Struct, frozen=True):
    batch_id: str
    tenant_id: str
    fence: int
    work: Work


class Chunk(msgspec.Struct, frozen=True):
    predicted_tokens: int
    num_lines: int
    lines: bytes


async def claim(conn: AsyncConnection, now: int, lasts_ms: int, quiet_ms: int) -> BatchClaim | None:
    """Claims a batch that waits to be validated or finalised. A cancelled or expired batch waits until its runners have
    left, for `quiet_ms` at most; then their fences are raised.

    The tenant is drawn at random among those with such a batch, and its oldest one is taken: a tenant with hundreds of
    them delays the others by no more than one with a few.
    """
    due = _due(now, quiet_ms)
    tenants = list((await conn.execute(select(Batch.tenant_id).where(due).distinct())).scalars())
    for tenant_id in random.sample(tenants, len(tenants)):
        held = await _claim_of(conn, tenant_id, due, now + lasts_ms)
        if held is not None:  # else others were quicker
            return held
    return None


async def _claim_of(conn: AsyncConnection, tenant_id: str, due: Any, until_ms: int) -> BatchClaim | None:
    """Claims the tenant's oldest due batch.

    `IN` could run the choice once for each row: it skips what this statement has claimed already, and claims the next.
    PostgreSQL runs a scalar subquery once.
    """
    chosen = (
        select(Batch.id)
        .where(due, Batch.tenant_id == tenant_id)
        .order_by(Batch.created_at, Batch.id)
        .limit(1)
        .with_for_update(skip_locked=True)
    )
    statement = (
        update(Batch)
        .where(Batch.id == chosen.scalar_subquery())
        .values(fence=Batch.fence + 1, claimed_until_ms=until_ms)
        .returning(Batch.id, Batch.tenant_id, Batch.fence, Batch.state)
    )
    row = (await conn.execute(statement)).first()
    if row is None:
        return None
    work: dict[str, Work] = {"validating": "validate", "finalizing": "complete", "cancelling": "cancel"}
    return BatchClaim(row.id, row.tenant_id, row.fence, work.get(row.state, "expire"))


async def is_due(conn: AsyncConnection, now: int, quiet_ms: int) -> bool:
    return (await conn.execute(select(Batch.id).where(_due(now, quiet_ms)).limit(1))).first() is not None


async def renew(conn: AsyncConnection, held: BatchClaim, now: int, lasts_ms: int) -> None:
    """Prolongs the claim. Raises `ClaimLost`, also when the batch's state has changed: a cancel takes the work away."""
    await _move(conn, held, claimed_until_ms=now + lasts_ms)


async def pause(conn: AsyncConnection, held: BatchClaim, reason: str) -> None:
    """Says why the work cannot be done now. The claim stays, so that it is tried again when that has run out. Raises
    `ClaimLost`."""
    await _move(conn, held, paused_reason=reason)


async def begin(
    conn: AsyncConnection,
    held: BatchClaim,
    now: int,
    *,
    model: str,
    num_total: int,
    chunks: Sequence[Chunk],
    faulty: Sequence[LineEnd],
    errors: list[Any] | None,
) -> None:
    """Moves a validated batch to `in_progress`, or at once to `finalizing` if no line can run. Raises `ClaimLost`."""
    state = "in_progress" if chunks else "finalizing"
    values: dict[str, Any] = {} if chunks else {"finalizing_at": now // 1000}
    await _move(
        conn,
        held,
        state=state,
        in_progress_at=now // 1000,
        model=model,
        num_total=num_total,
        num_invalid=len(faulty),
        errors=errors,
        claimed_until_ms=None,
        paused_reason=None,
        **values,
    )
    rows = [
        {
            "batch_id": held.batch_id,
            "seq": seq,
            "tenant_id": held.tenant_id,
            "state": "queued",
            "fence": 0,
            "not_before_ms": 0,
            **msgspec.structs.asdict(chunk),
        }
        for seq, chunk in enumerate(chunks)
    ]
    for row in rows:
        await conn.execute(BatchChunk.__table__.insert(), row)  # type: ignore[attr-defined]  # a Table, declared as FromClause
    await batch_lines.add_ended_lines(conn, held.batch_id, faulty)


async def fail(conn: AsyncConnection, held: BatchClaim, now: int, errors: list[Any], num_invalid: int) -> None:
    """Ends a batch of which no line was run. Raises `ClaimLost`."""
    await _move(
        conn,
        held,
        state="failed",
        failed_at=now // 1000,
        errors=errors,
        num_invalid=num_invalid,
        claimed_until_ms=None,
        paused_reason=None,
    )
    await _tell_end(conn, held, now)


async def get(conn: AsyncConnection, batch_id: str) -> BatchInfo:
    """Returns a batch of any owner. Only its runner uses this."""
    query = select(Batch.__table__).where(Batch.id == batch_id)
    return batch_info((await conn.execute(query)).one())


async def usable_models(conn: AsyncConnection, tenant_id: str, key_id: str, priced: Collection[str]) -> frozenset[str]:
    """Returns the priced models that the submitting key may use."""
    of_key = await conn.scalar(select(ApiKey.models).where(ApiKey.id == key_id))
    permissions = await model_permissions.get(conn, tenant_id)
    allowed = permissions.narrow(None if of_key is None else frozenset(of_key))
    usable = frozenset(priced) if allowed is None else frozenset(priced) & allowed
    return usable - permissions.denied


async def close_chunks(conn: AsyncConnection, batch_id: str) -> None:
    """Raises the fences of open chunks: a runner that still has a line of one can write nothing more."""
    await conn.execute(
        update(BatchChunk)
        .where(BatchChunk.batch_id == batch_id, BatchChunk.state != "done")
        .values(state="done", fence=BatchChunk.fence + 1, claimed_by=None, claimed_until_ms=None)
    )


async def chunk_lines(conn: AsyncConnection, batch_id: str) -> list[bytes]:
    """Returns the packed lines of every chunk, in order."""
    query = select(BatchChunk.lines).where(BatchChunk.batch_id == batch_id)
    return list((await conn.execute(query.order_by(BatchChunk.seq))).scalars())


async def finish(
    conn: AsyncConnection, held: BatchClaim, now: int, *, output_file_id: str | None, error_file_id: str | None
) -> None:
    """Ends the batch: names its files, drops the answers from its rows, frees its idempotency keys. Raises
    `ClaimLost`."""
    outcome = OUTCOMES[held.work]
    await _move(
        conn,
        held,
        state=outcome,
        output_file_id=output_file_id,
        error_file_id=error_file_id,
        claimed_until_ms=None,
        paused_reason=None,
        **{f"{outcome}_at": now // 1000},
    )
    await conn.execute(update(BatchLine).where(BatchLine.batch_id == held.batch_id).values(body=None))
    await conn.execute(
        IdempotentReply.__table__.delete().where(IdempotentReply.batch_id == held.batch_id)  # type: ignore[attr-defined]  # a Table, declared as FromClause
    )
    await _tell_end(conn, held, now)


async def standing(conn: AsyncConnection, batch_id: str, now: int) -> Standing:
    """Tells a runner how to go on after a line: `run`, the reason of a pause (it can be undone), `stop` (cancelled,
    expired or ended), `revoked` (the key has ended or the tenant is archived)."""
    query = (
        select(
            Batch.state,
            Batch.expires_at,
            ApiKey.revoked_at,
            ApiKey.disabled,
            ApiKey.expires_at.label("key_until"),
            Tenant.status,
        )
        .join(ApiKey, ApiKey.id == Batch.key_id)
        .join(Tenant, Tenant.id == Batch.tenant_id)
        .where(Batch.id == batch_id)
    )
    row = (await conn.execute(query)).one()
    if row.state != "in_progress" or row.expires_at <= now // 1000:
        return "stop"
    key_is_over = row.key_until is not None and row.key_until <= now // 1000
    if row.revoked_at is not None or key_is_over or row.status == "archived":
        return "revoked"
    if row.status == "suspended":
        return "tenant_suspended"
    return "key_disabled" if row.disabled else "run"


async def backlog_tokens(conn: AsyncConnection, tenant_id: str, model: str) -> int:
    """Returns the predicted prompt tokens of the tenant's chunks for that model that are not done."""
    query = select(func.coalesce(func.sum(BatchChunk.predicted_tokens), 0)).join(Batch, Batch.id == BatchChunk.batch_id)
    return int(await conn.scalar(query.where(BatchChunk.tenant_id == tenant_id, _is_open(model))) or 0)


async def backlogs(conn: AsyncConnection, model: str) -> dict[str, int]:
    """Returns the predicted prompt tokens that are not done, for that model, of each tenant whose batches may run
    now."""
    query = (
        select(BatchChunk.tenant_id, func.sum(BatchChunk.predicted_tokens))
        .join(Batch, Batch.id == BatchChunk.batch_id)
        .join(Tenant, Tenant.id == BatchChunk.tenant_id)
        .where(Tenant.status == "active", _is_open(model))
        .group_by(BatchChunk.tenant_id)
    )
    return {tenant: int(tokens) for tenant, tokens in await conn.execute(query)}


async def _tell_end(conn: AsyncConnection, held: BatchClaim, now: int) -> None:
    batch = await get(conn, held.batch_id)
    counts = {"total": batch.num_total, "completed": batch.num_completed, "failed": batch.num_failed}
    files = {"output_file_id": batch.output_file_id, "error_file_id": batch.error_file_id}
    told = events.batch_ended(batch.id, batch.tenant_id, batch.state, counts, files, now)
    await outbox.write(conn, [told])


async def _move(conn: AsyncConnection, held: BatchClaim, **values: Any) -> None:
    states = {
        "validate": ("validating",),
        "complete": ("finalizing",),
        "cancel": ("cancelling",),
        "expire": ("in_progress",),
    }[held.work]
    done = await conn.execute(
        update(Batch)
        .where(Batch.id == held.batch_id, Batch.fence == held.fence, Batch.state.in_(states))
        .values(**values)
    )
    if not done.rowcount:
        raise ClaimLost("The claim on this batch is lost.")


def _is_open(model: str) -> Any:
    return and_(BatchChunk.state != "done", Batch.model == model, Batch.state == "in_progress")


def _due(now: int, quiet_ms: int) -> Any:
    busy = exists().where(
        BatchChunk.batch_id == Batch.id, BatchChunk.state == "claimed", BatchChunk.claimed_until_ms >= now
    )
    quiet_since = (now - quiet_ms) // 1000
    work = or_(
        Batch.state.in_(("validating", "finalizing")),
        and_(Batch.state == "cancelling", or_(~busy, Batch.cancelling_at <= quiet_since)),
        and_(
            Batch.state == "in_progress", Batch.expires_at <= now // 1000, or_(~busy, Batch.expires_at <= quiet_since)
        ),
    )
    return and_(work, or_(Batch.claimed_until_ms.is_(None), Batch.claimed_until_ms < now))
