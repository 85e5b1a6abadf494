"""Clients cannot make series on the page of a jobs process, whatever they call their batches and lines."""

from __future__ import annotations

from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from sqlalchemy import create_engine, text

from accounting.batches.batch_figures import BATCH_STATES, batch_figures
from accounting.database.db import Database
from accounting.tables.models import Base
from workers.jobs.base.tally import NAMES, Tally
from workers.jobs.batches.batch_metrics import BatchMetrics

NUM_HOSTILE = 100_000

NUMBERS = "WITH RECURSIVE s(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM s WHERE n < :count)"
BATCHES = f"""
INSERT INTO batch (id, tenant_id, key_id, endpoint, model, completion_window, input_file_id, state, created_at, expires_at,
                   num_total, num_completed, metadata, traceparent)
{NUMBERS} SELECT 'batch_' || n, 'tenant_' || n, 'key_' || n, '/v1/' || n || '"}}', 'model' || n || char(10), '24h', 'file',
  CASE n % 3 WHEN 0 THEN 'in_progress' WHEN 1 THEN 'completed' ELSE 'failed' END, 1, 2, 10, 10,
  '{{"team": "' || n || '"}}', 'trace-' || n FROM s
"""
CHUNKS = f"""
INSERT INTO batch_chunk (batch_id, seq, tenant_id, state, predicted_tokens, num_lines, lines)
{NUMBERS} SELECT 'batch_' || (3 * n), 0, 'tenant_' || (3 * n), CASE n % 2 WHEN 0 THEN 'queued' ELSE 'claimed' END, 1, 10, x''
FROM s
"""
LINES = f"""
INSERT INTO batch_line (batch_id, line_no, custom_id, state, crashes)
{NUMBERS} SELECT 'batch_' || (n % 1000), n, 'line "' || n || char(10), 'started', 2 FROM s
"""


@pytest.fixture
def full_of_names(tmp_path: Path) -> str:
    """A database in which every client's name is another one."""
    path = tmp_path / "names.db"
    engine = create_engine(f"sqlite:///{path}")
    Base.metadata.create_all(engine)
    with engine.begin() as conn:
        for statement, count in ((BATCHES, 3000), (CHUNKS, 1000), (LINES, NUM_HOSTILE)):
            conn.execute(text(statement.replace(": ", "\\: ")), {"count": count})
    engine.dispose()
    return f"sqlite+aiosqlite:///{path}"


def series(registry: CollectorRegistry) -> set[str]:
    return {line.rpartition(" ")[0] for line in generate_latest(registry).decode().splitlines() if line[:1] != "#"}


async def test_attack_F07_hostile_batches_and_lines_make_no_series(full_of_names: str, tmp_path: Path) -> None:
    metrics, registry = BatchMetrics(Tally(tmp_path / "counts"), tmp_path / "pulse"), CollectorRegistry()
    registry.register(metrics)
    before = series(registry)
    database = Database(full_of_names)
    try:
        async with database.read() as conn:
            metrics.figures = await batch_figures(conn, 10_000)
    finally:
        await database.close()
    for name in NAMES:
        Tally(tmp_path / "counts").add(name)
    assert metrics.figures.batches["in_progress"] == metrics.figures.batches["completed"] == 1000
    assert metrics.figures.lines["queued"] == metrics.figures.lines["claimed"] == 5000
    shown = series(registry)
    assert len(shown - before) <= 4, "the states of lines, which are there from the first look at SQL on"
    assert {state for state in BATCH_STATES if f'headgate_batches{{state="{state}"}}' in shown} == set(BATCH_STATES)
    assert len(shown) < 30
