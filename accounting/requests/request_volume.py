"""The number of requests over time, from the request log: counts per bucket, failed ones apart."""

from __future__ import annotations

import msgspec
from sqlalchemy import case, func, select
from sqlalchemy.ext.asyncio import AsyncConnection

from accounting.requests.request_log import RequestFilter, part_of, time_of
from accounting.tables.request_models import RequestLog
from accounting.values.errors import InvalidError

MAX_COUNTED_ROWS = 20_000
"""The most rows of one run of an index that are counted, so that a page of a full log costs no more than one of a small
one."""


class Volume(msgspec.Struct, frozen=True):
    since_ms: int
    bucket_ms: int
    counts: list[tuple[int, int]]
    """The number of requests of each bucket, and how many of them failed."""
    counted_from_ms: int
    """The time from which all wanted requests are counted. Older ones are left out where there are too many."""


async def volume(conn: AsyncConnection, wanted: RequestFilter, num_buckets: int) -> Volume:
    """Returns the counts between the filter's two times, which must be set. Raises InvalidError."""
    since_ms, until_ms = wanted.since_ms, wanted.until_ms
    if since_ms is None or until_ms is None or until_ms <= since_ms:
        raise InvalidError("The end must be later than the start.", "end_time")
    bucket_ms = max(1, -(-(until_ms - since_ms) // num_buckets))
    part = await part_of(conn, wanted, max_rows=MAX_COUNTED_ROWS)
    number = ((RequestLog.started_at_ms - since_ms) // bucket_ms).label("number")
    failed = func.sum(case((RequestLog.outcome != "ok", 1), else_=0))
    counts = [[0, 0] for _ in range(num_buckets)]
    for run in part.runs:
        for bucket, num_requests, num_failed in await conn.execute(
            select(number, func.count(), failed).where(run).group_by(number)
        ):
            # A request's id may be a millisecond older than its start.
            count = counts[min(max(bucket, 0), num_buckets - 1)]
            count[0] += num_requests
            count[1] += int(num_failed)
    oldest_ms = since_ms if part.down_to is None else time_of(part.down_to)
    return Volume(since_ms, bucket_ms, [(all_, failed) for all_, failed in counts], max(since_ms, oldest_ms))
