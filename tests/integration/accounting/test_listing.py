"""B3: lists are in the order in which their objects were made, also within one second, and go on behind what is gone."""

from __future__ import annotations

import pytest

from accounting.access import api_keys, service_accounts
from accounting.batches import batches, files
from accounting.events import webhooks
from accounting.events.egress import Egress
from accounting.lifecycle import tenant_status
from accounting.limits import budgets, spend_alerts
from accounting.limits.budgets import NewBudget
from accounting.limits.spend_alerts import AlertFields
from accounting.tenants import adapters, prefixes, tenants
from accounting.values.errors import InvalidError
from accounting.values.types import OPERATOR_TENANT

NOW = 1_700_000_000
NUM = 12


@pytest.fixture
async def tenant(conn) -> str:
    return (await tenants.create(conn, "acme", now=NOW)).id


async def a_file(conn, tenant, number):
    made = await files.create(
        conn, tenant, purpose="batch", name=f"{number}", num_bytes=1, sha256="", storage_key=f"{number}", now=NOW
    )
    return made.id


async def a_batch(conn, tenant, number):
    key = await api_keys.create(conn, b"p" * 32, tenant_id=tenant, now=NOW)
    made = await batches.create(
        conn,
        tenant,
        key.info.id,
        input_file_id=await a_file(conn, tenant, number),
        endpoint="/v1/chat/completions",
        completion_window="24h",
        now=NOW,
    )
    return made.id


async def a_key(conn, tenant, number):
    return (await api_keys.create(conn, b"p" * 32, tenant_id=tenant, now=NOW)).info.id


async def a_tenant(conn, tenant, number):
    return (await tenants.create(conn, f"t{number}", now=NOW)).id


async def an_account(conn, tenant, number):
    return (await service_accounts.create_service_account(conn, tenant, f"a{number}", now=NOW)).id


async def a_budget(conn, tenant, number):
    new = NewBudget(tenant_id=tenant, limit_micro_units=1, period="day")
    return (await budgets.create(conn, new, now=NOW)).id


async def a_prefix(conn, tenant, number):
    made = await prefixes.create(conn, name="p", model="m", tokens=[number], ttl_s=None, now=NOW, actor="x")
    return made.id


async def an_adapter(conn, tenant, number):
    made = await adapters.create(conn, model="m", name=f"a{number}", path="/p", tenant_id=None, now=NOW, actor="x")
    return made.id


async def an_alert(conn, tenant, number):
    return (await spend_alerts.create(conn, tenant, AlertFields(1, ("a@b",)), now=NOW, actor="x")).id


async def a_webhook(conn, tenant, number):
    made = await webhooks.create(
        conn,
        b"m" * 32,
        Egress(),
        url="https://example.org/hook",
        types=None,
        tenant_id=OPERATOR_TENANT,
        now=NOW,
        actor="x",
    )
    return made.info.id


async def listed(conn, kind, tenant, after, limit):
    page = {"after": after, "limit": limit}
    if kind in (a_file, a_batch, a_key, an_account, an_alert):
        call = {
            a_file: lambda: files.list_files(conn, tenant, NOW, **page),
            a_batch: lambda: batches.list_batches(conn, tenant, **page),
            a_key: lambda: api_keys.list_keys(conn, tenant, **page),
            an_account: lambda: service_accounts.list_service_accounts(conn, tenant, **page),
            an_alert: lambda: spend_alerts.list_alerts(conn, tenant, **page),
        }[kind]
    else:
        call = {
            a_tenant: lambda: tenants.list_tenants(conn, **page),
            a_budget: lambda: budgets.list_budgets(conn, **page),
            a_prefix: lambda: prefixes.list_prefixes(conn, NOW, **page),
            an_adapter: lambda: adapters.list_adapters(conn, **page),
            a_webhook: lambda: webhooks.list_webhooks(conn, **page),
        }[kind]
    return await call()


async def end(conn, kind, tenant, id_):
    if kind is a_file:
        await files.delete(conn, tenant, id_, NOW, actor="x")
    elif kind is a_key:
        await api_keys.revoke(conn, tenant, id_, now=NOW)
    elif kind is a_tenant:
        await tenant_status.archive(conn, id_, now=NOW)
    elif kind is an_account:
        await service_accounts.delete_service_account(conn, tenant, id_, now=NOW)
    elif kind is a_budget:
        await budgets.delete(conn, id_, now=NOW)
    elif kind is a_prefix:
        await prefixes.delete(conn, id_, now=NOW, actor="x")
    elif kind is an_adapter:
        await adapters.delete(conn, id_, now=NOW, actor="x")
    elif kind is an_alert:
        await spend_alerts.delete(conn, tenant, id_, now=NOW, actor="x")
    elif kind is a_webhook:
        await webhooks.remove(conn, id_, now=NOW, actor="x")
    else:
        assert kind is a_batch, "batches are never deleted"


KINDS = (a_file, a_batch, a_key, a_tenant, an_account, a_budget, a_prefix, an_adapter, an_alert, a_webhook)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
async def test_b3_a_list_is_newest_first_and_a_walk_that_ends_what_it_meets_meets_all_of_it(conn, tenant, kind):
    """Although all were made within one second."""
    made = [await kind(conn, tenant, number) for number in range(NUM)]
    assert await _walk(conn, kind, tenant, ending=False) == list(reversed(made))
    assert await _walk(conn, kind, tenant, ending=True) == list(reversed(made))


async def _walk(conn, kind, tenant, *, ending: bool) -> list[str]:
    """All ids, three by three; what was seen is ended, if it is asked for, before the next page."""
    seen, after = [], None
    while True:
        page = await listed(conn, kind, tenant, after, 3)
        found = [one.id for one in page.items if one.id != tenant]
        for id_ in found if ending else ():
            await end(conn, kind, tenant, id_)
        seen += found
        if not page.has_more:
            return seen
        after = page.items[-1].id


@pytest.mark.parametrize("gone", [False, True])
async def test_b3_another_tenants_object_is_no_place_in_a_list(conn, tenant, gone):
    other = (await tenants.create(conn, "other", now=NOW)).id
    theirs = await a_file(conn, other, 1)
    if gone:
        await files.delete(conn, other, theirs, NOW, actor="x")
    for after in (theirs, "file-0", "file-" + "0" * 32):
        with pytest.raises(InvalidError, match="does not exist"):
            await files.list_files(conn, tenant, NOW, after=after)
    for after in ("webhook_x", "webhook_" + "f" * 31, theirs):
        with pytest.raises(InvalidError, match="does not exist"):
            await webhooks.list_webhooks(conn, after=after)
