"""The request log's writer: rows of ended requests wait in memory and go to SQL in batches, every second and a half.

No request waits for it, and it is never in the ledger's transaction. While SQL is away rows wait; beyond a bound they
are dropped and counted. A tenant may have no more rows waiting than there is room left, so that one tenant's flood
costs others none of theirs.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter as Counts
from collections import deque
from collections.abc import Mapping
from functools import lru_cache
from itertools import islice
from operator import itemgetter

import prometheus_client
from prometheus_client import CollectorRegistry
from sqlalchemy import exc

from accounting.database.db import Database, first_line, is_rows_fault
from accounting.requests import label_usage, request_log
from accounting.requests.request_log import LoggedRequest
from accounting.values import timelines
from accounting.values.timelines import Entry, entry
from gateway.base.lifecycle import uninterrupted
from gateway.telemetry.record import RequestRecord
from workers.process.logs import clean

logger = logging.getLogger(__name__)

EVERY_S = 1.5
"""A transaction costs as much as fifty rows of it, so rows are not written as they come."""
BATCH_ROWS = 500
"""The rows of one transaction. On SQLite the ledger's writer waits for it, about 10 ms, so it is short."""
MADE_TOGETHER = 50
"""The rows that are made at one time. The loop waits for it, about 1 ms."""
MAX_WAITING_ROWS = 20_000
CLOSE_S = 3.0
MAX_CHARS = 256
MAX_METADATA_CHARS = 2048

_AT = itemgetter(1)
"""The time of a packed event."""


class RequestLogWriter:
    """The writer of one process. `observe` is called on the loop, once for each ended request."""

    def __init__(self, database: Database, registry: CollectorRegistry, *, max_waiting: int = MAX_WAITING_ROWS) -> None:
        self._database = database
        self._max_waiting = max_waiting
        self._ended: list[RequestRecord] = []
        """Records that have no row yet."""
        self._waiting: deque[LoggedRequest] = deque()
        self._by_tenant: Counts[str] = Counts()
        self._is_away = False
        dropped = prometheus_client.Counter(
            "headgate_request_log_rows_dropped",
            "Requests without a row in the request log.",
            ("reason",),
            registry=registry,
        )
        self._dropped = {reason: dropped.labels(reason) for reason in ("full", "refused", "shutdown")}
        self._written = prometheus_client.Counter(
            "headgate_request_log_rows", "Rows that were written to the request log.", registry=registry
        )

    def observe(self, record: RequestRecord) -> None:
        """Takes an ended request. Requests without a known key have no row, nor has what a page of the console reads."""
        if record.principal is None or record.is_page_read:
            return
        tenant_id = record.principal.tenant_id
        if self._by_tenant[tenant_id] >= self._max_waiting - len(self._waiting) - len(self._ended):
            self._drop(1, "full")
            return
        self._by_tenant[tenant_id] += 1
        self._ended.append(record)
        if len(self._ended) >= MADE_TOGETHER:
            self._make_rows()

    async def write(self) -> None:
        """Writes what waits, as far as SQL takes it; called every `EVERY_S` seconds. It raises nothing but a
        cancellation.
        """
        self._make_rows()
        while self._waiting:
            batch = list(islice(self._waiting, BATCH_ROWS))
            try:
                await uninterrupted(self._add(batch))
            except (exc.SQLAlchemyError, OSError) as error:
                if isinstance(error, OSError) or not is_rows_fault(error):
                    self._note_away(error)
                    return
                logger.error("request_log_refused", extra={"reason": first_line(error), "num_rows": len(batch)})
                self._drop(len(batch), "refused")
            else:
                self._written.inc(len(batch))
            self._is_away = False
            self._remove(batch)

    async def close(self) -> None:
        """Writes the rest, for at most `CLOSE_S`."""
        try:
            async with asyncio.timeout(CLOSE_S):
                await self.write()
        except TimeoutError:
            pass
        if self._waiting:
            logger.warning("request_log_rows_dropped", extra={"num_rows": len(self._waiting)})
            self._drop(len(self._waiting), "shutdown")
            self._waiting.clear()

    def _make_rows(self) -> None:
        """Makes the rows of ended requests together, which takes half of the time that one after each request takes: the
        code and its data are in the processor's caches then.
        """
        ended, self._ended = self._ended, []
        for record in ended:
            try:
                self._waiting.append(row_of(record))
            except Exception:  # no fault of the log may fail the others
                logger.exception("request_log_refused")
                assert record.principal is not None
                self._by_tenant[record.principal.tenant_id] -= 1
                self._drop(1, "refused")

    async def _add(self, batch: list[LoggedRequest]) -> None:
        async with self._database.write() as conn:
            rows = await request_log.without_erased(conn, batch)
            await label_usage.note(conn, rows)
            await request_log.add(conn, rows)

    def _remove(self, batch: list[LoggedRequest]) -> None:
        for row in batch:
            self._waiting.popleft()
            self._by_tenant[row.tenant_id] -= 1
        self._by_tenant = +self._by_tenant  # without the tenants that have none

    def _drop(self, num_rows: int, reason: str) -> None:
        self._dropped[reason].inc(num_rows)

    def _note_away(self, error: Exception) -> None:
        if not self._is_away:
            reason = first_line(error) if isinstance(error, exc.SQLAlchemyError) else str(error)
            logger.warning("request_log_waits", extra={"reason": reason, "num_rows": len(self._waiting)})
        self._is_away = True


