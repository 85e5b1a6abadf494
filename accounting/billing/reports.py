"""Usage and costs over time, from rollups alone (api.md 6.2). All values are integers; the gateway makes the JSON.

A bucket is aligned to UTC. A bucket that the range cuts at its beginning or end is summed from minutes. A page has a
bounded number of results, so it ends before the bucket that has no room in it, and that bucket begins the next page.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeVar

import msgspec
from sqlalchemy import BigInteger, Row, Select, cast, func, select
from sqlalchemy.ext.asyncio import AsyncConnection

from accounting.billing import report_pages, residency_sums
from accounting.billing.residency_sums import ResidencyClass
from accounting.ledger import embedding_models
from accounting.ledger.rollups import SECONDS, TABLES, Width
from accounting.values.errors import InvalidError
from accounting.values.periods import LAST_SECOND
from accounting.values.types import OPERATOR_TENANT, TOKEN_CLASSES, Tier, TokenClass, Usage

T = TypeVar("T")
Dimension = Literal["project_id", "api_key_id", "model", "batch", "service_tier", "currency", "line_item"]
USAGE_DIMENSIONS: tuple[Dimension, ...] = ("project_id", "api_key_id", "model", "batch", "service_tier", "currency")
EMBEDDING_DIMENSIONS: tuple[Dimension, ...] = ("project_id", "api_key_id", "model")
COST_DIMENSIONS: tuple[Dimension, ...] = ("project_id", "api_key_id", "line_item")
USAGE_LIMITS: dict[Width, tuple[int, int]] = {"1m": (60, 1440), "1h": (24, 168), "1d": (7, 31)}
COST_LIMITS: dict[Width, tuple[int, int]] = {"1m": (60, 1440), "1h": (24, 168), "1d": (7, 180)}

MAX_RESULTS = 10_000
"""The most results of a page that come from requests, and the most that come from kept KV."""
PIECE_ROWS = 1_000
"""The rows that become results before other tasks of the loop have their turn."""

# `batch` and `service_tier` are two names of one column.
USAGE_SUMS = ("num_requests", *TOKEN_CLASSES)
SPLIT_SUMS = (*TOKEN_CLASSES, *(f"charge_{name}" for name in TOKEN_CLASSES))
COLUMNS: dict[Dimension, tuple[str, ...]] = {
    "project_id": ("tenant_id",),
    "api_key_id": ("key_id",),
    "model": ("model",),
    "batch": ("tier",),
    "service_tier": ("tier",),
    "currency": ("currency",),
    "line_item": ("model", "tier"),
}


class ReportQuery(msgspec.Struct, frozen=True, kw_only=True):
    """One report that was asked for. A filter of None lets everything through, but for what the operator's own tenant
    used to fill public prefixes: that is of no tenant, so it counts only if `tenant_ids` names it."""

    start_time: int
    end_time: int | None = None
    width: Width = "1d"
    limit: int | None = None
    group_by: tuple[Dimension, ...] = ()
    tenant_ids: tuple[str, ...] | None = None
    key_ids: tuple[str, ...] | None = None
    models: tuple[str, ...] | None = None
    batch: bool | None = None
    line_items: tuple[str, ...] | None = None
    page: str | None = None
    of_embeddings: bool = False
    """Only models that give embeddings count."""


QuantityUnit = Literal["tokens", "byte_hours"]


class UsageResult(msgspec.Struct, frozen=True):
    """Sums of one group in one bucket. A dimension that the query did not group by is None."""

    tenant_id: str | None
    key_id: str | None
    model: str | None
    batch: bool | None
    service_tier: Tier | None
    currency: str | None
    usage: Usage
    num_requests: int


class CostResult(msgspec.Struct, frozen=True):
    tenant_id: str | None
    key_id: str | None
    line_item: str | None
    currency: str
    amount: int
    """The amount in micro-units."""
    quantity: int | None
    """Tokens, or byte-hours of kept KV; set only if the query splits by `line_item`."""
    unit: QuantityUnit | None


class Bucket(msgspec.Struct, frozen=True):
    start_time: int
    end_time: int
    results: Sequence[UsageResult | CostResult]


class Report(msgspec.Struct, frozen=True):
    buckets: list[Bucket]
    next_page: str | None
    as_of: int


async def usage(conn: AsyncConnection, query: ReportQuery, now: int) -> Report:
    """Returns usage of all models, or of embeddings: settled requests, each in the bucket of its start. Raises
    InvalidError."""
    page = _plan(query, now, USAGE_LIMITS, EMBEDDING_DIMENSIONS if query.of_embeddings else USAGE_DIMENSIONS)
    columns = tuple(dict.fromkeys(column for name in query.group_by for column in COLUMNS[name]))
    found: dict[int, list[UsageResult]] = defaultdict(list)
    read = _usage_reader(query, columns)
    rows, page = await _sums(conn, query, page, columns, USAGE_SUMS, MAX_RESULTS)
    async for row in _in_pieces(rows):
        found[row[0]].append(read(row))
    return _report(query, page, found, now)


async def costs(conn: AsyncConnection, query: ReportQuery, now: int) -> Report:
    """Returns settled charges and charges for kept KV, split into line items if the query wants it. No key keeps KV, so
    charges for kept KV are under no key. They are charged by the hour, and stand in the first minute of it. Raises
    InvalidError."""
    page = _plan(query, now, COST_LIMITS, COST_DIMENSIONS)
    columns = tuple(dict.fromkeys(column for name in query.group_by for column in COLUMNS[name]))
    if query.line_items is not None:
        columns = tuple(dict.fromkeys((*columns, "model", "tier")))
    sums = SPLIT_SUMS if _is_split(query) else ("charge",)
    most = MAX_RESULTS // (len(TOKEN_CLASSES) if _is_split(query) else 1)
    rows, page = await _sums(conn, query, page, (*columns, "currency"), sums, most)
    kept, page = await _kept(conn, query, page)
    found: dict[int, dict[tuple[Any, ...], CostResult]] = defaultdict(dict)
    async for row in _in_pieces(rows):
        if row.start < page.last:
            _add(found[row.start], _cost_parts(query, row._mapping))
    async for one in _in_pieces(kept):
        _add(found[one.start], _kept_parts(query, one))
    return _report(query, page, {start: list(bucket.values()) for start, bucket in found.items()}, now)


def line_item(model: str, token_class: TokenClass | ResidencyClass, tier: Tier) -> str:
    return f"{model}, {token_class}" + (", batch" if tier == "batch" else "")


class _Page(msgspec.Struct, frozen=True):
    """The buckets of one reply: [first, last) in steps of the width, summed over [start, end)."""

    start: int
    end: int
    first: int
    last: int
    more: bool


def _plan(
    query: ReportQuery, now: int, limits: Mapping[Width, tuple[int, int]], dimensions: Sequence[Dimension]
) -> _Page:
    if query.width not in limits:
        raise InvalidError(f"bucket_width must be one of {', '.join(limits)}.", "bucket_width")
    default, most = limits[query.width]
    limit = default if query.limit is None else query.limit
    if not 1 <= limit <= most:
        raise InvalidError(f"limit must be 1 to {most} for this bucket_width.", "limit")
    if not set(query.group_by) <= set(dimensions):
        raise InvalidError(f"group_by takes {', '.join(dimensions)}.", "group_by")
    seconds = SECONDS[query.width]
    first = query.start_time - query.start_time % seconds
    # The range ends before `end`; a request that began in this very second is included.
    end = now + 1 if query.end_time is None else query.end_time
    if query.page is not None:
        begin = first
        end, first = report_pages.read(_fingerprint(query), query.page)
        if not begin <= first < end:
            raise InvalidError("page is not one that this query returned.", "page")
    if not 0 <= query.start_time < end <= LAST_SECOND:
        raise InvalidError("start_time must lie before end_time, both Unix seconds.", "start_time")
    last = first + limit * seconds
    # Minutes are the finest sums: the range begins with the minute of its start.
    start = query.start_time - query.start_time % SECONDS["1m"]
    return _Page(max(start, first), end, first, min(last, end + -end % seconds), last < end)


def _report(
    query: ReportQuery, page: _Page, found: Mapping[int, Sequence[UsageResult | CostResult]], now: int
) -> Report:
    seconds = SECONDS[query.width]
    buckets = [Bucket(start, start + seconds, found.get(start, ())) for start in range(page.first, page.last, seconds)]
    following = report_pages.write(_fingerprint(query), page.end, page.last) if page.more else None
    return Report(buckets, following, now)


def _fingerprint(query: ReportQuery) -> bytes:
    return msgspec.json.encode(msgspec.structs.replace(query, page=None))


async def _sums(
    conn: AsyncConnection, query: ReportQuery, page: _Page, columns: Sequence[str], sums: Sequence[str], most: int
) -> tuple[Sequence[Row[Any]], _Page]:
    """Returns one row per bucket and group in a stable order, and the page as far as `most` rows reach, or, if its
    first bucket has more, `MAX_RESULTS` rows."""
    rows: list[Row[Any]] = []
    for width, start, end in _segments(query.width, page):
        statement = _segment_sums(query, columns, sums, width, start, end).limit(MAX_RESULTS + 1 - len(rows))
        rows += (await conn.execute(statement)).all()
        if len(rows) > MAX_RESULTS:
            break
    page = _with_room(page, [row.start for row in rows], most)
    return [row for row in rows if row[0] < page.last], page


async def _kept(
    conn: AsyncConnection, query: ReportQuery, page: _Page
) -> tuple[Sequence[residency_sums.Bucket], _Page]:
    """Returns the sums of kept KV, and the page as far as they reach. No key keeps KV."""
    if query.key_ids is not None:
        return (), page
    most = MAX_RESULTS // len(residency_sums.CLASSES)
    names = {"tenant_id": "project_id" in query.group_by, "model": _is_split(query)}
    buckets = residency_sums.by_bucket(
        conn,
        page.start,
        min(page.end, page.last),
        SECONDS[query.width],
        query.tenant_ids,
        columns=[name for name, is_asked in names.items() if is_asked],
        limit=MAX_RESULTS + 1,
    )
    kept = [one async for one in buckets]
    page = _with_room(page, [one.start for one in kept], most)
    return [one for one in kept if one.start < page.last], page


def _with_room(page: _Page, starts: Sequence[int], most: int) -> _Page:
    """Returns the page without the buckets of which a part is beyond the first `most` rows, whose `starts` are given.
    The page's first bucket may have more. Raises InvalidError if it has more than `MAX_RESULTS`."""
    if starts[MAX_RESULTS:] and starts[MAX_RESULTS] <= page.first:
        raise InvalidError(
            f"One bucket has more than {MAX_RESULTS:,} sums. Group by less, or filter, for example by project.",
            "group_by",
        )
    beyond = next((start for start in starts[most:] if start > page.first), None)
    return page if beyond is None else msgspec.structs.replace(page, last=beyond, more=True)


