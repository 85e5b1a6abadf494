"""How fast the request log is written, read and pruned when it is full: batches of 200 rows, pages of 20, a piece of rows.

Rows have the shape of real ones: 20 tenants of uneven size and one with few old rows, 2 keys each, 3 models, one request
of 50 failed, a timeline of 17 events. Reported: median and slowest of the repeats, warm. The queries that find nothing
are the worst of their kind, as they look at as many rows as a page may.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import tempfile
import time
import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from sqlalchemy import create_engine, text

from accounting.database import migrate
from accounting.database.db import Database
from accounting.requests import request_log, request_log_pruning, request_volume, sessions
from accounting.requests.request_log import LoggedRequest, RequestFilter
from accounting.tables.request_models import RequestLog
from accounting.values import timelines
from accounting.values.timelines import entry

START_MS = 1_790_000_000_000
BATCH = 200
NUM_RARE = 100
MARKS = (
    "accepted",
    "authenticated",
    "tokenized",
    "admitted",
    "dispatched",
    "first_byte",
    "finished",
    "settled",
    "last_byte",
)
TIMELINE = timelines.pack(
    [entry(name, number * 7_001) for number, name in enumerate(MARKS)],
    [
        entry("queued", 11),
        entry("matched", 812, 9_001, 512),
        *(entry("chunk", 12_000 * n, 9_001 + n, 2_048) for n in range(1, 5)),
        entry("first_token", 48_001, 9_005),
        entry("finished", 912_345, 9_105),
    ],
)


ROWS = """
INSERT INTO request_log (
  request_id, is_tail, started_at_ms, tenant_id, key_id, endpoint, model, tier, batch_id, end_user, metadata, is_stream,
  status, outcome, error_code, finish_reason, prompt_tokens, cached_tokens, cache_write_tokens, output_tokens, charge,
  currency, ttft_ms, duration_ms, num_retries, worker, miss_reason, diverged_at_token, trace_id, session_id,
  timeline)
SELECT
  'req_' || {id_hex} || '7' || {n_hex}, has_failed, at_ms, tenant, 'key_' || tenant || '_' || (n % 2),
  'POST /v1/chat/completions', 'model-' || (n * 11 % 3), 'interactive', NULL, 'user-' || (n % 1000),
  CASE WHEN n % 2 = 0 THEN NULL ELSE {metadata} END, n % 3 = 0,
  CASE WHEN has_failed THEN 503 ELSE 200 END, CASE WHEN has_failed THEN 'server_error' ELSE 'ok' END,
  CASE WHEN has_failed THEN 'overloaded' ELSE '' END, 'stop', n % 4000, n % 300, 0, n % 700, n % 900,
  'USD', n % 900, n * 31 % 9000, 0, 'worker-0', 'diverged', n % 300, {trace_hex},
  'talk-' || (n / 40 % 5000), '{timeline}'
