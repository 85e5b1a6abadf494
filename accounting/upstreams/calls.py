"""The purchases: the rows of attempts, which are written with the endings of their requests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncConnection

from accounting.database.db import insert_new
from accounting.tables.models import EngineRecordRow
from accounting.tables.upstream_models import UpstreamCall
from accounting.values.types import TOKEN_CLASSES, BoughtAttempt, Posting, Usage

WORKER = "upstream:"


async def post(conn: AsyncConnection, endings: Sequence[Posting], now_ms: int) -> None:
    """Writes the attempts of these endings, and with them the token counts that equation I1 compares with the bill.
    Whoever posts an ending twice writes nothing new."""
    bought = [(ending, attempt) for ending in endings for attempt in ending.bought]
    if not bought:
        return
    rows = [_row(ending, attempt) for ending, attempt in bought]
    await insert_new(conn, UpstreamCall.__table__, rows, (UpstreamCall.request_id,))
    counted = [_record(ending, attempt, now_ms) for ending, attempt in bought]
    await insert_new(conn, EngineRecordRow.__table__, counted, (EngineRecordRow.request_id,))


class CallSums(msgspec.Struct, frozen=True):
    """The purchases of one upstream since a time."""

    upstream: str
    state: str
    drift: str
    num_calls: int
    stated_tokens: int
    judged_tokens: int
    expected_cost: int
    stated_cost: int
    """The cost as the providers' answers state it; for those that state none, the expected one."""


async def sums(conn: AsyncConnection, since_ms: int) -> list[CallSums]:
    call = UpstreamCall
    keys = (call.upstream, call.state, call.drift)
    stated, judged = _total("stated"), _total("judged")
    query = select(*keys, func.count(), func.sum(stated), func.sum(judged), func.sum(call.expected_cost))
    query = query.add_columns(func.sum(func.coalesce(call.stated_cost, call.expected_cost)))
    found = await conn.execute(query.where(call.started_at_ms >= since_ms).group_by(*keys).order_by(*keys))
    return [CallSums(*row[:3], *map(int, row[3:])) for row in found]


def _total(kind: str) -> Any:
    first, *others = (getattr(UpstreamCall, f"{kind}_{name}") for name in TOKEN_CLASSES)
    return sum(others, first)


def _row(ending: Posting, attempt: BoughtAttempt) -> dict[str, Any]:
    stated = attempt.stated or Usage()
    return {
        "request_id": ending.request_id,
        "tenant_id": ending.tenant_id,
        **{name: getattr(attempt, name) for name in _PLAIN},
        "has_statement": attempt.stated is not None,
        **dict(_counts("stated", stated)),
        **dict(_counts("judged", attempt.judged)),
    }


def _record(ending: Posting, attempt: BoughtAttempt, now_ms: int) -> dict[str, Any]:
    counted = attempt.counted
    return {
        "request_id": ending.request_id,
        "attempt": attempt.attempt,
        "worker": WORKER + attempt.upstream,
        "seq": 0,
        "tenant_id": ending.tenant_id,
        "root": ending.root,
        "posted_at_ms": now_ms,
        **{name: getattr(counted, name) for name in TOKEN_CLASSES},
        "speculated": 0,
        "recomputed": 0,
        "reason": attempt.state,
    }


def _counts(kind: str, usage: Usage) -> Iterator[tuple[str, int]]:
    return ((f"{kind}_{name}", getattr(usage, name)) for name in TOKEN_CLASSES)


_PLAIN = (
    *("attempt", "upstream", "model", "state", "started_at_ms", "provider_id", "drift"),
    *("expected_cost", "stated_cost"),
)
