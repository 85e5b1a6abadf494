"""The request log: rows are added in batches, apart from the ledger, listed newest first, and read one by one.

A request id begins with the time of its acceptance, so the order of ids is the order of the log, and a page goes on
after an id. A page looks at a bounded number of rows: where filters find little, it may be short or empty although more
follows. The console, the command line and both APIs read by these functions. Deleting is in `request_log_pruning.py`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import msgspec
from sqlalchemy import ColumnElement, Row, Select, and_, false, func, literal, literal_column, select, true
from sqlalchemy.ext.asyncio import AsyncConnection

from accounting.database.db import among_given, given, insert_absent
from accounting.tables.models import ApiKey, Tenant
from accounting.tables.request_models import RequestLog
from accounting.values.errors import InvalidError, NotFoundError
from accounting.values.types import Tier

MAX_SCANNED_ROWS = 20_000
"""The most rows of one index that a page looks at when a filter has no index."""
_ID = re.compile(r"req_[0-9a-f]{1,32}")

RequestOutcome = Literal["ok", "client_error", "refused", "server_error", "client_gone"]
StatusClass = Literal[2, 4, 5]


class LoggedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request of the log. It has no text of a prompt or an answer."""

    request_id: str
    is_tail: bool
    """The row is deleted last: the request failed, or was one of the slowest."""
    started_at_ms: int
    tenant_id: str
    key_id: str
    endpoint: str
    """Method and template of the route."""
    model: str = ""
    tier: str = ""
    batch_id: str | None = None
    end_user: str = ""
    metadata: dict[str, Any] | None = None
    is_stream: bool = False
    status: int
    outcome: str
    error_code: str = ""
    finish_reason: str = ""
    prompt_tokens: int = 0
    """All tokens of the prompt, cached ones included."""
    cached_tokens: int = 0
    cache_write_tokens: int = 0
    output_tokens: int = 0
    charge: int = 0
    """Micro-units of `currency`."""
    currency: str = ""
    ttft_ms: int | None = None
    duration_ms: int = 0
    num_retries: int = 0
    """The number of earlier tries that the client's SDK tells of."""
    worker: str = ""
    miss_reason: str = ""
    """The reason why no more of the prompt was cached."""
    diverged_at_token: int | None = None
    """The position in the prompt at which it left what was cached."""
    trace_id: str = ""
    session_id: str = ""
    """The conversation that the request belongs to, as its client names it."""
    timeline: str = ""
    """The packed timeline; `timelines.unpack` reads it. Lists leave it out."""


class RequestFilter(msgspec.Struct, frozen=True):
    """The requests to list. A field of None does not filter."""

    tenant_id: str | None = None
    key_id: str | None = None
    model: str | None = None
    trace_id: str | None = None
    session_id: str | None = None
    """A conversation of `tenant_id`, which must be set with it."""
    request_id: str | None = None
    tier: Tier | None = None
    batch_id: str | None = None
    end_user: str | None = None
    error_code: str | None = None
    """Only requests that failed have one."""
    status_class: StatusClass | None = None
    outcome: RequestOutcome | None = None
    since_ms: int | None = None
    """The first millisecond of acceptance."""
    until_ms: int | None = None
    """The millisecond after the last."""
    min_duration_ms: int | None = None


class RequestPage(msgspec.Struct, frozen=True):
    items: list[LoggedRequest]
    """The newest first."""
    next_after: str | None
    """The id after which the next page goes on. None means that there is no more. It may be set without any item."""


HAS_SESSION = RequestLog.session_id != literal_column("''")
"""The condition of the index of sessions. It is written out, because databases do not look into parameters."""
HAS_END_USER = RequestLog.end_user != literal_column("''")
"""The condition of the index of end users."""

_LISTED = [column for column in RequestLog.__table__.c if column.name != "timeline"]


async def without_erased(conn: AsyncConnection, requests: Sequence[LoggedRequest]) -> list[LoggedRequest]:
    """Returns the requests of tenants that are not erased. No tenant is erased until the transaction ends."""
    tenants = given(conn, {one.tenant_id for one in requests})
    erased = {row.id for row in await conn.execute(_erased(conn.dialect.name), tenants) if row.erased_at is not None}
    return [one for one in requests if one.tenant_id not in erased]


