"""Usage and costs over time, from rollups alone (api.md 6.2). All values are integers; the gateway makes the JSON.

A bucket is aligned to UTC. A bucket that the range cuts at its beginning or end is summed from minutes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import msgspec
from sqlalchemy import BigInteger, Row, Select, cast, func, select
from sqlalchemy.ext.asyncio import AsyncConnection

from accounting.billing import report_pages, residency_sums
from accounting.billing.residency_sums import ResidencyClass
from accounting.ledger import embedding_models
from accounting.ledger.rollups import SECONDS, TABLES, Width
from accounting.values.errors import InvalidError
from accounting.values.types import TOKEN_CLASSES, Tier, TokenClass, Usage

Dimension = Literal["project_id", "api_key_id", "model", "batch", "service_tier", "line_item"]
USAGE_DIMENSIONS: tuple[Dimension, ...] = ("project_id", "api_key_id", "model", "batch", "service_tier")
EMBEDDING_DIMENSIONS: tuple[Dimension, ...] = ("project_id", "api_key_id", "model")
COST_DIMENSIONS: tuple[Dimension, ...] = ("project_id", "api_key_id", "line_item")
USAGE_LIMITS: dict[Width, tuple[int, int]] = {"1m": (60, 1440), "1h": (24, 168), "1d": (7, 31)}
COST_LIMITS: dict[Width, tuple[int, int]] = {"1m": (60, 1440), "1h": (24, 168), "1d": (7, 180)}

MAX_TIME = 2**40
"""A bound far beyond any date, and small enough for every sum of times in BIGINT."""

# `batch` and `service_tier` are two names of one column.
USAGE_SUMS = ("num_requests", *TOKEN_CLASSES)
SPLIT_SUMS = (*TOKEN_CLASSES, *(f"charge_{name}" for name in TOKEN_CLASSES))
COLUMNS: dict[Dimension, tuple[str, ...]] = {
    "project_id": ("tenant_id",),
    "api_key_id": ("key_id",),
    "model": ("model",),
    "batch": ("tier",),
    "service_tier": ("tier",),
    "line_item": ("model", "tier"),
}


class ReportQuery(msgspec.Struct, frozen=True, kw_only=True):
    """One report that was asked for. A filter of None lets everything through."""

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
    """Usage of all models, or of embeddings: settled requests, each in the bucket of its start."""
    page = _plan(query, now, USAGE_LIMITS, EMBEDDING_DIMENSIONS if query.of_embeddings else USAGE_DIMENSIONS)
    columns = tuple(dict.fromkeys(column for name in query.group_by for column in COLUMNS[name]))
    found: dict[int, list[UsageResult | CostResult]] = {}
    read = _usage_reader(query, columns)
    for row in await _sums(conn, query, page, columns, USAGE_SUMS):
        found.setdefault(row[0], []).append(read(row))
    return _report(query, page, found, now)


async def costs(conn: AsyncConnection, query: ReportQuery, now: int) -> Report:
    """Settled charges and charges for kept KV, split into line items if the query wants it. No key keeps KV, so charges
    for kept KV are under no key. They are charged by the hour, and stand in the first minute of it."""
    page = _plan(query, now, COST_LIMITS, COST_DIMENSIONS)
    columns = tuple(dict.fromkeys(column for name in query.group_by for column in COLUMNS[name]))
    if query.line_items is not None:
        columns = tuple(dict.fromkeys((*columns, "model", "tier")))
    sums = SPLIT_SUMS if _is_split(query) else ("charge",)
    rows = await _sums(conn, query, page, (*columns, "currency"), sums)
    parts = [(row.start, part) for row in rows for part in _cost_parts(query, row._mapping)]
    if query.key_ids is None:
        kept = residency_sums.by_bucket(
            conn, page.start, min(page.end, page.last), SECONDS[query.width], query.tenant_ids
        )
        parts += [(one.start, part) async for one in kept for part in _kept_parts(query, one)]
    return _report(query, page, _added_up(parts), now)


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
    if not 0 <= query.start_time < end <= MAX_TIME:
        raise InvalidError("start_time must lie before end_time, both Unix seconds.", "start_time")
    last = first + limit * seconds
    # Minutes are the finest sums: the range begins with the minute of its start.
    start = query.start_time - query.start_time % SECONDS["1m"]
    return _Page(max(start, first), end, first, min(last, end + -end % seconds), last < end)


def _report(query: ReportQuery, page: _Page, found: dict[int, list[UsageResult | CostResult]], now: int) -> Report:
    seconds = SECONDS[query.width]
    buckets = [Bucket(start, start + seconds, found.get(start, ())) for start in range(page.first, page.last, seconds)]
    following = report_pages.write(_fingerprint(query), page.end, page.last) if page.more else None
    return Report(buckets, following, now)


def _fingerprint(query: ReportQuery) -> bytes:
    return msgspec.json.encode(msgspec.structs.replace(query, page=None))


async def _sums(
    conn: AsyncConnection, query: ReportQuery, page: _Page, columns: Sequence[str], sums: Sequence[str]
) -> list[Row[Any]]:
    """Return one row per bucket and group, in a stable order."""
    rows: list[Row[Any]] = []
    for width, start, end in _segments(query.width, page):
        rows += (await conn.execute(_segment_sums(query, columns, sums, width, start, end))).all()
    return rows


def _segments(width: Width, page: _Page) -> Iterator[tuple[Width, int, int]]:
    """Yield whole buckets from the width's own table and cut ones from minutes. No two segments share a bucket."""
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
    if query.of_embeddings:
        statement = statement.where(table.model.in_(embedding_models.models()))
    if query.batch is not None:
        statement = statement.where(table.tier == ("batch" if query.batch else "interactive"))
    return statement.group_by(*groups).order_by(*groups)


