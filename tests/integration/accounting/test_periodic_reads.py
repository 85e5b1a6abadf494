"""What is read again and again takes no longer as history grows: each statement finds its rows by an index.

SQLite plans without statistics, as in service, where nothing gathers them. PostgreSQL gathers its own.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
from money import RATES, posting
from sqlalchemy import event

from accounting.access import api_keys
from accounting.batches import batches, claims, files
from accounting.billing import drafts, invoices
from accounting.database.db import Database, insert_all
from accounting.events import deliveries
from accounting.limits import limiter_state, spend_alerts, spend_limits
from accounting.limits.spend_alerts import AlertFields
from accounting.prices import prices
from accounting.requests import idempotency_store, request_postings, sdk_retries
from accounting.requests.sdk_retries import DisconnectedEarly
from accounting.tables.invoice_models import RollupMonth
from accounting.tables.limiter_models import LimiterIncident
from accounting.tables.models import RollupDay
from accounting.tenants import tenants
from accounting.values.periods import DAY_S, bounds, month_start
from accounting.values.types import OPERATOR_TENANT

NOW = 1_790_000_000
NOW_MS = NOW * 1000
THIS_MONTH = month_start(NOW)
NUM_MONTHS, NUM_TENANTS, NUM_INCIDENTS = 60, 40, 6_000
GROWING = ("rollup_day", "rollup_month", "limiter_incident", "spend_alert_due", "outbox", "ledger_entry")
SUMS = ("num_requests", "cache_read", "cache_write", "uncached", "output")
CHARGES = ("charge", "charge_cache_read", "charge_cache_write", "charge_uncached", "charge_output")


def sums(bucket: int, tenant: str, currency: str, charge: int) -> dict[str, Any]:
    keys = {"key_id": "k", "model": "m", "tier": "interactive", "price_version": "standard@1"}
    rest = dict.fromkeys((*SUMS, *CHARGES), 0) | {"charge": charge}
    return {"bucket": bucket, "tenant_id": tenant, "currency": currency, **keys, **rest}


@pytest.fixture
async def old(db: Database) -> Database:
    """Five years of history: forty tenants, ten of which pay in another currency."""
    months = [THIS_MONTH]
    while len(months) < NUM_MONTHS:
        months.append(month_start(months[-1] - DAY_S))
    rows = [
        sums(bucket, f"proj_{number}", "EUR" if number % 4 == 0 else "USD", number)
        for bucket in months
        for number in range(NUM_TENANTS)
    ]
    incidents = [
        {"epoch": epoch, "tenant_id": None if epoch == 5 else f"proj_{epoch % NUM_TENANTS}", "life": None}
        | {"raised_at_ms": epoch}
        for epoch in range(1, NUM_INCIDENTS + 1)
    ]
    async with db.write() as conn:
        for table, found in ((RollupDay, rows), (RollupMonth, rows), (LimiterIncident, incidents)):
            await insert_all(conn, table.__table__, found)
        if db.dialect == "postgresql":
            await conn.exec_driver_sql("ANALYZE")
    return db


class Noted:
    """The statements of a connection, and the tables that their plans read whole."""

    def __init__(self, conn: Any, dialect: str) -> None:
        self._conn, self._dialect = conn, dialect
        self.statements: list[tuple[str, Any]] = []

    def note(self, conn: Any, cursor: Any, statement: str, parameters: Any, context: Any, many: Any) -> None:
        self.statements.append((statement, parameters))

    def __enter__(self) -> Noted:
        event.listen(self._conn.sync_connection, "before_cursor_execute", self.note)
        return self

    def __exit__(self, *_: object) -> None:
        event.remove(self._conn.sync_connection, "before_cursor_execute", self.note)

    async def plan(self) -> str:
        """SQLite's plan of all statements that were noted."""
        plans = [(await self._conn.exec_driver_sql(f"EXPLAIN QUERY PLAN {s}", p)).all() for s, p in self.statements]
        return "\n".join(str(row[-1]) for plan in plans for row in plan)

    async def read_whole(self) -> set[str]:
        word, form = ("EXPLAIN QUERY PLAN", r"SCAN (\w+)\b(?! USING INDEX ix_outbox_due)")
        if self._dialect == "postgresql":
            word, form = ("EXPLAIN", r"Seq Scan on (\w+)")
        found: set[str] = set()  # an index of what waits alone may be read whole
        for statement, parameters in self.statements:
            plan = (await self._conn.exec_driver_sql(f"{word} {statement}", parameters)).all()
            found |= set(re.findall(form, "\n".join(str(row[-1]) for row in plan)))
        return found & set(GROWING)


