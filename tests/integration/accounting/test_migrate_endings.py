"""From a database of the revision before the order of endings, with batches in it: the results of each come in the order of
the input, and only lines of batches that run are written."""

from __future__ import annotations

from sqlalchemy import create_engine, text

from accounting.batches import batch_lines, batches
from accounting.batches.batch_lines import LineEnd
from accounting.database import migrate
from accounting.database.db import Database
from accounting.requests import batch_results

BEFORE = "0028"
KEY = (
    "INSERT INTO api_key (id, public_id, kind, tenant_id, hash, scopes, created_at)"
    " VALUES ('k', 'k', 'live', 'proj_a', '', '[]', 1)"
)
FILE = (
    "INSERT INTO file (id, tenant_id, purpose, name, num_bytes, sha256, created_at)"
    " VALUES ('f', 'proj_a', 'batch', 'in', 1, '0', 1)"
)
BATCH = (
    "INSERT INTO batch (id, tenant_id, key_id, endpoint, completion_window, input_file_id, state, created_at, expires_at,"
    " num_total, num_completed, num_failed) VALUES ('{id}', 'proj_a', 'k', '/v1/embeddings', '24h', 'f', '{state}', 1, 2,"
    " 5, {ended}, 0)"
)
LINE = "INSERT INTO batch_line (batch_id, line_no, state) VALUES ('{id}', {line_no}, '{state}')"


def seed(database_url: str) -> None:
    migrate.upgrade(database_url, BEFORE)
    engine = create_engine(database_url.replace("+aiosqlite", ""))
    with engine.begin() as conn:
        conn.execute(text("INSERT INTO tenant (id, name, created_at) VALUES ('proj_a', 'a', 1)"))
        conn.execute(text(KEY))
        conn.execute(text(FILE))
        for name, state, started in (("batch_a", "in_progress", (1, 4)), ("batch_b", "completed", ())):
            conn.execute(text(BATCH.format(id=name, state=state, ended=5 - len(started))))
            for line_no in (5, 2, 4, 1, 3):
                line_state = "started" if line_no in started else "succeeded"
                conn.execute(text(LINE.format(id=name, line_no=line_no, state=line_state)))
    engine.dispose()


async def test_results_of_batches_from_before_come_in_input_order_and_only_running_ones_are_numbered(database_url):
    """Every line that had ever ended was written anew, while all gateways waited for the table."""
    seed(database_url)
    migrate.upgrade(database_url)
    db = Database(database_url)
    async with db.write() as conn:
        numbered = "SELECT batch_id, line_no, ended_no FROM batch_line WHERE ended_no IS NOT NULL ORDER BY ended_no"
        found = [tuple(row) for row in await conn.exec_driver_sql(numbered)]
        assert found == [("batch_a", 2, 1), ("batch_a", 3, 2), ("batch_a", 5, 3)]
        await batch_lines.end_lines(conn, "batch_a", [LineEnd(line_no=1, custom_id=None, state="succeeded")])
        assert [row.line_no for row in await batch_results.ended_page(conn, "batch_a", 0)] == [2, 3, 5, 1]
        ended = await batches.get(conn, "proj_a", "batch_b")
        assert [one.line_no for one in await batch_results.filed_lines(conn, ended, 0)] == [1, 2, 3, 4, 5]
        after_no = await batch_results.ended_no(conn, ended, batch_results.line_id("batch_b", 3))
        assert after_no is not None
        assert [one.line_no for one in await batch_results.filed_lines(conn, ended, after_no)] == [4, 5]
    await db.close()
