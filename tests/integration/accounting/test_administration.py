"""Audit log, rotation, ended streams, spending and erasure, on both dialects."""

from __future__ import annotations

import zlib
from itertools import pairwise

import msgspec
import pytest
from money import posting
from sqlalchemy import event, select

from accounting.access import api_keys, principals
from accounting.database import audit, auth_epoch, sealing
from accounting.database.audit import AuditFilter
from accounting.lifecycle import erasure, tenant_status
from accounting.limits import budgets, spend_alerts, spend_limits
from accounting.limits.spend_alerts import AlertFields
from accounting.requests import label_usage, request_log, request_postings
from accounting.requests.label_usage import LabelFilter
from accounting.requests.request_log import LoggedRequest, RequestFilter
from accounting.tables.batch_models import DataKey
from accounting.tenants import adapters, model_permissions, prefixes, tenants
from accounting.upstreams import upstreams
from accounting.values.errors import ConflictError, InvalidError, NotFoundError
from accounting.values.tenant_types import KeyChanges, ModelPermissions
from accounting.values.types import OPERATOR_TENANT, Charge

NOW = 1_700_000_000
NOW_MS = NOW * 1000
DAY_S = 86_400


@pytest.fixture
async def tenant(conn):
    return (await tenants.create(conn, "acme", now=NOW)).id


@pytest.fixture
async def key(conn, pepper, tenant):
    return await api_keys.create(conn, pepper, tenant_id=tenant, now=NOW)


def logged(tenant: str) -> LoggedRequest:
    return LoggedRequest(
        request_id=f"req_{zlib.crc32(tenant.encode()):032x}",
        is_tail=False,
        started_at_ms=NOW_MS,
        tenant_id=tenant,
        key_id="key_1",
        endpoint="POST /v1/completions",
        status=200,
        outcome="ok",
    )


async def spend(conn, tenant: str, micro_units: int, number: int = 1) -> None:
    charge = Charge(micro_units, 0, 0, 0, micro_units)
    entry = posting(f"req_{number}", tenant_id=tenant, charge=charge, opened_at_ms=NOW_MS)
    await request_postings.post(conn, 0, number, [entry], now_ms=NOW_MS)


async def test_the_log_is_walked_both_ways_and_filtered_by_time(conn):
    for second in range(6):
        await audit.record(conn, "headgate.test", actor="cli", now=NOW + second, object_id=f"o{second}")
    mine = AuditFilter(types=["headgate.test"])
    first = await audit.list_entries(conn, mine, limit=2)
    assert ([entry.object_id for entry in first.items], first.has_more) == (["o5", "o4"], True)
    second = await audit.list_entries(conn, mine, after=first.items[-1].id, limit=3)
    assert [entry.object_id for entry in second.items] == ["o3", "o2", "o1"]
    back = await audit.list_entries(conn, mine, before=second.items[0].id, limit=1)
    assert ([entry.object_id for entry in back.items], back.has_more) == (["o4"], True)
    for comparison, expected in (("gt", 3), ("gte", 4), ("lt", 2), ("lte", 3)):
        bound = AuditFilter(types=["headgate.test"], at=((comparison, NOW + 2),))
        assert len((await audit.list_entries(conn, bound)).items) == expected, comparison
    with pytest.raises(InvalidError):
        await audit.list_entries(conn, mine, after="audit_log-x")


async def test_a_rotated_secret_ends_with_the_overlap(conn, pepper, tenant, key):
    rotated = await api_keys.rotate(conn, pepper, key.info.id, 100, now=NOW, actor="cli")
    old = await principals.resolve(conn, pepper, key.value, NOW + 99)
    new = await principals.resolve(conn, pepper, rotated.value, NOW + 99)
    assert old is not None
    assert new is not None
    assert (old.key_id, old.expires_at) == (new.key_id, NOW + 100)
    assert new.expires_at is None
    assert await principals.resolve(conn, pepper, key.value, NOW + 100) is None
    [entry] = (await audit.list_entries(conn, AuditFilter(types=["api_key.updated"]))).items
    assert entry.detail == {"rotated": True, "overlap_seconds": 100}


async def test_a_disabled_key_is_nobodys_and_a_change_keeps_what_is_not_named(conn, pepper, tenant, key):
    bound = KeyChanges(addresses=("192.0.2.1",), models=("b", "a"), concurrency=3)
    await api_keys.change(conn, tenant, key.info.id, bound, now=NOW)
    changed = await api_keys.change(conn, tenant, key.info.id, KeyChanges(disabled=True, models=None), now=NOW)
    assert (changed.addresses, changed.models) == (("192.0.2.1/32",), None)
    assert changed.limits.concurrency == 3
    assert await principals.resolve(conn, pepper, key.value, NOW) is None


