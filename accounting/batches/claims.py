"""Claims on chunks: which runner may run which chunk, and until when. batch_lines.py writes the results of lines.

A claim is the time-limited right to run a chunk. Each claim raises the chunk's fence, and every write of a claimer
names its fence: a claimer that has lost the claim changes no row and gets `ClaimLost`. Times are the database's. Locks
are taken in this order: chunk, then batch, then the round robin's memory. A claim, which holds that memory, waits for no
locked row.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from sqlalchemy import and_, case, exists, func, literal_column, select, tuple_, update
from sqlalchemy.ext.asyncio import AsyncConnection

from accounting.database.db import upsert
from accounting.tables.batch_models import Batch, BatchChunk, BatchLine, TenantTurn
from accounting.tables.models import Tenant
from accounting.values.errors import AccountingError

_TURNS_LOCK = 0x7475726E73  # "turns"


class ClaimLost(AccountingError):
    """Another claimer has the work, or the work is over: the caller must write nothing more."""


class Waiting(msgspec.Struct, frozen=True):
    """A tenant with claimable work, as the round robin sees it."""

    tenant_id: str
    weight_percent: int
    deficit_tokens: int
    last_visit: int
    num_claimed: int
    predicted_tokens: int
    """Predicted tokens of the tenant's next chunk."""


class ChunkClaim(msgspec.Struct, frozen=True):
    batch_id: str
    seq: int
    tenant_id: str
    owner: str
    fence: int
    predicted_tokens: int
    lines: bytes


async def now_ms(conn: AsyncConnection) -> int:
    """Returns the database's clock in Unix milliseconds: claimers on several hosts share no other clock."""
    clock = (
        "CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER)"
        if conn.dialect.name == "sqlite"
        else "CAST(extract(epoch from clock_timestamp()) * 1000 AS BIGINT)"
    )
    return int((await conn.execute(select(literal_column(clock)))).scalar_one())


# Which chunk


async def waiting(conn: AsyncConnection, now: int) -> list[Waiting]:
    """Returns every tenant with a chunk that could be claimed now. Until the transaction ends nobody else changes the
    memory of the round robin."""
    await _take_turn(conn)
    place = func.row_number().over(partition_by=Batch.tenant_id, order_by=_ORDER)
    running = select(Batch.id, Batch.tenant_id, place.label("place")).where(_has_work(now)).subquery()
    predicted = (
        select(BatchChunk.predicted_tokens)
        .where(BatchChunk.batch_id == running.c.id, *_is_free(now))
        .order_by(BatchChunk.seq)
        .limit(1)
        .scalar_subquery()
    )
    claimed = (
        select(BatchChunk.tenant_id, func.count().label("num"))
        .where(BatchChunk.state == "claimed", BatchChunk.claimed_until_ms > now)
        .group_by(BatchChunk.tenant_id)
        .subquery()
    )
    query = (
        select(
            running.c.tenant_id,
            Tenant.weight_percent,
            func.coalesce(TenantTurn.deficit_tokens, 0),
            func.coalesce(TenantTurn.last_visit, 0),
            func.coalesce(claimed.c.num, 0),
            predicted,
        )
        .join(Tenant, Tenant.id == running.c.tenant_id)
        .outerjoin(TenantTurn, TenantTurn.tenant_id == running.c.tenant_id)
        .outerjoin(claimed, claimed.c.tenant_id == running.c.tenant_id)
        .where(running.c.place == 1)
    )
    return [Waiting(*row) for row in await conn.execute(query)]


async def num_claimable(conn: AsyncConnection, now: int, most: int) -> int:
    """Returns the number of chunks that could be claimed now, or `most` if there are more."""
    free = select(BatchChunk.seq).join(Batch, Batch.id == BatchChunk.batch_id)
    some = free.where(*_is_running(now), *_is_free(now)).limit(most).subquery()
    return int(await conn.scalar(select(func.count()).select_from(some)) or 0)


async def save_turns(conn: AsyncConnection, deficits: Mapping[str, int], visits: Mapping[str, int]) -> None:
    """Stores the round robin's memory. A tenant that waits no more loses the tokens it had saved up."""
    await conn.execute(update(TenantTurn).where(TenantTurn.tenant_id.not_in(list(deficits))).values(deficit_tokens=0))
    for tenant_id, deficit in sorted(deficits.items()):
        values = {"deficit_tokens": deficit, "last_visit": visits[tenant_id]}
        statement = upsert(conn, TenantTurn.__table__).values(tenant_id=tenant_id, **values)
        await conn.execute(statement.on_conflict_do_update(index_elements=["tenant_id"], set_=values))


async def correct_turn(conn: AsyncConnection, tenant_id: str, surplus_tokens: int) -> None:
    """Takes the tokens that a chunk used beyond its prediction from the tenant's deficit counter."""
    await _take_turn(conn)
    await conn.execute(
        update(TenantTurn)
        .where(TenantTurn.tenant_id == tenant_id)
        .values(deficit_tokens=TenantTurn.deficit_tokens - surplus_tokens)
    )


