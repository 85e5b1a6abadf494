"""From a database of the revision before billing, with rows in it: months are filled, intervals and rows are guarded."""

from __future__ import annotations

import pytest
from conftest import empty_database
from sqlalchemy import create_engine, text
from sqlalchemy.exc import DBAPIError

from accounting.database import migrate

BEFORE, BILLING = "0003", "0005"
DAY = 86_400
SEPTEMBER, OCTOBER = 1_756_684_800, 1_759_276_800
ROLLUP = "INSERT INTO rollup_day VALUES ({day}, '{tenant}', 'k', 'm', 'interactive', 's@1', 'USD', 2, 1, 2, 3, 4, 10, 1, 2, 3, 4)"


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def upgraded(request, tmp_path_factory):
    """(engine, url) of a database that was at the older revision."""
    with empty_database(request.param, tmp_path_factory.mktemp("upgraded")) as url:
        engine = seed(url)
        migrate.upgrade(url)
        yield engine, url
        engine.dispose()


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def with_billing(request, tmp_path_factory):
    """An engine at the revision of billing, for tests that leave its rows as they are."""
    with empty_database(request.param, tmp_path_factory.mktemp("billing")) as url:
        engine = seed(url)
        migrate.upgrade(url, BILLING)
        yield engine
        engine.dispose()


def seed(database_url):
    migrate.upgrade(database_url, BEFORE)
    engine = create_engine(database_url.replace("+aiosqlite", ""))
    with engine.begin() as conn:
        conn.execute(text("INSERT INTO tenant (id, name, created_at) VALUES ('proj_a', 'a', 1)"))
        conn.execute(text("INSERT INTO price_sheet VALUES ('s', 'USD', 1)"))
        conn.execute(text("INSERT INTO price_sheet_version VALUES ('s', 1, 100, 200, 1)"))
        conn.execute(text("INSERT INTO price_assignment VALUES ('proj_a', 100, 200, 's')"))
        for day in (SEPTEMBER, SEPTEMBER + 29 * DAY, OCTOBER):
            conn.execute(text(ROLLUP.format(day=day, tenant="proj_a")))
        conn.execute(text(ROLLUP.format(day=OCTOBER, tenant="proj_b")))
    return engine


def rows(engine, statement):
    with engine.connect() as conn:
        return [tuple(row) for row in conn.execute(text(statement))]


def refused(engine, statement):
    with engine.begin() as conn, pytest.raises(DBAPIError, match=r"append-only|overlap"):
        conn.execute(text(statement))
    return True


def test_months_are_the_sums_of_the_days_there_were(upgraded):
    engine, _ = upgraded
    months = "SELECT bucket, tenant_id, num_requests, charge FROM rollup_month ORDER BY bucket, tenant_id"
    assert rows(engine, months) == [
        (SEPTEMBER, "proj_a", 4, 20),
        (OCTOBER, "proj_a", 2, 10),
        (OCTOBER, "proj_b", 2, 10),
    ]


def test_an_assignment_from_before_is_guarded_and_kept(upgraded):
    engine, url = upgraded
    migrate.check(url)
    assert rows(engine, "SELECT count(*) FROM rollup_day") == [(4,)]
    assert refused(engine, "UPDATE price_assignment SET from_ms = 1")


@pytest.mark.parametrize("interval", ["150, NULL", "50, 101", "199, 300", "50, NULL", "120, 130"])
def test_overlapping_intervals_are_refused_by_the_database_itself(with_billing, interval):
    assert refused(with_billing, f"INSERT INTO price_assignment VALUES ('proj_a', {interval}, 's')")
    assert refused(with_billing, f"INSERT INTO price_sheet_version VALUES ('s', 2, {interval}, 1)")


@pytest.mark.parametrize("interval", ["200, NULL", "50, 100"])
def test_intervals_that_meet_are_not_refused(with_billing, interval):
    with with_billing.connect() as conn:
        conn.execute(text(f"INSERT INTO price_assignment VALUES ('proj_a', {interval}, 's')"))
        conn.execute(text(f"INSERT INTO price_sheet_version VALUES ('s', 2, {interval}, 1)"))
        # Another tenant's intervals are its own.
        conn.execute(text("INSERT INTO price_assignment VALUES ('operator', 150, NULL, 's')"))
        conn.rollback()


TABLES = {
    "invoice": "total = 0",
    "invoice_line": "amount = 0",
    "credit": "amount = 1",
    "credit_use": "amount = 1",
    "day_seal": "num_entries = 0",
    "price_residency": "cache = 0",
    "price_sheet": "currency = 'EUR'",
}
FILLED = (
    "INSERT INTO credit VALUES ('c', 'grant', 'proj_a', 'USD', 5, 'cash', 1, 1, NULL, NULL, '', 1, 'a', 'k', {blob})",
    "INSERT INTO invoice VALUES ('INV-1', 'i', 'INV', 1, 'proj_a', 'a', '2025-09', 1, 'USD', 1, 2, 3, 4, 5, 6, 1, 5, '[]', 'UTC')",
    "INSERT INTO invoice_line VALUES ('INV-1', 1, 'usage', '2025-09', 'm', 'interactive', 'output', 's@1', 1, 1, 1, 6, 'c', '')",
    "INSERT INTO credit_use VALUES ('c', 1, 'grant_use', 1, 'INV-1')",
    "INSERT INTO day_seal VALUES (0, 1, {blob}, 1)",
    "INSERT INTO price_residency VALUES ('s', 1, 'm', 1, 1)",
)


def test_no_row_of_billing_can_be_changed_or_deleted(upgraded):
    engine, _ = upgraded
    blob = "'\\x00'::bytea" if engine.dialect.name == "postgresql" else "x'00'"
    with engine.begin() as conn:
        for statement in FILLED:
            conn.exec_driver_sql(statement.replace("{blob}", blob))
    for table, change in TABLES.items():
        assert refused(engine, f"UPDATE {table} SET {change}")
        assert refused(engine, f"DELETE FROM {table}")
        if engine.dialect.name == "postgresql":
            assert refused(engine, f"TRUNCATE {table} CASCADE")