@cache
def _erased(dialect: str) -> Select[str, int | None]:
    """Returns the query that locks tenants and says when they were erased."""
    query = select(Tenant.id, Tenant.erased_at).where(among_given(dialect, Tenant.id))
    return query.order_by(Tenant.id).with_for_update(read=True, key_share=True)


async def add(conn: AsyncConnection, requests: Sequence[LoggedRequest]) -> None:
    """Adds rows. A row that exists already stays as it is, because a batch whose COMMIT is unknown is sent again."""
    await insert_absent(conn, RequestLog.__table__, [msgspec.structs.asdict(request) for request in requests])


async def get(conn: AsyncConnection, request_id: str, tenant_id: str | None = None) -> LoggedRequest:
    """Returns one request with its timeline. With `tenant_id` another tenant's request is unknown. Raises
    NotFoundError."""
    query = select(RequestLog.__table__).where(RequestLog.request_id == request_id)
    if tenant_id is not None:
        query = query.where(RequestLog.tenant_id == tenant_id)
    row = (await conn.execute(query)).first() if _ID.fullmatch(request_id) else None
    if row is None:
        raise NotFoundError("There is no such request in the log.")
    return _request(row)


async def list_requests(
    conn: AsyncConnection, wanted: RequestFilter, *, after: str | None = None, limit: int = 20
) -> RequestPage:
    """Returns one page, the newest first, without timelines. `after` is any id: the page has older requests. Raises
    InvalidError."""
    part = await part_of(conn, wanted, after, max_rows=MAX_SCANNED_ROWS if _without_index(wanted) else None)
    rows: list[Row[Any]] = []
    for run in part.runs:
        query = select(*_LISTED).where(run).order_by(RequestLog.request_id.desc())
        rows += await conn.execute(query.limit(limit + 1))
    found = sorted(rows, key=lambda row: row.request_id, reverse=True)
    items = [_request(row) for row in found[:limit]]
    if len(found) > limit:
        return RequestPage(items, items[-1].request_id)
    return RequestPage(items, part.down_to)


async def count_older(conn: AsyncConnection, wanted: RequestFilter, request_id: str) -> int | None:
    """Returns the number of the wanted requests that are older than that one, or None if they are more than are read for
    one page: whoever names all its requests alike has one conversation of them. Raises InvalidError."""
    part = await part_of(conn, wanted, request_id, max_rows=None)
    counts = []
    for run in part.runs:
        older = select(literal(1)).select_from(RequestLog).where(run).limit(MAX_SCANNED_ROWS + 1).subquery()
        counts.append(await conn.scalar(select(func.count()).select_from(older)) or 0)
    return sum(counts) if max(counts, default=0) <= MAX_SCANNED_ROWS else None


@dataclass(frozen=True, slots=True)
class Part:
    """The part of the log that a query reads: conditions that no row meets twice, each of them a run of an index."""

    runs: list[ColumnElement[bool]]
    down_to: str | None
    """The oldest id that is read. None means that nothing older is wanted."""


async def part_of(
    conn: AsyncConnection, wanted: RequestFilter, after: str | None = None, *, max_rows: int | None
) -> Part:
    """Returns where the wanted requests are. With `max_rows` at most that number of the newest rows of each index run
    are read, whether they are wanted or not. Raises InvalidError."""
    if wanted.session_id is not None and wanted.tenant_id is None:
        raise InvalidError("A session is of a tenant: 'session_id' needs 'project_id'.", "session_id")
    if await _is_anothers_key(conn, wanted):
        return Part([false()], None)
    runs = [[*run, *_bounds(wanted, after)] for run in _index_runs(wanted)]
    ends = [] if max_rows is None else [await _last_to_look_at(conn, run, max_rows) for run in runs]
    down_to = max(filter(None, ends), default=None)
    rest = _without_index(wanted) + ([] if down_to is None else [RequestLog.request_id >= down_to])
    return Part([and_(true(), *run, *rest) for run in runs], down_to)


async def _is_anothers_key(conn: AsyncConnection, wanted: RequestFilter) -> bool:
    """Says whether the key is of another tenant than the wanted one. How far its rows are read would tell when it was
    used."""
    if wanted.tenant_id is None or wanted.key_id is None:
        return False
    owner = await conn.scalar(select(ApiKey.tenant_id).where(ApiKey.id == wanted.key_id))
    return owner not in (None, wanted.tenant_id)


