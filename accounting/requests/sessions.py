"""Sessions: the conversations that requests of the log belong to. Their sums are made from the newest rows when asked."""

from __future__ import annotations

import msgspec
from sqlalchemy import case, func, select, union_all
from sqlalchemy.ext.asyncio import AsyncConnection

from accounting.requests.request_log import MAX_SCANNED_ROWS, RequestFilter, part_of, time_of
from accounting.tables.request_models import RequestLog


class Session(msgspec.Struct, frozen=True, kw_only=True):
    """The sums of a conversation's requests in one currency. Requests that cost nothing because they were refused have
    none, and count with the others; their tokens are in no sum, because nothing was computed."""

    session_id: str
    tenant_id: str
    currency: str
    num_requests: int
    first_ms: int
    last_ms: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    charge: int


class Sessions(msgspec.Struct, frozen=True):
    items: list[Session]
    """The conversation with the newest request comes first."""
    counted_from_ms: int | None
    """Older requests are in no sum. None means that there are none."""


_TOKENS = (RequestLog.prompt_tokens, RequestLog.cached_tokens, RequestLog.output_tokens)


async def list_sessions(conn: AsyncConnection, wanted: RequestFilter, limit: int) -> Sessions:
    """Returns the newest sessions among the wanted requests. Raises InvalidError."""
    part = await part_of(conn, wanted, max_rows=MAX_SCANNED_ROWS)
    log = RequestLog
    columns = (log.session_id, log.tenant_id, log.currency, log.status, log.started_at_ms, log.charge, *_TOKENS)
    # Written as `session_id <> ''`, the condition would let a database walk the whole index of sessions, which is in the
    # order of the groups, instead of the newest rows.
    has_session = func.length(log.session_id) > 0
    rows = union_all(*(select(*columns).where(run, has_session) for run in part.runs)).subquery()
    in_session = func.max(rows.c.currency).over(partition_by=(rows.c.session_id, rows.c.tenant_id))
    currency = func.coalesce(func.nullif(rows.c.currency, ""), in_session).label("paid_in")
    rows = select(rows, currency).subquery()
    groups = (rows.c.session_id, rows.c.tenant_id, rows.c.paid_in)
    last = func.max(rows.c.started_at_ms)
    was_computed = (rows.c.status < 400) | (rows.c.charge > 0)
    tokens = (func.sum(case((was_computed, rows.c[column.name]), else_=0)) for column in _TOKENS)
    query = select(*groups, func.count(), func.min(rows.c.started_at_ms), last, *tokens, func.sum(rows.c.charge))
    query = query.group_by(*groups).order_by(last.desc(), *groups).limit(limit)
    items = [
        Session(
            session_id=session_id,
            tenant_id=tenant_id,
            currency=currency,
            num_requests=number,
            first_ms=first_ms,
            last_ms=last_ms,
            prompt_tokens=int(prompt),
            cached_tokens=int(cached),
            output_tokens=int(output),
            charge=int(charge),
        )
        for session_id, tenant_id, currency, number, first_ms, last_ms, prompt, cached, output, charge in (
            await conn.execute(query)
        )
    ]
    return Sessions(items, None if part.down_to is None else time_of(part.down_to))
