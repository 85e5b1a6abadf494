"""The bookkeeping of every minute: seal the days that are over, close the month if the operator wants it, charge kept
caches, match providers' bills, watch what is written off of each tenant, and check the books.

The minute's check covers requests that ended since the last one; a day is checked in full when it is sealed, and one
day is sealed in a minute. Rows are read in snapshots, a span at a time, so no writer waits for a check. A failed equation is logged, shown by `headgate_books_ok`, and checked again each minute until it holds. Only rollups are
corrected, because they are only sums.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Gauge

from accounting.billing import invoices, residency
from accounting.books import books, day_hashes
from accounting.books.equations import EquationResult
from accounting.database.db import Database
from accounting.ledger import ledger
from accounting.ledger.write_off_sums import (
    MAX_NAMED,
    REASONS,
    Sums,
    TenantLoss,
    by_reason,
    losses,
    window_start_ms,
    written_off,
)
from accounting.limits import end_users
from accounting.requests import request_postings
from accounting.upstreams import costs
from accounting.values import clock
from accounting.values.errors import AccountingError
from accounting.values.periods import DAY_S, month_start
from gateway.base.lifecycle import ask_sql
from gateway.books.recent_write_offs import HOUR_MS, RecentWriteOffs

logger = logging.getLogger(__name__)

EVERY_S = 60.0
FIRST_AFTER_S = 5.0
"""The wait before the first round: a process that starts has more urgent things to ask of SQL."""
QUIET_MS = 120_000
"""The age from which endings are checked. An ending and its engine record arrive at different times; after this long
both are there.
"""
PIECE_MS = 10_000
"""The length of one checked span. A check takes memory for everything that it compares, and a connection keeps the
memory that it once took.
"""
DAY_PIECE_MS = 3_600_000
"""The length of one checked span of a day that was sealed: most of its rows held when they were posted."""
CLOSE_AGAIN_MS = 3_600_000
"""The time after which a month that could not be closed is tried again: each try reads all that it would invoice."""
ACTOR = "system"
CLOSE = "close"
"""It stands in place of an equation where a month could not be closed."""

Span = tuple[int, int]
"""A span of requests: those whose ending was posted in [since, until), in ms."""
Failure = tuple[str, str]
"""The id of an equation, or `CLOSE`, and the name of the row, bucket, day or month that breaks it."""


class Refused(NamedTuple):
    """A month that could not be closed."""

    period: str
    tried_ms: int
    reason: str


class Bookkeeping:
    def __init__(
        self,
        database: Database,
        registry: CollectorRegistry,
        closes: bool,
        limiter_truth: Callable[[], Awaitable[EquationResult]] | None = None,
    ) -> None:
        """`limiter_truth` checks I13. It is None where there is no limiter."""
        self._database = database
        self._closes = closes
        self._limiter_truth = limiter_truth
        self._checked_until_ms = clock.now_ms() - QUIET_MS
        self._recent = RecentWriteOffs()
        self._recalls = True
        """Whether the recent write-offs still lack those from before this process began."""
        self._losing: frozenset[str] = frozenset()
        """The tenants that the log has named, because too much is written off of them."""
        self._suspect: set[Span] = set()
        """The spans that are checked until they hold."""
        self._refused: dict[str, Refused] = {}
        """The month of each tenant that could not be closed."""
        self._equations: set[str] = set()
        self.watched: dict[str, Any] | None = None
        """The last round: when it ended (`as_of`, Unix seconds), the equations that failed, and the tenants of whom too
        much was written off. None before the first.
        """
        self._ok = Gauge(
            "headgate_books_ok",
            "Whether the books are correct: 1 while every equation that was checked since the start holds, otherwise 0.",
            registry=registry,
        )
        self._failures = Gauge(
            "headgate_books_failures",
            "Rows, buckets or days that break an equation of the books now.",
            ("equation",),
            registry=registry,
        )
        self._ok.set(1)
        self._written_off = Counter(
            "headgate_writeoff_tokens",
            "Tokens of all gateways that the engine computed and nobody paid for.",
            ("reason",),
            registry=registry,
        )
        for reason in REASONS:
            self._written_off.labels(reason)
        self._num_losing = Gauge(
            "headgate_writeoff_tenants",
            "Tenants of whose tokens more than 1 % were written off in this hour and the one before.",
            registry=registry,
        )

    async def run(self) -> None:
        """Runs until it is cancelled. After a failure the next minute checks this one's requests too."""
        await asyncio.sleep(FIRST_AFTER_S)
        await ask_sql(EVERY_S, lambda: self.once(clock.now_ms()))

    async def once(self, now_ms: int) -> None:
        until_ms = max(now_ms - QUIET_MS, self._checked_until_ms)  # a clock that steps back brings no span twice
        async with self._database.read() as conn:
            is_any = await books.any_ended(conn, self._checked_until_ms, until_ms)
        if self._recalls:
            await self._recall_write_offs()
        await self._count_write_offs(self._checked_until_ms, until_ms)
        if is_any:  # a span without an ending has nothing to check, and a gateway at rest has only such
            self._suspect.update(_pieces(self._checked_until_ms, until_ms))
        self._checked_until_ms = until_ms
        lost = await self._judge_write_offs()
        failures = await self._seal(now_ms)
        if self._closes:
            failures += await self._close(now_ms)
        async with self._database.write() as conn:
            await end_users.forget(conn, now_ms)
            await residency.charge_due(conn, now_ms)
        await self._judge_bills()
        for span in sorted(self._suspect):
            found = await self._check(*span)
            failures += found
            if not found:
                self._suspect.remove(span)
        if self._limiter_truth is not None:
            failures += _failures(await self._limiter_truth())
        self._show(failures, lost)

    async def _judge_bills(self) -> None:
        """Judges rows of providers' bills that came before their calls. Nobody's write waits for the search."""
        async with self._database.read() as conn:
            is_any = await costs.unjudged(conn)
        if is_any:
            async with self._database.write() as conn:
                await costs.judge_again(conn)

    async def _count_write_offs(self, since_ms: int, until_ms: int) -> None:
        for found in await self._read_write_offs(since_ms, until_ms):
            for reason, number in by_reason(found).items():
                self._written_off.labels(reason).inc(number)

    async def _recall_write_offs(self) -> None:
        """Reads what was written off before this process began: it is judged, and not counted."""
        _ = await self._read_write_offs(window_start_ms(self._checked_until_ms), self._checked_until_ms)
        self._recalls = False

    async def _read_write_offs(self, since_ms: int, until_ms: int) -> list[Sums]:
        """Returns what was written off in a span, hour by hour, and keeps it for the judgement."""
        hours = [since_ms, *range(since_ms - since_ms % HOUR_MS + HOUR_MS, until_ms, HOUR_MS), until_ms]
        async with self._database.read() as conn:
            found = {start_ms: await written_off(conn, start_ms, end_ms) for start_ms, end_ms in pairwise(hours)}
        for start_ms, sums in found.items():
            self._recent.add(start_ms, sums)
        return list(found.values())

    async def _judge_write_offs(self) -> list[TenantLoss]:
        """Returns the tenants of whom too much was written off lately, and names new ones in the log."""
        start_ms = window_start_ms(self._checked_until_ms)
        async with self._database.read() as conn:
            lost = await losses(conn, self._recent.since(start_ms), start_ms)
        self._num_losing.set(len(lost))
        for loss in lost[:MAX_NAMED]:
            if loss.tenant_id not in self._losing:
                logger.warning("tenant_written_off", extra={"tenant": loss.tenant_id, **_facts(loss)})
        self._losing = frozenset(loss.tenant_id for loss in lost)
        return lost

    async def _seal(self, now_ms: int) -> list[Failure]:
        """Seals one day, if one is over. Its rows are read in a snapshot, so postings do not wait for them."""
        async with self._database.read() as conn:
            found = await day_hashes.draft(conn, now_ms)
        if found is None:
            return []
        async with self._database.write() as conn:
            sealed = await day_hashes.seal(conn, found, await ledger.take_turn(conn, now_ms))
        if sealed is None:
            return []
        logger.info("day_sealed", extra={"day": sealed.day})
        self._suspect.update(_pieces(sealed.day * 1000, (sealed.day + DAY_S) * 1000, DAY_PIECE_MS))
        return [("I8", bucket) for bucket in sealed.wrong_rollups]

    async def _close(self, now_ms: int) -> list[Failure]:
        refused: dict[str, Refused] = {}
        async with self._database.read() as conn:
            due = await invoices.due(conn, month_start(now_ms // 1000 - invoices.LATENESS_S))
        for period, tenant_id in due:
            if tenant_id in refused:  # a tenant's months close in their order
                continue
            known = self._refused.get(tenant_id)
            if known is not None and known.period == period and now_ms < known.tried_ms + CLOSE_AGAIN_MS:
                refused[tenant_id] = known
                continue
            try:
                made = await invoices.close(self._database, tenant_id, period, now_ms=now_ms, actor=ACTOR)
                logger.info("invoice_closed", extra={"number": made.number})
            except AccountingError as error:
                refused[tenant_id] = Refused(period, now_ms, str(error))
        self._refused = refused
        return [(CLOSE, f"{tenant_id} {month.period}: {month.reason}") for tenant_id, month in refused.items()]

    async def _check(self, since_ms: int, until_ms: int) -> list[Failure]:
        async with self._database.read() as conn:
            late_ms = max(since_ms, clock.now_ms() - request_postings.LOST_RECORD_MS)
            late = await request_postings.half_witnessed(conn, late_ms, until_ms)
            report = await books.verify_ended(conn, since_ms, until_ms, late)
        return [failure for equation in report.equations for failure in _failures(equation)]

    def _show(self, failures: list[Failure], lost: Sequence[TenantLoss]) -> None:
        """Shows the failures, and also that an equation which failed before holds now."""
        self._ok.set(all(equation == CLOSE for equation, _ in failures))
        self.watched = {
            "as_of": clock.now_ms() // 1000,
            "failed": sorted({equation for equation, _ in failures}),
            "written_off": [{"project_id": loss.tenant_id, **_facts(loss)} for loss in lost[:MAX_NAMED]],
        }
        self._equations |= {equation for equation, _ in failures}
        for equation in sorted(self._equations):
            names = [name for other, name in failures if other == equation]
            self._failures.labels(equation).set(len(names))
            if names:
                logger.error("books_differ", extra={"equation": equation, "failures": names[:20]})


def _facts(loss: TenantLoss) -> dict[str, Any]:
    return {"num_tokens": loss.num_tokens, "share": round(loss.share, 4), "reason": loss.reason}


def _pieces(since_ms: int, until_ms: int, length_ms: int = PIECE_MS) -> list[Span]:
    starts = range(since_ms, until_ms, length_ms)
    return [(start, min(start + length_ms, until_ms)) for start in starts]


def _failures(equation: EquationResult) -> list[Failure]:
    return [(equation.id, name) for name in equation.failures]


BOOKKEEPING = web.AppKey("bookkeeping", Bookkeeping)
