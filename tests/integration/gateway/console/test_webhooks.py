"""The screen of webhooks: added with a secret that is shown once, tested, deleted; texts of forms stay inert."""

from __future__ import annotations

import re

import pytest
from console_pages import signed_in
from gateways import RunningGateway

pytestmark = pytest.mark.asyncio(loop_scope="module")
PROBE = "<script>alert(1)</script>\"'"
URL = "https://8.8.8.8/hook?a=<script>alert(1)</script>"


async def test_a_tenants_administrator_has_its_own_receivers_and_no_others(shared_gateway: RunningGateway) -> None:
    gateway = shared_gateway
    tenant, key = await gateway.new_tenant("told", ["keys", "usage:read"])
    _, other = await gateway.new_tenant("curious", ["keys", "usage:read"])
    async with signed_in(gateway, key) as admin, signed_in(gateway, other) as stranger:
        assert 'href="/console/webhooks"' in (await admin.get("")).text
        page = await admin.get("/webhooks")
        assert ("Nobody is told of events" in page.words, "Only of tenant" in page.words) == (True, False)
        page = await admin.submit("/webhooks", url="http://localhost/x")
        assert (page.status, 'role="alert"' in page.text) == (400, True)
        page = await admin.submit("/webhooks", url=URL, events="headgate.budget.alert.v1")
        assert (page.status, page.text.count("whsec_")) == (200, 1), page.words
        [webhook_id] = set(re.findall(r"webhook_[0-9a-z]+", page.text))
        assert await gateway.sql("SELECT tenant_id FROM webhook WHERE id = :i", i=webhook_id) == [(tenant,)]
        assert webhook_id in (await admin.get("/webhooks")).text
        page = await admin.get(f"/webhooks/{webhook_id}")
        page = await admin.submit(f"/webhooks/{webhook_id}/test")
        assert "headgate.webhook.test.v1 pending" in page.words
        assert webhook_id not in (await stranger.get("/webhooks")).text
        assert (await stranger.get(f"/webhooks/{webhook_id}")).status == 404
        for action in ("test", "delete"):
            await stranger.get("/webhooks")
            assert (await stranger.submit(f"/webhooks/{webhook_id}/{action}")).status == 404
        await stranger.get("/webhooks")
        assert (await stranger.submit("/webhooks", url=URL, project_id=tenant)).status == 404
        await admin.get(f"/webhooks/{webhook_id}")
        page = await admin.submit(f"/webhooks/{webhook_id}/delete")
        assert (page.path, "Nobody is told of events" in page.words) == ("/console/webhooks", True)
    for scopes in (["keys"], ["chat", "usage:read"]):
        _, key = await gateway.new_tenant("told less", scopes)
        async with signed_in(gateway, key) as less:
            assert "scopes keys and usage:read" in (await less.get("/webhooks")).words
            assert (await less.submit("/webhooks", url=URL)).status == 403


async def test_a_receiver_is_added_tested_and_deleted(shared_gateway: RunningGateway) -> None:
    async with signed_in(shared_gateway, shared_gateway.keys.admin_key) as operator:
        assert "Nobody is told of events" in (await operator.get("/webhooks")).words
        page = await operator.submit("/webhooks", url="ftp://" + PROBE, project_id=PROBE)
        assert (page.status // 100, 'role="alert"' in page.text, "<script>alert" in page.text) == (4, True, False)
        page = await operator.submit("/webhooks", url=URL, project_id="", events="headgate.budget.alert.v1")
        assert page.status == 200, page.words
        assert (page.text.count("whsec_"), "<script>alert" in page.text) == (1, False)
        webhook_id = re.search(r"webhook_[0-9a-z]+", page.text)[0]
        page = await operator.get(f"/webhooks/{webhook_id}")
        assert ("whsec_" in page.text, "<script>alert" in page.text) == (False, False)
        assert "headgate.budget.alert.v1" in page.words
        page = await operator.submit(f"/webhooks/{webhook_id}/test")
        assert "headgate.webhook.test.v1 pending" in page.words
        assert "Nothing is stored here" in (await operator.get(f"/webhooks/{webhook_id}?state=dead")).words
        async with signed_in(shared_gateway) as tenant:
            assert (await tenant.get(f"/webhooks/{webhook_id}")).status == 403
            for action in ("test", "delete"):
                await tenant.get("")
                assert (await tenant.submit(f"/webhooks/{webhook_id}/{action}")).status == 403
        await operator.get(f"/webhooks/{webhook_id}")
        page = await operator.submit(f"/webhooks/{webhook_id}/delete")
        assert (page.path, "Nobody is told of events" in page.words) == ("/console/webhooks", True)
        assert (await operator.get(f"/webhooks/{webhook_id}")).status == 404
