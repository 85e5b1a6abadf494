"""Claims on chunks: who may run what, and until when. What came of the lines inside is `batch_lines.py`'s.

A claim is the time-limited right to run a chunk. Each claim raises the chunk's fence, and every write of a claimer
names its fence: who has lost the claim touches no row and learns it (`ClaimLost`). Time is the database's. Lock order:
chunk, then batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from sqlalchemy import and_, func, literal_column, select, tuple_, update
from sqlalchemy.ext.asyncio import AsyncConnection

from accounting.database.db import upsert
from accounting.tables.batch_models import Batch, BatchChunk, BatchLine, TenantTurn
from accounting.tables.models import Tenant
from accounting.values.errors import AccountingError


class ClaimLost(AccountingError):
    """Another claimer has the work, or it is over: write nothing more."""


class Waiting(msgspec.Struct, frozen=True):
    """A tenant with work, as the round robin sees it."""

    tenant_id: str
    weight_percent: int
    deficit_tokens: int
    last_visit: int
    num_claimed: int
    predicted_tokens: int
    """Of the chunk that would be next."""


class ChunkClaim(msgspec.Struct, frozen=True):
    batch_id: str
    seq: int
    tenant_id: str
    owner: str
    fence: int
    predicted_tokens: int
    lines: bytes


async def now_ms(conn: AsyncConnection) -> int:
    """The database's clock: claimers on several hosts share no other."""
    clock = (
        "CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER)"
        if conn.dialect.name == "sqlite"
        else "CAST(extract(epoch from clock_timestamp()) * 1000 AS BIGINT)"
    )
    return int((await conn.execute(select(literal_column(clock)))).scalar_one())


# Which chunk


async def waiting(conn: AsyncConnection, now: int) -> list[Waiting]:
    """Every tenant with a chunk that could be claimed now."""
    heads = (
        select(
            BatchChunk.tenant_id,
            BatchChunk.predicted_tokens,
            func.row_number().over(partition_by=BatchChunk.tenant_id, order_by=_ORDER).label("place"),
        )
        .join(Batch, Batch.id == BatchChunk.batch_id)
        .where(_claimable(now))
        .subquery()
    )
    claimed = (
        select(BatchChunk.tenant_id, func.count().label("num"))
        .where(BatchChunk.state == "claimed", BatchChunk.claimed_until_ms > now)
        .group_by(BatchChunk.tenant_id)
        .subquery()
    )
    query = (
        select(
            heads.c.tenant_id,
            Tenant.weight_percent,
            func.coalesce(TenantTurn.deficit_tokens, 0),
            func.coalesce(TenantTurn.last_visit, 0),
            func.coalesce(claimed.c.num, 0),
            heads.c.predicted_tokens,
        )
        .join(Tenant, Tenant.id == heads.c.tenant_id)
        .outerjoin(TenantTurn, TenantTurn.tenant_id == heads.c.tenant_id)
        .outerjoin(claimed, claimed.c.tenant_id == heads.c.tenant_id)
        .where(heads.c.place == 1)
    )
    return [Waiting(*row) for row in await conn.execute(query)]


async def num_claimable(conn: AsyncConnection, now: int) -> int:
    query = select(func.count()).select_from(BatchChunk).join(Batch, Batch.id == BatchChunk.batch_id)
    return int(await conn.scalar(query.where(_claimable(now))) or 0)


async def save_turns(conn: AsyncConnection, deficits: Mapping[str, int], visits: Mapping[str, int]) -> None:
    """The round robin's memory; whoever waits no more loses what it had saved up."""
    await conn.execute(update(TenantTurn).where(TenantTurn.tenant_id.not_in(list(deficits))).values(deficit_tokens=0))
    for tenant_id, deficit in sorted(deficits.items()):
        values = {"deficit_tokens": deficit, "last_visit": visits[tenant_id]}
        statement = upsert(conn, TenantTurn.__table__).values(tenant_id=tenant_id, **values)
        await conn.execute(statement.on_conflict_do_update(index_elements=["tenant_id"], set_=values))


async def correct_turn(conn: AsyncConnection, tenant_id: str, surplus_tokens: int) -> None:
    """What a chunk really took beyond its prediction."""
    await conn.execute(
        update(TenantTurn)
        .where(TenantTurn.tenant_id == tenant_id)
        .values(deficit_tokens=TenantTurn.deficit_tokens - surplus_tokens)
    )


# The claim


