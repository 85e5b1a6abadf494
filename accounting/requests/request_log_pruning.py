"""The retention of the request log: rows have an age at most, and beyond a number of rows the oldest go.

Rows go from the tenant that has the most, so that nobody's requests push out those of others. Of a tenant's rows the
tail goes last: requests that failed, and the slowest of those that were due to be deleted. The tail takes at most half
of a tenant's rows.
"""

from __future__ import annotations

from collections import Counter

from sqlalchemy import ColumnElement, and_, delete, func, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from accounting.database.db import Database, among
from accounting.requests import label_usage
from accounting.requests.request_log import id_at
from accounting.tables.request_models import RequestLog

DAY_MS = 86_400_000
PIECE_ROWS = 1_000
"""The most rows that one transaction deletes. Writers of SQLite wait for each other."""
MAX_PIECES = 200
"""The most transactions of one call; the next call goes on."""
ONE_OF = 50
"""One row of this many that are due is kept with the tail: the slowest."""

_Run = tuple[str, bool]
"""A tenant's tail or its other rows: (tenant id, whether they are the tail)."""


async def prune(database: Database, now_ms: int, *, max_rows: int, max_days: int) -> int:
    """Deletes what is too old, then the oldest rows above `max_rows`. Returns the number of deleted rows. Sums by label
    are deleted by their age alone."""
    async with database.write() as conn:
        await label_usage.forget(conn, now_ms - max_days * DAY_MS)
    num_deleted = num_pieces = 0
    while num_pieces < MAX_PIECES and (num_old := await _delete_old(database, id_at(now_ms - max_days * DAY_MS))):
        num_deleted, num_pieces = num_deleted + num_old, num_pieces + 1
    async with database.read() as conn:
        counts = await _counts(conn)
    while num_pieces < MAX_PIECES and (surplus := counts.total() - max_rows) > 0:
        num_wanted = min(PIECE_ROWS, max(surplus, max_rows // 20))
        num_deleted, num_pieces = num_deleted + await _delete_piece(database, counts, num_wanted), num_pieces + 1
    return num_deleted


async def _delete_old(database: Database, before: str) -> int:
    async with database.read() as conn:
        query = select(RequestLog.request_id).where(RequestLog.request_id < before).order_by(RequestLog.request_id)
        ids = list(await conn.scalars(query.limit(PIECE_ROWS)))
    if not ids:
        return 0
    async with database.write() as conn:
        return (await conn.execute(delete(RequestLog).where(RequestLog.request_id <= ids[-1]))).rowcount


async def _counts(conn: AsyncConnection) -> Counter[_Run]:
    groups = (RequestLog.tenant_id, RequestLog.is_tail)
    rows = await conn.execute(select(*groups, func.count()).group_by(*groups))
    return Counter({(tenant_id, is_tail): number for tenant_id, is_tail, number in rows})


async def _delete_piece(database: Database, counts: Counter[_Run], num_wanted: int) -> int:
    """Deletes the oldest rows of the tenant that has the most, from the larger of its two runs: at most half of that,
    as others may then have more. Corrects `counts`."""
    by_tenant: Counter[str] = Counter()
    for (tenant_id, _), number in counts.items():
        by_tenant[tenant_id] += number
    ((largest, _),) = by_tenant.most_common(1)
    run = max((largest, False), (largest, True), key=lambda one: counts[one])
    num_rows = min(num_wanted, max(1, counts[run] // 2))
    async with database.read() as conn:
        query = select(RequestLog.request_id, RequestLog.duration_ms).where(_of(run))
        rows = list(await conn.execute(query.order_by(RequestLog.request_id).limit(num_rows)))
    if not rows:
        counts[run] = 0
        return 0
    num_kept = 0 if run[1] else len(rows) // ONE_OF
    slowest = sorted(rows, key=lambda row: row.duration_ms, reverse=True)[:num_kept]
    async with database.write() as conn:
        if slowest:
            ids = [row.request_id for row in slowest]
            await conn.execute(update(RequestLog).where(among(conn, RequestLog.request_id, ids)).values(is_tail=True))
        due = and_(_of(run), RequestLog.request_id <= rows[-1].request_id)
        num_deleted = (await conn.execute(delete(RequestLog).where(due))).rowcount
    counts[run] -= len(rows)
    counts[(largest, True)] += num_kept
    return num_deleted


def _of(run: _Run) -> ColumnElement[bool]:
    tenant_id, is_tail = run
    return and_(RequestLog.tenant_id == tenant_id, RequestLog.is_tail == is_tail)