def _usage_reader(query: ReportQuery, columns: Sequence[str]) -> Callable[[Sequence[Any]], UsageResult]:
    """Return a reader that finds columns by index: a page may have ten thousand results."""
    asked = query.group_by

    def place(dimension: Dimension, column: str) -> int | None:
        return 1 + columns.index(column) if dimension in asked else None

    tenant, key = place("project_id", "tenant_id"), place("api_key_id", "key_id")
    model, batch = place("model", "model"), place("batch", "tier")
    tier, first = place("service_tier", "tier"), 1 + len(columns)

    def read(row: Sequence[Any]) -> UsageResult:
        return UsageResult(
            None if tenant is None else row[tenant],
            None if key is None else row[key],
            None if model is None else row[model],
            None if batch is None else row[batch] == "batch",
            None if tier is None else row[tier],
            Usage(*row[first + 1 : first + 5]),
            row[first],
        )

    return read


def _added_up(parts: Iterable[tuple[int, CostResult]]) -> dict[int, list[UsageResult | CostResult]]:
    found: dict[int, dict[tuple[Any, ...], CostResult]] = {}
    for start, part in parts:
        bucket = found.setdefault(start, {})
        key = (part.tenant_id, part.key_id, part.line_item, part.currency)
        bucket[key] = part if key not in bucket else _added(bucket[key], part)
    return {start: list(bucket.values()) for start, bucket in found.items()}


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
    item = line_item(one.model, one.token_class, "interactive")
    if _is_asked(query, item):
        tenant_id = one.tenant_id if "project_id" in query.group_by else None
        whole = CostResult(tenant_id, None, item, one.currency, one.kept.amount, one.kept.byte_hours, "byte_hours")
        yield _named(query, whole)


def _is_split(query: ReportQuery) -> bool:
    return "line_item" in query.group_by or query.line_items is not None


def _is_asked(query: ReportQuery, item: str) -> bool:
    return query.line_items is None or item in query.line_items


def _named(query: ReportQuery, part: CostResult) -> CostResult:
    """Return the part as a result. If the query filters by line items and does not group by them, amounts of all kinds
    add up."""
    if "line_item" in query.group_by:
        return part
    return msgspec.structs.replace(part, line_item=None, quantity=None, unit=None)


def _added(one: CostResult, other: CostResult) -> CostResult:
    quantity = None if one.quantity is None else one.quantity + (other.quantity or 0)
    return msgspec.structs.replace(one, amount=one.amount + other.amount, quantity=quantity)
