"""The screen of the audit log."""

from __future__ import annotations

import pytest
from console_pages import signed_in
from gateways import RunningGateway

from accounting.database import audit
from gateway.base.app_keys import DATABASE

pytestmark = pytest.mark.asyncio(loop_scope="module")
PROBE = "<script>alert(1)</script>\"'"


async def test_the_operator_finds_who_changed_what(shared_gateway: RunningGateway) -> None:
    gateway = shared_gateway
    tenant, _ = await gateway.new_tenant(PROBE)
    other, _ = await gateway.new_tenant("other")
    async with gateway.session(gateway.keys.admin_key) as session:
        body = {"max_requests_per_1_minute": 4321}
        async with session.patch(f"/admin/v1/tenants/{tenant}", json=body) as answer:
            assert answer.status == 200
    async with signed_in(gateway, gateway.keys.admin_key) as operator:
        page = await operator.get("/audit")
        assert {tenant, other} <= set(page.words.split())
        page = await operator.get(f"/audit?project_ids={tenant}&event_types=rate_limit.updated&days=1")
        assert "<script>alert" not in page.text
        assert PROBE in page.words
        assert "4321" in page.words
        assert other not in page.text
        [entry] = await gateway.sql("SELECT actor FROM audit_log WHERE tenant_id = :t AND event LIKE 'rate%'", t=tenant)
        assert f'href="/console/keys/{entry.actor}"' in page.text
        assert (await operator.get(f"/keys/{entry.actor}")).status == 200
        file = await operator.get(f"/audit?project_ids={tenant}&event_types=rate_limit.updated&format=csv")
        assert file.text.count("rate_limit.updated") == 1
        page = await operator.get(f"/audit?actor_ids={PROBE}")
        assert "No change was found." in page.words
        assert "<script>alert" not in page.text


async def test_a_revoked_key_has_no_page_that_the_log_could_lead_to(shared_gateway: RunningGateway) -> None:
    gateway = shared_gateway
    tenant, _ = await gateway.new_tenant("leaver")
    [(key_id,)] = await gateway.sql("SELECT id FROM api_key WHERE tenant_id = :t", t=tenant)
    async with gateway.session(gateway.keys.admin_key) as admin, admin.delete(f"/admin/v1/keys/{key_id}") as answer:
        assert answer.status == 200
    async with signed_in(gateway, gateway.keys.admin_key) as operator:
        page = await operator.get(f"/audit?project_ids={tenant}&event_types=api_key.deleted")
        assert key_id in page.words
        assert f'href="/console/keys/{key_id}"' not in page.text


async def test_a_file_has_all_entries_that_match(shared_gateway: RunningGateway) -> None:
    gateway = shared_gateway
    tenant, _ = await gateway.new_tenant("much changed")
    async with gateway.app[DATABASE].write() as conn:
        for number in range(103):
            await audit.record(
                conn, "rate_limit.updated", actor="cli", now=1_700_000_000 + number, object_id=tenant, tenant_id=tenant
            )
    async with signed_in(gateway, gateway.keys.admin_key) as operator:
        path = f"/audit?project_ids={tenant}&event_types=rate_limit.updated"
        assert (await operator.get(path)).text.count("<tr>") == 1 + 100
        file = await operator.get(f"{path}&format=csv")
        assert file.text.count('"rate_limit.updated"') == 103
        wrong = await operator.get("/audit?format=pdf")
        assert (wrong.status, wrong.headers["content-type"]) == (400, "text/html; charset=utf-8")


async def test_a_tenant_does_not_read_the_audit_log(shared_gateway: RunningGateway) -> None:
    async with signed_in(shared_gateway) as tenant:
        assert (await tenant.get("/audit")).status == 403
        assert "Audit" not in (await tenant.get("")).words
