"""What is told: with what it tells or not at all, to whom it concerns, once. And how it gets out of the outbox."""

from __future__ import annotations

import asyncio
import json
import time

from billing_world import CLOSED_MS, PERIOD, month_of_traffic, tenants_with_keys
from money import posting
from sqlalchemy import select, text

from accounting.access import api_keys, service_accounts
from accounting.batches import batch_runs, batches, files
from accounting.billing import invoices
from accounting.events import outbox, webhooks
from accounting.events.egress import Egress
from accounting.events.events import Event
from accounting.lifecycle import erasure, tenant_status
from accounting.limits import budgets, spend_alerts
from accounting.limits.budgets import NewBudget
from accounting.requests import request_postings
from accounting.tables.outbox_models import Outbox, Webhook
from accounting.tenants import tenants
from accounting.values.types import OPERATOR_TENANT

MASTER = b"m" * 32


async def hook(conn, tenant_id=OPERATOR_TENANT, types=None, url="https://example.com/hook"):
    made = await webhooks.create(conn, MASTER, Egress(), url=url, types=types, tenant_id=tenant_id, now=1, actor="cli")
    return made.info.id


async def tenant(conn, name="one"):
    return (await tenants.create(conn, name, now=1)).id


async def told(conn, webhook_id=None):
    """(type, id, data) in no order that is promised."""
    query = select(Outbox.body).order_by(Outbox.type, Outbox.event_id)
    if webhook_id is not None:
        query = query.where(Outbox.webhook_id == webhook_id)
    bodies = [json.loads(body) for body in (await conn.execute(query)).scalars()]
    return [(body["type"], body["id"], body["data"]) for body in bodies]


def event(name, tenant_id):
    return Event(name, "headgate.usage.v1", tenant_id, 1, {"n": name})


async def test_nobody_listens_nothing_is_written(conn):
    await request_postings.post(conn, 0, 1, [posting("req_1")])
    assert await told(conn) == []


async def test_usage_is_told_under_its_ledger_key_once(conn):
    mine = await tenant(conn)
    await hook(conn, mine)
    settle = posting("req_1", tenant_id=mine)
    await request_postings.post(conn, 0, 1, [settle, posting("req_2", kind="void", tenant_id=mine)])
    await request_postings.post(conn, 0, 2, [settle])
    [(kind, name, data)] = await told(conn)
    assert (kind, name) == ("headgate.usage.v1", "req_1/settle/0")
    assert data["charge_micro_units"] == settle.charge.total
    assert (data["cache_read"], data["output"], data["key_id"]) == (16, 100, "key_a")
    body = json.loads(await conn.scalar(select(Outbox.body)))
    assert (body["specversion"], body["subject"]) == ("1.0", mine)
    assert body["source"].startswith("urn:headgate:")
    assert body["source"] == await outbox.source(conn)


async def test_a_charge_that_is_taken_back_is_told_with_its_numbers_negative(conn):
    mine = await tenant(conn)
    await hook(conn, mine)
    await request_postings.post(conn, 0, 1, [posting("req_1", tenant_id=mine)])
    await request_postings.reverse(conn, ["req_1"], "sdk_retry")
    found = {name: data for _, name, data in await told(conn)}
    assert set(found) == {"req_1/settle/0", "req_1/reversal/0"}
    assert sum(data["charge_micro_units"] for data in found.values()) == 0


async def test_what_is_rolled_back_was_never_told(db):
    async with db.write() as conn:
        mine = await tenant(conn)
        await hook(conn, mine)
    async with db.write() as conn:
        await request_postings.post(conn, 0, 1, [posting("req_1", tenant_id=mine)])
        assert len(await told(conn)) == 1
        await conn.rollback()
    async with db.read() as conn:
        assert await told(conn) == []


async def test_each_hears_of_its_own_tenant_and_the_operator_of_all(conn):
    one, two = await tenant(conn, "one"), await tenant(conn, "two")
    hooks = {
        "one": await hook(conn, one),
        "two": await hook(conn, two),
        "all": await hook(conn),
        "invoices": await hook(conn, types=["headgate.invoice.closed.v1"]),
    }
    await outbox.write(conn, [event("a", one), event("b", two)])
    heard = {name: [told_[1] for told_ in await told(conn, one_)] for name, one_ in hooks.items()}
    assert heard == {"one": ["a"], "two": ["b"], "all": ["a", "b"], "invoices": []}


async def test_budget_alerts_are_told_once_per_threshold(conn):
    mine = await tenant(conn)
    await hook(conn, mine, ["headgate.budget.alert.v1"])
    charge = posting("x").charge.total
    new = NewBudget(tenant_id=mine, limit_micro_units=2 * charge, period="day")
    budget = await budgets.create(conn, new, now=1)
    await request_postings.post(conn, 0, 1, [posting("req_1", tenant_id=mine)])
    assert [data["threshold"] for *_, data in await told(conn)] == [50]
    await request_postings.post(conn, 0, 2, [posting("req_2", tenant_id=mine)])
    found = await told(conn)
    assert sorted(data["threshold"] for *_, data in found) == [50, 80, 100]
    assert {data["budget_id"] for *_, data in found} == {budget.id}