def id_at(at_ms: int) -> str:
    """Returns the least id of a request that was accepted at this time or later."""
    return f"req_{min(max(at_ms, 0), 2**48 - 1):012x}"


def _bounds(wanted: RequestFilter, after: str | None) -> list[ColumnElement[bool]]:
    if after is not None and not _ID.fullmatch(after):
        raise InvalidError("'after' must be the id of a request.", "after")
    bounds: list[ColumnElement[bool]] = []
    if wanted.since_ms is not None:
        bounds.append(RequestLog.request_id >= id_at(wanted.since_ms))
    ends = [after] if after is not None else []
    ends += [id_at(wanted.until_ms)] if wanted.until_ms is not None else []
    if ends:
        bounds.append(RequestLog.request_id < min(ends))
    return bounds


def time_of(request_id: str) -> int:
    """Returns the time in the id, in Unix milliseconds."""
    return int(request_id.removeprefix("req_")[:12], 16)


def _columns(wanted: RequestFilter) -> list[tuple[Any, str]]:
    """Returns the columns with an index that the filter names, the narrowest first."""
    of_tenant = wanted.end_user if wanted.tenant_id is not None else None  # that index begins with the tenant
    columns = (
        (RequestLog.request_id, wanted.request_id),
        (RequestLog.trace_id, wanted.trace_id),
        (RequestLog.session_id, wanted.session_id),
        (RequestLog.batch_id, wanted.batch_id),
        (RequestLog.end_user, of_tenant),
        (RequestLog.key_id, wanted.key_id),
        (RequestLog.tenant_id, wanted.tenant_id),
        (RequestLog.model, wanted.model),
    )
    return [(column, value) for column, value in columns if value is not None]


def _index_runs(wanted: RequestFilter) -> list[list[ColumnElement[bool]]]:
    """Returns the runs of the first column's index that hold every wanted row. Failed requests are all in the tail."""
    failed_only = wanted.status_class in (4, 5) or wanted.outcome not in (None, "ok") or wanted.error_code is not None
    columns = _columns(wanted)
    if not columns:
        return [[RequestLog.is_tail == failed_only]] if failed_only else [[]]
    column, value = columns[0]
    if column is RequestLog.session_id:
        return [[RequestLog.tenant_id == wanted.tenant_id, column == value, HAS_SESSION]]
    if column is RequestLog.end_user:
        return [[RequestLog.tenant_id == wanted.tenant_id, column == value, HAS_END_USER]]
    if column is RequestLog.request_id or column is RequestLog.trace_id or column is RequestLog.batch_id:
        # Another tenant's rows of a trace or a batch must not say how far the page has looked.
        own = [] if wanted.tenant_id is None else [RequestLog.tenant_id == wanted.tenant_id]
        return [[column == value, *own]]
    return [[column == value, RequestLog.is_tail == is_tail] for is_tail in ((True,) if failed_only else (True, False))]


def _without_index(wanted: RequestFilter) -> list[ColumnElement[bool]]:
    """Returns the conditions that are checked row by row: all but the first column's."""
    conditions: list[ColumnElement[bool]] = [column == value for column, value in _columns(wanted)[1:]]
    if wanted.tenant_id is None and wanted.end_user is not None:
        conditions.append(RequestLog.end_user == wanted.end_user)
    if wanted.tier is not None:
        conditions.append(RequestLog.tier == wanted.tier)
    if wanted.error_code is not None:
        conditions.append(RequestLog.error_code == wanted.error_code)
    if wanted.outcome is not None:
        conditions.append(RequestLog.outcome == wanted.outcome)
    if wanted.status_class is not None:
        low = wanted.status_class * 100
        conditions.append(RequestLog.status.between(low, low + 99))
    if wanted.min_duration_ms is not None:
        conditions.append(RequestLog.duration_ms >= wanted.min_duration_ms)
    return conditions


async def _last_to_look_at(
    conn: AsyncConnection, conditions: Sequence[ColumnElement[bool]], max_rows: int
) -> str | None:
    """Returns the id of the last row that is looked at, or None if all of them are few enough."""
    query = select(RequestLog.request_id).where(and_(true(), *conditions))
    query = query.order_by(RequestLog.request_id.desc()).offset(max_rows - 1).limit(1)
    return await conn.scalar(query)


def _request(row: Row[Any]) -> LoggedRequest:
    return LoggedRequest(**row._mapping)