async def test_the_spending_of_all_is_read_from_its_month(old: Database) -> None:
    async with old.read() as conn:
        with Noted(conn, old.dialect) as noted:
            spent = await spend_limits.spent_by_all(conn, spend_limits.month(NOW_MS), "USD")
        assert spent == sum(number for number in range(NUM_TENANTS) if number % 4)
        assert await spend_limits.spent_by_all(conn, spend_limits.month(NOW_MS), "JPY") == 0
        assert await noted.read_whole() == set()


async def test_alerts_and_deliveries_that_are_due_are_found_by_an_index(old: Database) -> None:
    async with old.write() as conn:
        with Noted(conn, old.dialect) as noted:
            assert not await spend_alerts.any_due(conn, NOW_MS)
        assert not any("rollup" in statement for statement, _ in noted.statements), "nobody has an alert"
        mine = (await tenants.create(conn, "mine", now=NOW)).id
        for tenant_id in (mine, OPERATOR_TENANT):
            await spend_alerts.create(conn, tenant_id, AlertFields(1, ("a@b",)), now=NOW, actor="cli")
        await conn.execute(RollupMonth.__table__.insert(), [sums(THIS_MONTH, mine, "USD", 10_000)])
        with Noted(conn, old.dialect) as noted:
            assert await spend_alerts.any_due(conn, NOW_MS)
            assert not await deliveries.any_due(conn, NOW_MS)
            assert not await deliveries.any_waiting(conn)
        assert len(await spend_alerts.note_due(conn, NOW_MS)) == 2
        assert not await spend_alerts.any_due(conn, NOW_MS)
        empty = {"spend_alert_due", "outbox"} if old.dialect == "postgresql" else set()
        assert await noted.read_whole() <= empty


async def test_a_gateway_learns_the_newest_incident_of_each_tenant(old: Database) -> None:
    """A gateway that started read each charge that was ever taken back."""
    async with old.read() as conn:
        found = await limiter_state.incidents(conn)
        assert len(found) == NUM_TENANTS + 1
        assert {one.tenant_id: one.epoch for one in found} == await limiter_state.epochs(conn)
        assert [one.epoch for one in found] == sorted(one.epoch for one in found)
        assert all(one.raised_at_ms == one.epoch for one in found)
        with Noted(conn, old.dialect) as noted:
            later = await limiter_state.incidents(conn, NUM_INCIDENTS - 2)
        assert [one.epoch for one in later] == list(range(NUM_INCIDENTS - 2, NUM_INCIDENTS + 1))
        assert await noted.read_whole() == set()
    async with old.write() as conn:
        with Noted(conn, old.dialect) as noted:
            await limiter_state.raise_for_life(conn, "a", NOW_MS)
            await limiter_state.raise_for_life(conn, "a", NOW_MS)
        assert [one.epoch for one in await limiter_state.incidents(conn)] == [NUM_INCIDENTS + 1]
        noted.statements = [one for one in noted.statements if one[0].startswith("SELECT")]
        assert await noted.read_whole() == set()


