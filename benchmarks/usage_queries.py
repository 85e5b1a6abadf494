"""How long usage and cost queries take over a big ledger: rows by SQL, their sums by the rows, queries as the API asks.

Rows have the shape of real ones: 20 tenants with 2 keys each, 3 models, both tiers, 30 days. Minutes are summed from
the rows, hours from minutes, days from hours, months from days. Reported: median and slowest of
the repeats, warm; and the processor time of this process, which a busy machine inflates least (of SQLite it is all).
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import os
import platform
import statistics
import tempfile
import time
import uuid
from pathlib import Path
from typing import Any

from sqlalchemy import create_engine, text
from sqlalchemy.ext.asyncio import AsyncConnection

from accounting.billing import reports
from accounting.billing.reports import ReportQuery
from accounting.database import migrate
from accounting.database.db import Database
from accounting.ledger import rollups
from accounting.values.periods import bounds

PERIOD = "2025-09"
START, END = bounds(PERIOD)
CHUNK = 500_000
TARGET_MS = 200

ENTRY = """
INSERT INTO ledger_entry SELECT
  'req_' || n, 'settle', 0, 'proj_' || (n * 7 % 20), 'key_' || (n * 7 % 20) || '_' || (n % 2), 'model-' || (n * 11 % 3), 'root',
  CASE WHEN n % 10 = 0 THEN 'batch' ELSE 'interactive' END, 'standard@1', 'USD', 'ok', 'internal',
  {start} + n * {span} / {rows}, {start} + n * {span} / {rows} + 900, {start} + n * {span} / {rows} + 1000,
  n % 500, n % 300, n % 200, n % 400, 0, 0,
  n % 500 + n % 300 + n % 200 + n % 400, n % 500, n % 300, n % 200, n % 400, 10000, '', NULL, NULL