async def _take_turn(conn: AsyncConnection) -> None:
    # `save_turns` writes whole numbers that `waiting` has read. On SQLite there is one writer.
    if conn.dialect.name == "postgresql":
        await conn.execute(select(func.pg_advisory_xact_lock(_TURNS_LOCK)))


# The claim


async def claim(conn: AsyncConnection, tenant_id: str, owner: str, now: int, lasts_ms: int) -> ChunkClaim | None:
    """Claims the tenant's next chunk, unless somebody was quicker (None). It is one statement on either database, and
    PostgreSQL runs the choice once: `IN` could run it for each row, and claim several."""
    next_batch = (
        select(Batch.id)
        .where(Batch.tenant_id == tenant_id, _has_work(now))
        .order_by(*_ORDER)
        .limit(1)
        .scalar_subquery()
    )
    chosen = (
        select(BatchChunk.batch_id, BatchChunk.seq)
        .where(BatchChunk.batch_id == next_batch, *_is_free(now))
        .order_by(BatchChunk.seq)
        .limit(1)
        .with_for_update(of=BatchChunk, skip_locked=True)
    )
    statement = (
        update(BatchChunk)
        .where(tuple_(BatchChunk.batch_id, BatchChunk.seq) == chosen.scalar_subquery())
        .values(state="claimed", claimed_by=owner, claimed_until_ms=now + lasts_ms, fence=BatchChunk.fence + 1)
        .returning(BatchChunk.__table__)
    )
    row = (await conn.execute(statement)).first()
    if row is None:
        return None
    return ChunkClaim(row.batch_id, row.seq, row.tenant_id, owner, row.fence, row.predicted_tokens, row.lines)


async def renew(conn: AsyncConnection, held: ChunkClaim, now: int, lasts_ms: int) -> None:
    """Prolongs the claim. Raises `ClaimLost`. A claimer calls it first in every transaction, as it locks the chunk."""
    await _update_held(conn, held, claimed_until_ms=now + lasts_ms)


async def release(conn: AsyncConnection, held: ChunkClaim, not_before_ms: int = 0) -> None:
    """Puts the chunk back into the queue, at a drain or when the time is over. Raises `ClaimLost`."""
    await _update_held(conn, held, state="queued", claimed_by=None, claimed_until_ms=None, not_before_ms=not_before_ms)


async def postpone(conn: AsyncConnection, batch_id: str, not_before_ms: int, reason: str) -> None:
    """Pauses a batch: none of its queued chunks can be claimed before `not_before_ms`."""
    await conn.execute(
        update(BatchChunk)
        .where(BatchChunk.batch_id == batch_id, BatchChunk.state == "queued")
        .values(not_before_ms=not_before_ms)
    )
    await conn.execute(update(Batch).where(Batch.id == batch_id).values(paused_reason=reason))


async def finish_chunk(conn: AsyncConnection, held: ChunkClaim, now: int) -> bool:
    """Ends a chunk. Returns True if it was the batch's last, so that the batch is now finalizing. Raises
    `ClaimLost`."""
    await _update_held(conn, held, state="done", claimed_by=None, claimed_until_ms=None)
    # This is read under the batch's lock: of two chunks that finish at once the second one sees both done.
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


async def expire(
    conn: AsyncConnection, now: int, own_prefix: str, others_wait_ms: int = 0, *, counts_crashes: bool = True
) -> int:
    """Puts claims that ran out back into the queue and returns their number. A claim of this process (`own_prefix`) ran
    out because its claimer crashed, as the process itself lives: each of its started lines counts one crash, unless
    nobody could prolong a claim (`counts_crashes`). Claims of other processes are left to them for `others_wait_ms`,
    since no other process counts their crashes."""
    is_own = BatchChunk.claimed_by.startswith(own_prefix, autoescape=True)
    until = case((is_own, now), else_=now - others_wait_ms)
    over = and_(BatchChunk.state == "claimed", BatchChunk.claimed_until_ms < until)
    rows = (
        await conn.execute(
            update(BatchChunk)
            .where(over)
            .values(state="queued", claimed_until_ms=None)
            .returning(BatchChunk.batch_id, BatchChunk.seq, BatchChunk.claimed_by)
        )
    ).all()
    crashed = [(r.batch_id, r.seq) for r in rows if counts_crashes and (r.claimed_by or "").startswith(own_prefix)]
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


# The order of batches is: earliest expiry, then age. Chunks of one batch come in prefix order.
_ORDER = (Batch.expires_at, Batch.created_at, Batch.id)


def _has_work(now: int) -> Any:
    return and_(*_is_running(now), exists().where(BatchChunk.batch_id == Batch.id, *_is_free(now)))


def _is_running(now: int) -> tuple[Any, ...]:
    return Batch.state == "in_progress", Batch.expires_at > now // 1000


def _is_free(now: int) -> tuple[Any, ...]:
    # The state is no parameter: `ix_batch_chunk_queued` is used only where the statement itself has it.
    return BatchChunk.state == literal_column("'queued'"), BatchChunk.not_before_ms <= now