async def _in_pieces(rows: Sequence[T]) -> AsyncIterator[T]:
    """Yields the rows, and lets other tasks use the loop between their pieces."""
    for number, row in enumerate(rows, 1):
        yield row
        if number % PIECE_ROWS == 0:
            await asyncio.sleep(0)


def _segments(width: Width, page: _Page) -> Iterator[tuple[Width, int, int]]:
    """Yields whole buckets from the width's own table and cut ones from minutes. No two segments share a bucket."""
    seconds = SECONDS[width]
    end = min(page.end, page.last)
    whole_from, whole_to = page.start + -page.start % seconds, end - end % seconds
    if whole_from > whole_to:
        yield "1m", page.start, end
        return
    if page.start < whole_from:
        yield "1m", page.start, whole_from
    if whole_from < whole_to:
        yield width, whole_from, whole_to
    if whole_to < end:
        yield "1m", whole_to, end


def _segment_sums(
    query: ReportQuery, columns: Sequence[str], sums: Sequence[str], width: Width, start: int, end: int
) -> Select[Any]:
    table = TABLES[width].__table__.c
    bucket = (table.bucket - table.bucket % SECONDS[query.width]).label("start")
    groups = [bucket, *(table[name] for name in columns)]
    # PostgreSQL sums BIGINT as NUMERIC, whose values are slow to read.
    totals = (cast(func.sum(table[name]), BigInteger).label(name) for name in sums)
    statement = select(*groups, *totals)
    statement = statement.where(table.bucket >= start, table.bucket < end)
    filters = {"tenant_id": query.tenant_ids, "key_id": query.key_ids, "model": query.models}
    for name, values in filters.items():
        if values is not None:
            statement = statement.where(table[name].in_(values))
    if query.tenant_ids is None:
        statement = statement.where(table.tenant_id != OPERATOR_TENANT)
    if query.of_embeddings:
        statement = statement.where(table.model.in_(embedding_models.models()))
    if query.batch is not None:
        statement = statement.where(table.tier == ("batch" if query.batch else "interactive"))
    return statement.group_by(*groups).order_by(*groups)