FROM {series}
"""
SERIES = {
    "sqlite": "(WITH RECURSIVE s(n) AS (SELECT {a} UNION ALL SELECT n + 1 FROM s WHERE n + 1 < {b}) SELECT n FROM s) AS s",
    "postgresql": "generate_series(CAST({a} AS bigint), {b} - 1) AS s(n)",
}
MONTH = {
    "sqlite": "CAST(strftime('%s', bucket, 'unixepoch', 'start of month') AS INTEGER)",
    "postgresql": "CAST(extract(epoch FROM date_trunc('month', to_timestamp(bucket) AT TIME ZONE 'UTC')) AS bigint)",
}
KEYS, SUMS = ", ".join(rollups.KEYS), ", ".join(f"SUM({name})" for name in rollups.SUMS)
TABLES = [("rollup_hour", "rollup_minute", 3600), ("rollup_day", "rollup_hour", 86_400)]

QUERIES: dict[str, tuple[str, dict[str, Any]]] = {
    "usage, 31 days": ("usage", {"width": "1d", "limit": 31}),
    "usage, 31 days by every dimension": ("usage", {"width": "1d", "limit": 31, "group_by": reports.USAGE_DIMENSIONS}),
    "usage, 168 hours": ("usage", {"width": "1h", "limit": 168}),
    "usage, 168 hours by tenant and model": (
        "usage",
        {"width": "1h", "limit": 168, "group_by": ("project_id", "model")},
    ),
    "usage, 60 minutes": ("usage", {"width": "1m", "limit": 60}),
    "usage, 1440 minutes": ("usage", {"width": "1m", "limit": 1440}),
    "usage, 31 days of one tenant": ("usage", {"width": "1d", "limit": 31, "tenant_ids": ("proj_3",)}),
    "usage, 31 days, first one cut": ("usage", {"width": "1d", "limit": 31, "start_time": START + 45_000}),
    "costs, 30 days": ("costs", {"limit": 30}),
    "costs, 30 days by tenant and line item": ("costs", {"limit": 30, "group_by": ("project_id", "line_item")}),
}


def fill(url: str, num_rows: int, start_s: int = START, end_s: int = END) -> dict[str, int]:
    """Rows of a time and their sums. Returns the number of rows of each table."""
    engine = create_engine(url)
    dialect = engine.dialect.name
    span = (end_s - start_s) * 1000
    for start in range(0, num_rows, CHUNK):
        series = SERIES[dialect].format(a=start, b=min(start + CHUNK, num_rows))
        _run(engine, ENTRY.format(start=start_s * 1000, span=span, rows=num_rows, series=series))
    counts = {"ledger_entry": num_rows}
    minute = "opened_at_ms / 60000 * 60"
    _run(
        engine,
        f"INSERT INTO rollup_minute (bucket, {KEYS}, num_requests, {', '.join(rollups.SUMS)}) "
        f"SELECT {minute}, {KEYS}, COUNT(*), {SUMS} FROM ledger_entry GROUP BY {minute}, {KEYS}",
    )
    wider = [(t, source, f"bucket / {width} * {width}") for t, source, width in TABLES]
    for table, source, bucket in [*wider, ("rollup_month", "rollup_day", MONTH[dialect])]:
        _run(
            engine,
            f"INSERT INTO {table} (bucket, {KEYS}, num_requests, {', '.join(rollups.SUMS)}) "
            f"SELECT {bucket}, {KEYS}, SUM(num_requests), {SUMS} FROM {source} GROUP BY {bucket}, {KEYS}",
        )
    with engine.connect() as conn:
        for table in ("rollup_minute", "rollup_hour", "rollup_day", "rollup_month"):
            counts[table] = conn.scalar(text(f"SELECT COUNT(*) FROM {table}")) or 0
    _run(engine, "ANALYZE")
    engine.dispose()
    return counts


def _run(engine: Any, statement: str) -> None:
    with engine.begin() as conn:
        conn.execute(text(statement))


async def measure(url: str, repeats: int) -> dict[str, dict[str, float]]:
    database = Database(url)
    try:
        async with database.read() as conn:
            return {name: await _timed(conn, *query, repeats) for name, query in QUERIES.items()}
    finally:
        await database.close()


async def _timed(conn: AsyncConnection, report: str, options: dict[str, Any], repeats: int) -> dict[str, float]:
    ask = reports.usage if report == "usage" else reports.costs
    query = ReportQuery(**{"start_time": START, "end_time": END, **options})
    times, cpu = [], []
    for _ in range(repeats + 1):
        begun, worked = time.perf_counter(), time.process_time()
        found = await ask(conn, query, END)
        times.append((time.perf_counter() - begun) * 1000)
        cpu.append((time.process_time() - worked) * 1000)
    assert any(bucket.results for bucket in found.buckets)
    return {
        "num_results": sum(len(bucket.results) for bucket in found.buckets),
        "median_cpu_ms": round(statistics.median(cpu[1:]), 1),
        "median_ms": round(statistics.median(times[1:]), 1),
        "slowest_ms": round(max(times[1:]), 1),
    }


def run(dialect: str, num_rows: int, repeats: int, folder: Path) -> dict[str, Any]:
    name = f"hg_bench_{uuid.uuid4().hex[:8]}"
    base = os.environ.get("HEADGATE_BENCH_POSTGRESQL", "postgresql+psycopg://postgres@127.0.0.1:5432/postgres")
    server = None
    if dialect == "sqlite":
        url = f"sqlite+aiosqlite:///{folder / name}.db"
    else:
        url = f"{base.rpartition('/')[0]}/{name}"
        server = create_engine(base, isolation_level="AUTOCOMMIT")
        _run(server, f"CREATE DATABASE {name}")
    try:
        migrate.upgrade(url)
        begun = time.monotonic()
        counts = fill(url.replace("+aiosqlite", ""), num_rows)
        filled_s = time.monotonic() - begun
        queries = asyncio.run(measure(url, repeats))
    finally:
        if server is not None:
            _run(server, f"DROP DATABASE {name} WITH (FORCE)")
            server.dispose()
    slowest = max(figures["median_ms"] for figures in queries.values())
    return {
        "database": dialect,
        "rows": counts,
        "filled_s": round(filled_s, 1),
        "queries": queries,
        "slowest_median_ms": slowest,
        "target_ms": TARGET_MS,
        "within_target": slowest < TARGET_MS,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--databases", nargs="+", default=["sqlite", "postgresql"])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="for the SQLite file [default: a temporary one]")
    parser.add_argument("--out", type=Path, help="JSON")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        runs = [run(d, options.rows, options.repeats, Path(folder)) for d in options.databases]
    result = {
        "machine": {
            "cores": os.cpu_count(),
            "load": round(os.getloadavg()[0], 1),
            "python": platform.python_version(),
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        },
        "runs": runs,
    }
    written = json.dumps(result, indent=1)
    if options.out is not None:
        options.out.write_text(written + "\n")
    print(written)


if __name__ == "__main__":
    main()