async def claim(conn: AsyncConnection, tenant_id: str, owner: str, now: int, lasts_ms: int) -> ChunkClaim | None:
    """The tenant's next chunk, if nobody was quicker: one statement on either database."""
    chosen = (
        select(BatchChunk.batch_id, BatchChunk.seq)
        .join(Batch, Batch.id == BatchChunk.batch_id)
        .where(_claimable(now), BatchChunk.tenant_id == tenant_id)
        .order_by(*_ORDER)
        .limit(1)
        .with_for_update(of=BatchChunk, skip_locked=True)
    )
    statement = (
        update(BatchChunk)
        .where(tuple_(BatchChunk.batch_id, BatchChunk.seq).in_(chosen))
        .values(state="claimed", claimed_by=owner, claimed_until_ms=now + lasts_ms, fence=BatchChunk.fence + 1)
        .returning(BatchChunk.__table__)
    )
    row = (await conn.execute(statement)).first()
    if row is None:
        return None
    return ChunkClaim(row.batch_id, row.seq, row.tenant_id, owner, row.fence, row.predicted_tokens, row.lines)


async def renew(conn: AsyncConnection, held: ChunkClaim, now: int, lasts_ms: int) -> None:
    """Raises `ClaimLost`. First in every transaction of a claimer: it locks the chunk."""
    await _update_held(conn, held, claimed_until_ms=now + lasts_ms)


async def release(conn: AsyncConnection, held: ChunkClaim, not_before_ms: int = 0) -> None:
    """Back to the queue, at a drain or when the time is over. Raises `ClaimLost`."""
    await _update_held(conn, held, state="queued", claimed_by=None, claimed_until_ms=None, not_before_ms=not_before_ms)


async def postpone(conn: AsyncConnection, batch_id: str, not_before_ms: int, reason: str) -> None:
    """Pauses a batch: none of its queued chunks before that time."""
    await conn.execute(
        update(BatchChunk)
        .where(BatchChunk.batch_id == batch_id, BatchChunk.state == "queued")
        .values(not_before_ms=not_before_ms)
    )
    await conn.execute(update(Batch).where(Batch.id == batch_id).values(paused_reason=reason))


async def finish_chunk(conn: AsyncConnection, held: ChunkClaim, now: int) -> bool:
    """True: it was the batch's last, and the batch is now finalizing. Raises `ClaimLost`."""
    await _update_held(conn, held, state="done", claimed_by=None, claimed_until_ms=None)
    # Behind the batch's lock, so that of two that finish at once the second sees both done.
    await conn.execute(select(Batch.id).where(Batch.id == held.batch_id).with_for_update())
    left = select(func.count()).select_from(BatchChunk)
    num_left = await conn.scalar(left.where(BatchChunk.batch_id == held.batch_id, BatchChunk.state != "done"))
    if num_left:
        return False
    moved = await conn.execute(
        update(Batch)
        .where(Batch.id == held.batch_id, Batch.state == "in_progress")
        .values(state="finalizing", finalizing_at=now // 1000)
    )
    return bool(moved.rowcount)


async def expire(conn: AsyncConnection, now: int, own_prefix: str) -> int:
    """Claims that ran out go back to the queue. Of this process's own (`own_prefix`) the claimer has crashed, as
    the process itself lives: each line that was under way gets a crash. Returns how many."""
    over = and_(BatchChunk.state == "claimed", BatchChunk.claimed_until_ms < now)
    rows = (
        await conn.execute(
            update(BatchChunk)
            .where(over)
            .values(state="queued", claimed_until_ms=None)
            .returning(BatchChunk.batch_id, BatchChunk.seq, BatchChunk.claimed_by)
        )
    ).all()
    crashed = [(r.batch_id, r.seq) for r in rows if (r.claimed_by or "").startswith(own_prefix)]
    for batch_id, seq in crashed:
        await conn.execute(
            update(BatchLine)
            .where(BatchLine.batch_id == batch_id, BatchLine.chunk_seq == seq, BatchLine.state == "started")
            .values(crashes=BatchLine.crashes + 1)
        )
    return len(rows)


async def has_live_claim(conn: AsyncConnection, now: int, own_prefix: str) -> bool:
    query = select(BatchChunk.seq).where(
        BatchChunk.state == "claimed",
        BatchChunk.claimed_until_ms >= now,
        BatchChunk.claimed_by.startswith(own_prefix, autoescape=True),
    )
    return (await conn.execute(query.limit(1))).first() is not None


async def _update_held(conn: AsyncConnection, held: ChunkClaim, **values: Any) -> None:
    done = await conn.execute(
        update(BatchChunk)
        .where(
            BatchChunk.batch_id == held.batch_id,
            BatchChunk.seq == held.seq,
            BatchChunk.fence == held.fence,
            BatchChunk.state == "claimed",
        )
        .values(**values)
    )
    if not done.rowcount:
        raise ClaimLost("The claim on this chunk is lost.")


# Least slack, then age; a batch's chunks in prefix order.
_ORDER = (Batch.expires_at, Batch.created_at, Batch.id, BatchChunk.seq)


def _claimable(now: int) -> Any:
    return and_(
        BatchChunk.state == "queued",
        BatchChunk.not_before_ms <= now,
        Batch.state == "in_progress",
        Batch.expires_at > now // 1000,
    )