def row_of(record: RequestRecord) -> LoggedRequest:
    """Returns the row of an ended request of a known key. What a client named itself is cut, and control characters in
    it are written out.
    """
    principal = record.principal
    assert principal is not None
    usage, cache, facts = record.usage, record.cache, record.facts
    outcome = record.outcome
    at_us = timelines.first_us([(name, ns // 1000) for name, ns in record.marks])
    return LoggedRequest(
        request_id=record.request_id,
        is_tail=outcome != "ok",
        started_at_ms=record.started_ns // 1_000_000,
        tenant_id=principal.tenant_id,
        key_id=principal.key_id,
        endpoint=f"{record.method} {record.route}",
        model=_named(record.model),
        tier=record.tier,
        batch_id=principal.batch_id,
        end_user=_named(facts.user) if facts else "",
        metadata=_metadata(facts.metadata) if facts else None,
        is_stream=record.stream,
        status=record.status,
        outcome=outcome,
        error_code=record.error_code,
        finish_reason=",".join(dict.fromkeys(filter(None, record.finish_reasons))),
        prompt_tokens=usage.prompt or (facts.prompt_tokens if facts else 0),
        cached_tokens=usage.cache_read,
        cache_write_tokens=usage.cache_write,
        output_tokens=usage.output,
        charge=record.charge_micro_units,
        currency=record.currency,
        ttft_ms=_ttft_ms(record, at_us),
        duration_ms=round(at_us.get("last_byte", 0) / 1000),
        num_retries=record.num_retries,
        worker=record.worker,
        miss_reason=cache.miss_reason,
        diverged_at_token=None if cache.diverged_at_token < 0 else cache.diverged_at_token,
        session_id=_named(facts.session_id) if facts else "",
        trace_id=record.outgoing_traceparent[3:35],
        timeline=timelines.pack(
            _marks(record), [entry(one.name, one.offset_us, one.step, one.num_tokens) for one in record.worker_timeline]
        ),
    )


def _marks(record: RequestRecord) -> list[Entry]:
    """Returns the gateway's events in the order of time."""
    marks = timelines.entries(record.marks)
    if record.leases:
        since = record.started_mono_ns
        marks += [entry("lease", (lease.at_mono_ns - since) // 1000, num_tokens=lease.bound) for lease in record.leases]
    marks.sort(key=_AT)
    return marks


def _ttft_ms(record: RequestRecord, at_us: Mapping[str, int]) -> int | None:
    """Returns the time to the first byte of a stream; for a body, to the last worker's first token. `at_us` has the time
    of each mark."""
    if record.stream:
        first_us = at_us.get("first_byte") if record.usage.output else None
    else:
        first_us = next((one.offset_us for one in record.worker_timeline if one.name == "first_token"), None)
        first_us = None if first_us is None else timelines.placed_us(at_us, first_us)
    return None if first_us is None else round(first_us / 1000)


def _named(text: str) -> str:
    return _cleaned(text[:MAX_CHARS]) if text else ""


@lru_cache(maxsize=1024)
def _cleaned(text: str) -> str:
    """Returns a name without control characters. Most rows name a model, an end user or a session that others named."""
    return str(clean(text))[:MAX_CHARS]


def _metadata(given: Mapping[str, str] | None) -> dict[str, str] | None:
    """Returns the client's metadata as far as there is room."""
    kept: dict[str, str] = {}
    num_chars = 0
    for key, value in (given or {}).items():
        name, shown = _named(key), _named(value)
        num_chars += len(name) + len(shown)
        if num_chars > MAX_METADATA_CHARS:
            break
        kept[name] = shown
    return kept or None