async def test_spend_alerts_are_told(conn):
    mine = await tenant(conn)
    await hook(conn, mine, ["headgate.spend_alert.v1"])
    fields = spend_alerts.AlertFields(cents=1, recipients=("a@example.org",))
    await spend_alerts.create(conn, mine, fields, now=1, actor="cli")
    now_ms = time.time_ns() // 1_000_000
    await request_postings.post(
        conn, 0, 1, [posting(f"req_{n}", tenant_id=mine, opened_at_ms=now_ms) for n in range(300)]
    )
    assert len(await spend_alerts.note_due(conn, now_ms)) == 1
    assert await spend_alerts.note_due(conn, now_ms) == []
    [(_, _, data)] = await told(conn)
    assert data["threshold_amount"] == 1
    assert "example.org" not in str(data)


async def test_a_closed_invoice_is_told_once(db):
    owners = await tenants_with_keys(db, 1)
    await month_of_traffic(db, owners, 5)
    async with db.write() as conn:
        await hook(conn, owners[0][0])
    for _ in range(2):
        info = await invoices.close(db, owners[0][0], PERIOD, now_ms=CLOSED_MS, actor="cli")
    async with db.read() as conn:
        [(kind, name, data)] = await told(conn)
    assert (kind, name) == ("headgate.invoice.closed.v1", f"invoice/{info.number}")
    assert (data["total_micro_units"], data["due_micro_units"]) == (info.total, info.terms.amounts.due)


async def test_keys_that_turn_or_end_are_told_without_a_secret(conn, pepper):
    mine = await tenant(conn)
    await hook(conn, mine)
    account = await service_accounts.create_service_account(conn, mine, "a", now=1)
    made = [
        await api_keys.create(conn, pepper, tenant_id=mine, service_account_id=a, now=1)
        for a in (None, None, account.id)
    ]
    ids = [one.info.id for one in made]
    await api_keys.rotate(conn, pepper, ids[0], 60, now=10, actor="cli")
    await api_keys.revoke(conn, mine, ids[0], now=11)
    await api_keys.revoke_leaked(conn, pepper, made[1].value, now=12, actor="cli")
    await service_accounts.delete_service_account(conn, mine, account.id, now=13)
    found = await told(conn)
    by_kind = [(kind.split(".")[2], data["api_key_id"]) for kind, _, data in found]
    assert sorted(by_kind) == sorted(
        [("rotated", ids[0]), ("revoked", ids[0]), ("revoked", ids[1]), ("revoked", ids[2])]
    )
    assert all(one.value not in str(found) for one in made)


async def test_the_end_of_a_batch_is_told(conn, pepper):
    mine = await tenant(conn)
    await hook(conn, mine, ["headgate.batch.ended.v1"])
    key = await api_keys.create(conn, pepper, tenant_id=mine, now=1)
    source = await files.create(
        conn, mine, purpose="batch", name="in.jsonl", num_bytes=1, sha256="0", storage_key="k", now=1
    )
    batch = await batches.create(
        conn,
        mine,
        key.info.id,
        input_file_id=source.id,
        endpoint="/v1/chat/completions",
        completion_window="24h",
        now=1,
    )
    held = await batch_runs.claim(conn, 5000, 60_000, 30_000)
    assert held is not None
    await batch_runs.fail(conn, held, 6000, [], 0)
    [(_, name, data)] = await told(conn)
    assert (name, data["status"]) == (batch.id, "failed")


async def test_the_secret_is_sealed_and_the_audit_log_knows_the_host_alone(conn):
    made = await webhooks.create(
        conn,
        MASTER,
        Egress(),
        url="https://example.com/services/T0KEN",
        types=None,
        tenant_id=OPERATOR_TENANT,
        now=1,
        actor="cli",
    )
    sealed = await conn.scalar(select(Webhook.secret))
    key = webhooks.signing_key(MASTER, made.info.id, sealed)
    assert len(key) == 32
    assert key not in sealed
    await webhooks.remove(conn, made.info.id, now=2, actor="cli")
    log = (await conn.execute(text("SELECT event, detail FROM audit_log WHERE event LIKE '%webhook%'"))).all()
    assert [row.event for row in log] == ["headgate.webhook.created", "headgate.webhook.deleted"]
    assert "T0KEN" not in str(log)
    assert "example.com" in str(log)


async def test_an_erased_tenants_webhooks_go_with_it(conn):
    mine = await tenant(conn)
    await hook(conn, mine)
    everywhere = await hook(conn)
    await outbox.write(conn, [event("a", mine)])
    await tenant_status.archive(conn, mine, now=2)
    await erasure.erase(conn, mine, retention_days=0, now=3, actor="cli")
    assert (await conn.execute(select(Webhook.id))).scalars().all() == [everywhere]
    assert [name for _, name, _ in await told(conn)] == ["a"]


async def test_a_webhook_that_is_removed_while_it_is_told_breaks_no_posting(db):
    async with db.write() as conn:
        mine = await tenant(conn)
        webhook_id = await hook(conn, mine)

    async def post(number):
        async with db.write() as conn:
            await request_postings.post(conn, 0, number, [posting(f"req_{number}", tenant_id=mine)])

    async def remove():
        async with db.write() as conn:
            await webhooks.remove(conn, webhook_id, now=2, actor="cli")

    await asyncio.gather(*(post(n) for n in range(1, 9)), remove(), *(post(n) for n in range(9, 17)))
    async with db.read() as conn:
        assert await told(conn) == []
        assert await conn.scalar(text("SELECT count(*) FROM ledger_entry")) == 16