FROM (
  SELECT n, {start} + n * 100 AS at_ms, n % 50 = 7 AND n >= {rare} AS has_failed,
    CASE WHEN n < {rare} THEN 'rare' ELSE '{tenant}' || (1000 + (n * 7919 % 40) * (n * 7919 % 40) / 80) END AS tenant
  FROM {series}
) AS made
"""
DIALECTS = {
    "sqlite": {
        "series": "(WITH RECURSIVE s(n) AS (SELECT 0 UNION ALL SELECT n + 1 FROM s WHERE n + 1 < {rows}) SELECT n FROM s)",
        "id_hex": "printf('%012x', at_ms)",
        "n_hex": "printf('%019x', n)",
        "trace_hex": "printf('%032x', n * 2654435761 % 4294967296)",
        "metadata": """'{"team": "crops"}'""",
    },
    "postgresql": {
        "series": "generate_series(0::bigint, {rows} - 1) AS s(n)",
        "id_hex": "lpad(to_hex(at_ms), 12, '0')",
        "n_hex": "lpad(to_hex(n), 19, '0')",
        "trace_hex": "lpad(to_hex(n * 2654435761 % 4294967296), 32, '0')",
        "metadata": """'{"team": "crops"}'::jsonb""",
    },
}
TENANT = f"proj_{'0' * 44}"


def fill(url: str, num_rows: int, start_ms: int = START_MS, tenant: str = TENANT) -> None:
    """Makes the rows by SQL, ten a second from `start_ms`; indexes are made afterwards, because that is faster."""
    engine = create_engine(url.replace("+aiosqlite", ""))
    parts = DIALECTS[engine.dialect.name]
    series = parts["series"].format(rows=num_rows)
    values = {**parts, "series": series, "start": start_ms, "rare": NUM_RARE, "tenant": tenant, "timeline": TIMELINE}
    with engine.begin() as conn:
        for index in RequestLog.__table__.indexes:
            index.drop(conn)
        conn.execute(text(ROWS.format(**values).replace(":", "\\:")))
        for index in RequestLog.__table__.indexes:
            index.create(conn)
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as conn:
        conn.execute(text("VACUUM ANALYZE" if engine.dialect.name == "postgresql" else "ANALYZE"))
    engine.dispose()


def row(n: int) -> LoggedRequest:
    """Returns a further row, as a gateway writes it."""
    at_ms = START_MS + n * 100
    return LoggedRequest(
        request_id=f"req_{at_ms:012x}7{n:019x}",
        is_tail=n % 50 == 7,
        started_at_ms=at_ms,
        tenant_id=f"{TENANT}{1000 + n % 20}",
        key_id=f"key_{TENANT}{1000 + n % 20}_0",
        endpoint="POST /v1/chat/completions",
        model=f"model-{n % 3}",
        tier="interactive",
        status=200,
        outcome="ok",
        metadata={"team": "crops"},
        trace_id=f"{n * 2_654_435_761 % 2**32:032x}",
        timeline=TIMELINE,
    )


def queries(num_rows: int) -> dict[str, tuple[RequestFilter, str | None]]:
    middle = request_log.id_at(START_MS + num_rows * 50)
    tenant = f"{TENANT}1000"
    return {
        "newest": (RequestFilter(), None),
        "from the middle": (RequestFilter(), middle),
        "of a tenant": (RequestFilter(tenant_id=tenant), None),
        "of a tenant with few old rows": (RequestFilter(tenant_id="rare"), None),
        "of a key, from the middle": (RequestFilter(key_id=f"key_{tenant}_0"), middle),
        "of a model": (RequestFilter(model="model-1"), None),
        "5xx": (RequestFilter(status_class=5), None),
        "5xx of a tenant": (RequestFilter(tenant_id=tenant, status_class=5), None),
        "4xx, of which there are none": (RequestFilter(status_class=4), None),
        "a span of a minute in the middle": (
            RequestFilter(since_ms=START_MS + num_rows * 50, until_ms=START_MS + num_rows * 50 + 60_000),
            None,
        ),
        "longer than 8.9 s": (RequestFilter(min_duration_ms=8_900), None),
        "longer than an hour, of which there are none": (RequestFilter(min_duration_ms=3_600_000), None),
        "the same of a tenant": (RequestFilter(tenant_id=tenant, min_duration_ms=3_600_000), None),
        "the turns of a conversation": (RequestFilter(tenant_id=tenant, session_id="talk-7"), None),
        "one trace": (RequestFilter(trace_id=row(num_rows // 2).trace_id), None),
    }


async def write(database: Database, num_rows: int, num_batches: int) -> dict[str, float]:
    """Writes batches as a gateway does, into the full log."""
    times = []
    for start in range(num_rows, num_rows + num_batches * BATCH, BATCH):
        rows = [row(n) for n in range(start, start + BATCH)]
        began = time.perf_counter()
        async with database.write() as conn:
            await request_log.add(conn, rows)
        times.append(time.perf_counter() - began)
    return _figures(times)


async def measure(database: Database, num_rows: int, repeats: int) -> dict[str, dict[str, float]]:
    found = {}
    for name, (wanted, after) in queries(num_rows).items():

        async def page(wanted: RequestFilter = wanted, after: str | None = after) -> None:
            async with database.read() as conn:
                await request_log.list_requests(conn, wanted, after=after)

        found[name] = await _timed(page, repeats)

    async def one() -> None:
        async with database.read() as conn:
            await request_log.get(conn, row(num_rows // 3).request_id)

    found["one with its timeline"] = await _timed(one, repeats)
    for name, tenant in (("the volume", None), ("the volume of a tenant", f"{TENANT}1000")):
        span = RequestFilter(tenant_id=tenant, since_ms=START_MS, until_ms=START_MS + num_rows * 100)

        async def volume(span: RequestFilter = span) -> None:
            async with database.read() as conn:
                await request_volume.volume(conn, span, 48)

        found[name] = await _timed(volume, repeats)
    for name, tenant in (("conversations", None), ("conversations of a tenant", f"{TENANT}1000")):

        async def talks(tenant: str | None = tenant) -> None:
            async with database.read() as conn:
                await sessions.list_sessions(conn, RequestFilter(tenant_id=tenant), 100)

        found[name] = await _timed(talks, repeats)
    return found


async def prune(database: Database, num_rows: int) -> dict[str, float]:
    """Counts the full log, then prunes it by a piece."""
    now_ms = START_MS + num_rows * 100
    times = []
    for max_rows in (num_rows, num_rows - 1):
        began = time.perf_counter()
        await request_log_pruning.prune(database, now_ms, max_rows=max_rows, max_days=3650)
        times.append((time.perf_counter() - began) * 1000)
    return {"count_ms": round(times[0], 1), "count_and_prune_ms": round(times[1], 1)}


async def _timed(work: Callable[[], Awaitable[None]], repeats: int) -> dict[str, float]:
    await work()
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        await work()
        times.append(time.perf_counter() - began)
    return _figures(times)


def _figures(times_s: list[float]) -> dict[str, float]:
    return {"median_ms": round(statistics.median(times_s) * 1000, 2), "slowest_ms": round(max(times_s) * 1000, 2)}


async def run(url: str, num_rows: int, repeats: int) -> dict[str, Any]:
    migrate.upgrade(url)
    fill(url, num_rows)
    database = Database(url)
    try:
        pages = await measure(database, num_rows, repeats)
        written = await write(database, num_rows, repeats)
        return {"pages": pages, "batch_of_200": written, "prune": await prune(database, num_rows + repeats * BATCH)}
    finally:
        await database.close()


def postgresql(base: str, num_rows: int, repeats: int) -> dict[str, Any]:
    name = f"hg_bench_{uuid.uuid4().hex[:12]}"
    server = create_engine(base, isolation_level="AUTOCOMMIT")
    with server.connect() as conn:
        conn.execute(text(f'CREATE DATABASE "{name}"'))
    try:
        return asyncio.run(run(base.rsplit("/", 1)[0] + f"/{name}", num_rows, repeats))
    finally:
        with server.connect() as conn:
            conn.execute(text(f'DROP DATABASE "{name}" WITH (FORCE)'))
        server.dispose()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument(
        "--postgresql", help="postgresql+psycopg://user@host/postgres; without it only SQLite is measured"
    )
    options = parser.parse_args()
    result: dict[str, Any] = {"rows": options.rows, "cores": os.cpu_count(), "python": platform.python_version()}
    with tempfile.TemporaryDirectory(prefix="headgate-request-log-") as folder:
        path = Path(folder) / "log.db"
        result["sqlite"] = asyncio.run(run(f"sqlite+aiosqlite:///{path}", options.rows, options.repeats))
        result["sqlite"]["bytes_a_row"] = round(path.stat().st_size / options.rows)
    if options.postgresql:
        result["postgresql"] = postgresql(options.postgresql, options.rows, options.repeats)
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