async def test_a_sweep_reads_the_rows_that_it_is_after(old: Database, pepper: bytes) -> None:
    """A repeat made SQLite's only writer read the whole ledger, and each sweep read the kept answers of all tenants."""
    async with old.write() as conn:
        await prices.bootstrap(conn, {"m": {"interactive": RATES}}, 0)
        mine = (await tenants.create(conn, "mine", now=NOW)).id
        key = await api_keys.create(conn, pepper, tenant_id=mine, now=NOW)
        owner = {"tenant_id": mine, "key_id": key.info.id}
        for number, request_id in enumerate(("req_1", "req_2")):
            await request_postings.post(conn, 0, number + 1, [posting(request_id, **owner)])
        await sdk_retries.note(conn, [DisconnectedEarly("req_1", "req_1", *owner.values(), b"f", NOW_MS)])
        await sdk_retries.replace(conn, owner["key_id"], b"f", "req_2", NOW_MS)
        with Noted(conn, old.dialect) as noted:
            assert await sdk_retries.any_to_move(conn)
            assert await sdk_retries.move(conn) == ["req_1"]
        noted.statements = noted.statements[:3]  # what follows is the reversal of the one that was found
        if old.dialect == "sqlite":
            plan = await noted.plan()
            assert "SCAN ledger_entry" not in plan
            assert plan.count("ix_unheard_attempt_to_move") == 2
        with Noted(conn, old.dialect) as noted:
            await idempotency_store.purge(conn, NOW)
            await idempotency_store.drop_lost(conn, 0, {"req_held"}, NOW)
            await idempotency_store.drop_running(conn, 0)
        if old.dialect == "sqlite":
            plan = await noted.plan()
            assert "ix_idempotent_reply_stored (batch_id=? AND expires_at<?)" in plan
            assert "ix_idempotent_reply_running (slot=? AND created_at<?)" in plan
            assert "ix_idempotent_reply_running (slot=?)" in plan


async def test_a_claim_looks_for_its_batch_before_it_reads_chunks(old: Database) -> None:
    """It sorted the queued chunks of all batches of its tenant, while nobody else could write."""
    async with old.write() as conn:
        with Noted(conn, old.dialect) as noted:
            assert await claims.waiting(conn, NOW_MS) == []
            assert await claims.num_claimable(conn, NOW_MS, 4) == 0
            assert await claims.claim(conn, "mine", "me", NOW_MS, 60_000) is None
        if old.dialect == "sqlite":
            plan = await noted.plan()
            assert plan.count("ix_batch_chunk_queued (batch_id=? AND not_before_ms<?)") == 4
            assert plan.count("ix_batch_chunk_state_tenant_id") == 1, "that of chunks that are claimed"


async def test_a_new_batch_counts_the_open_ones_alone(old: Database) -> None:
    async with old.write() as conn:
        with Noted(conn, old.dialect) as noted:
            await batches._check_open(conn, "mine")
        if old.dialect == "sqlite":
            assert "ix_batch_open (tenant_id=?)" in await noted.plan()


async def test_the_room_for_a_file_is_read_without_the_files_that_are_gone(old: Database) -> None:
    async with old.write() as conn:
        with Noted(conn, old.dialect) as noted:
            assert await files.tenant_bytes(conn, "mine") == 0
        if old.dialect == "sqlite":
            assert "ix_file_room (tenant_id=?)" in await noted.plan()


async def test_a_draft_of_an_invoice_reads_the_hours_of_its_tenant_alone(old: Database) -> None:
    """It walked the hours of all tenants while postings waited."""
    start, end = bounds("2026-08")
    async with old.read() as conn:
        with Noted(conn, old.dialect) as noted:
            await drafts._prepaid(conn, "proj_1", "USD", "2026-08", 0, 0)
            await drafts._days(conn, "proj_1", start, end)
        if old.dialect == "sqlite":
            plan = await noted.plan()
            for table in ("rollup_hour", "rollup_day"):
                assert f"sqlite_autoindex_{table}_1 (bucket=? AND tenant_id=?)" in plan


async def test_who_was_charged_late_is_found_by_the_closed_months_of_tenants_without_an_invoice(old: Database) -> None:
    async with old.read() as conn:
        with Noted(conn, old.dialect) as noted:
            assert await invoices._charged_late(conn, "2026-08") == set()
        if old.dialect == "sqlite":
            plan = await noted.plan()
            assert "sqlite_autoindex_rollup_month_1 (bucket=? AND tenant_id=?)" in plan
            assert "SCAN rollup_month" not in plan