async def test_what_began_before_the_end_of_its_key_is_older_and_what_comes_after_is_not(conn, pepper, tenant, key):
    before = await principals.resolve(conn, pepper, key.value, NOW)
    await tenant_status.suspend(conn, tenant, True, now=NOW, end_streams=True)
    ended = (await api_keys.ended_streams(conn, [key.info.id, "key_other"]))[key.info.id]
    await tenant_status.suspend(conn, tenant, False, now=NOW)
    after = await principals.resolve(conn, pepper, key.value, NOW)
    assert before is not None
    assert after is not None
    assert before.version < ended.version <= after.version
    assert ended.tenant_status == "suspended"


@pytest.mark.parametrize(
    ("mode", "listed", "of_key", "allowed"),
    [
        ("deny_list", (), None, {"a", "b", "c"}),
        ("deny_list", ("a",), None, {"b", "c"}),
        ("allow_list", ("a", "b"), ("b", "c"), {"b"}),
        ("deny_list", ("b",), ("b", "c"), {"c"}),
        ("allow_list", (), None, set()),
    ],
)
async def test_a_key_may_use_what_both_lists_allow(conn, pepper, tenant, key, mode, listed, of_key, allowed):
    await model_permissions.put(conn, tenant, ModelPermissions(mode, listed), now=NOW, actor="cli")
    await api_keys.change(conn, tenant, key.info.id, KeyChanges(models=of_key), now=NOW)
    principal = await principals.resolve(conn, pepper, key.value, NOW)
    assert principal is not None
    assert {model for model in ("a", "b", "c") if principal.may_use(model)} == allowed


async def test_an_alert_is_due_once_for_its_tenant_and_for_all(conn, tenant):
    fields = AlertFields(100, ("a@b",))
    mine = await spend_alerts.create(conn, tenant, fields, now=NOW, actor="cli")
    high = AlertFields(1_000, ("a@b",))
    await spend_alerts.create(conn, tenant, high, now=NOW, actor="cli")
    everyones = await spend_alerts.create(conn, OPERATOR_TENANT, high, now=NOW, actor="cli")
    await spend(conn, tenant, 1_000_000)
    assert await spend_alerts.any_due(conn, NOW_MS)
    assert [due.alert.id for due in await spend_alerts.note_due(conn, NOW_MS)] == [mine.id]
    assert not await spend_alerts.any_due(conn, NOW_MS)
    other = await tenants.create(conn, "other", now=NOW)
    await spend(conn, other.id, 9_000_000, 2)
    [due] = await spend_alerts.note_due(conn, NOW_MS)
    assert (due.alert.id, due.spent_micro_units) == (everyones.id, 10_000_000)
    assert await spend_alerts.note_due(conn, NOW_MS) == []
    await spend_alerts.sent(conn, due, NOW_MS)


async def test_the_organizations_limit_is_reached_by_all_together_in_one_month(conn, tenant):
    await spend_limits.put(conn, OPERATOR_TENANT, 1_000_000, now_ms=NOW_MS, actor="cli")
    assert not await spend_limits.reached(conn, NOW_MS)
    await spend(conn, tenant, 999_999)
    assert not await spend_limits.reached(conn, NOW_MS)
    await spend(conn, tenant, 1, 2)
    assert await spend_limits.reached(conn, NOW_MS)
    assert not await spend_limits.reached(conn, NOW_MS + 40 * DAY_S * 1000)
    await spend_limits.clear(conn, OPERATOR_TENANT, now=NOW, actor="cli")
    assert not await spend_limits.reached(conn, NOW_MS)