def _usage_reader(query: ReportQuery, columns: Sequence[str]) -> Callable[[Sequence[Any]], UsageResult]:
    """Returns a reader that finds columns by index: a page may have ten thousand results."""
    asked = query.group_by

    def place(dimension: Dimension, column: str) -> int | None:
        return 1 + columns.index(column) if dimension in asked else None

    tenant, key = place("project_id", "tenant_id"), place("api_key_id", "key_id")
    model, batch = place("model", "model"), place("batch", "tier")
    tier, currency = place("service_tier", "tier"), place("currency", "currency")
    first = 1 + len(columns)

    def read(row: Sequence[Any]) -> UsageResult:
        return UsageResult(
            None if tenant is None else row[tenant],
            None if key is None else row[key],
            None if model is None else row[model],
            None if batch is None else row[batch] == "batch",
            None if tier is None else row[tier],
            None if currency is None else row[currency],
            Usage(*row[first + 1 : first + 5]),
            row[first],
        )

    return read


def _add(bucket: dict[tuple[Any, ...], CostResult], parts: Iterator[CostResult]) -> None:
    for part in parts:
        key = (part.tenant_id, part.key_id, part.line_item, part.currency)
        bucket[key] = part if key not in bucket else _added(bucket[key], part)


def _cost_parts(query: ReportQuery, row: Mapping[Any, Any]) -> Iterator[CostResult]:
    tenant_id = row["tenant_id"] if "project_id" in query.group_by else None
    key_id = row["key_id"] if "api_key_id" in query.group_by else None
    if not _is_split(query):
        yield CostResult(tenant_id, key_id, None, row["currency"], int(row["charge"]), None, None)
        return
    for name in TOKEN_CLASSES:
        item = line_item(row["model"], name, row["tier"])
        amount, num_tokens = int(row[f"charge_{name}"]), int(row[name])
        if num_tokens and _is_asked(query, item):
            whole = CostResult(tenant_id, key_id, item, row["currency"], amount, num_tokens, "tokens")
            yield _named(query, whole)


def _kept_parts(query: ReportQuery, one: residency_sums.Bucket) -> Iterator[CostResult]:
    tenant_id = one.tenant_id if "project_id" in query.group_by else None
    for token_class, kept in one.kept:
        item = line_item(one.model, token_class, "interactive")
        if _is_asked(query, item):
            whole = CostResult(tenant_id, None, item, one.currency, kept.amount, kept.byte_hours, "byte_hours")
            yield _named(query, whole)


def _is_split(query: ReportQuery) -> bool:
    return "line_item" in query.group_by or query.line_items is not None


def _is_asked(query: ReportQuery, item: str) -> bool:
    return query.line_items is None or item in query.line_items


def _named(query: ReportQuery, part: CostResult) -> CostResult:
    """Returns the part as a result. If the query filters by line items and does not group by them, amounts of all kinds
    add up."""
    if "line_item" in query.group_by:
        return part
    return msgspec.structs.replace(part, line_item=None, quantity=None, unit=None)


def _added(one: CostResult, other: CostResult) -> CostResult:
    quantity = None if one.quantity is None else one.quantity + (other.quantity or 0)
    return msgspec.structs.replace(one, amount=one.amount + other.amount, quantity=quantity)