async def test_an_erased_tenant_cannot_be_read_and_its_books_can(conn, pepper, tenant, key):
    await spend(conn, tenant, 500)
    rows = [logged(tenant), logged("proj_other")]
    await label_usage.note(conn, [msgspec.structs.replace(row, currency="USD", end_user="maria") for row in rows])
    await request_log.add(conn, rows)
    await sealing.data_key(conn, b"m" * 32, tenant, NOW)
    with pytest.raises(ConflictError):
        await erasure.erase(conn, tenant, retention_days=0, now=NOW, actor="cli")
    await tenant_status.archive(conn, tenant, now=NOW)
    for days, at in ((1, NOW), (1, NOW + DAY_S - 1)):
        with pytest.raises(ConflictError):
            await erasure.erase(conn, tenant, retention_days=days, now=at, actor="cli")
    report = await erasure.erase(conn, tenant, retention_days=1, now=NOW + DAY_S, actor="cli")
    assert (report.num_keys, report.data_key_destroyed) == (1, True)
    with pytest.raises(NotFoundError):
        await tenants.get(conn, tenant)
    assert await principals.resolve(conn, pepper, key.value, NOW) is None
    log = await request_log.list_requests(conn, RequestFilter())
    assert [one.tenant_id for one in log.items] == ["proj_other"]
    sums = await label_usage.list_sums(conn, LabelFilter(since_ms=0, until_ms=2**45), 10)
    assert [one.tenant_id for one in sums] == ["proj_other"]
    with pytest.raises(NotFoundError):
        await sealing.data_key(conn, b"m" * 32, tenant, NOW)
    assert not await conn.scalar(select(DataKey.tenant_id).where(DataKey.tenant_id == tenant))
    assert [row.tenant_id for row in await request_log.without_erased(conn, rows)] == ["proj_other"]
    month = spend_limits.month(NOW_MS)
    assert await spend_limits.spent_by_all(conn, month, "USD") == 500
    assert await auth_epoch.auth_epoch(conn) > 1


async def test_an_erasure_deletes_a_long_request_log_in_pieces(db):
    """It was one transaction, for which every writer of SQLite waited."""
    async with db.write() as conn:
        tenant = (await tenants.create(conn, "acme", now=NOW)).id
        rows = [msgspec.structs.replace(logged(tenant), request_id=f"req_{number:032x}") for number in range(5_000)]
        await request_log.add(conn, [*rows, logged("proj_other")])
    deleted = []

    def note(conn, cursor, statement, *_):
        if statement.startswith("DELETE FROM request_log"):
            deleted.append(cursor.rowcount)

    event.listen(db._writers.sync_engine, "after_cursor_execute", note)
    terms = {"retention_days": 0, "now": NOW}
    with pytest.raises(ConflictError):
        await erasure.delete_request_log(db, tenant, **terms)
    assert deleted == [], "it is not archived"
    async with db.write() as conn:
        await tenant_status.archive(conn, tenant, now=NOW)
    await erasure.delete_request_log(db, tenant, **terms)
    async with db.write() as conn:
        await erasure.erase(conn, tenant, actor="cli", **terms)
    assert sum(deleted) == 5_000
    assert max(deleted) <= erasure.PIECE_ROWS
    async with db.read() as conn:
        assert [one.tenant_id for one in (await request_log.list_requests(conn, RequestFilter())).items] == [
            "proj_other"
        ]


async def test_what_gateways_serve_raises_the_number_that_they_watch(conn):
    """They read prefixes, adapters and upstreams again only when it has risen."""
    epochs = [await auth_epoch.auth_epoch(conn)]

    async def noted() -> None:
        epochs.append(await auth_epoch.auth_epoch(conn))

    prefix = await prefixes.create(conn, name="rules", model="m", tokens=[1, 2], ttl_s=None, now=NOW, actor="x")
    await noted()
    await prefixes.delete(conn, prefix.id, now=NOW, actor="x")
    await noted()
    adapter = await adapters.create(conn, model="m", name="a", path="/a", tenant_id=None, now=NOW, actor="x")
    await noted()
    await adapters.delete(conn, adapter.id, now=NOW, actor="x")
    await noted()
    await upstreams.add(conn, "u", {"kind": "openai"}, "secret", key=bytes(32), now=NOW, actor="x")
    await noted()
    await upstreams.remove(conn, "u", now=NOW, actor="x")
    await noted()
    await spend_limits.put(conn, OPERATOR_TENANT, 1_000_000, now_ms=NOW_MS, actor="x")
    await noted()
    await spend_limits.clear(conn, OPERATOR_TENANT, now=NOW, actor="x")
    await noted()
    assert all(before < after for before, after in pairwise(epochs)), epochs


async def test_a_spend_limit_binds_again_when_it_is_set_after_its_budget_was_made_soft(conn):
    tenant = (await tenants.create(conn, "a", now=NOW)).id
    set_by = {"now_ms": NOW_MS, "actor": "x"}
    assert (await spend_limits.put(conn, tenant, 0, **set_by)).enforcing
    [budget] = await budgets.of_tenant(conn, tenant)
    await budgets.change(conn, budget.id, hardness="soft", now=NOW)
    assert not (await spend_limits.get(conn, tenant, NOW_MS)).enforcing
    assert (await spend_limits.put(conn, tenant, 0, **set_by)).enforcing
    assert [one.hardness for one in await budgets.of_tenant(conn, tenant)] == ["hard"]
