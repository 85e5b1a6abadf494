"""The screen of keys: what the operator, a tenant's manager of keys, finance and a stranger see and do there."""

from __future__ import annotations

import re
import time
from html import unescape
from typing import Any

import pytest
from console_pages import signed_in
from gateways import PEPPER, RunningGateway

from accounting.access import api_keys
from accounting.values.types import OPERATOR_TENANT
from gateway.base.app_keys import DATABASE
from gateway.console import choices
from gateway.console.screens.access import keys
from gateway.console.screens.access.keys import SCOPES

pytestmark = pytest.mark.asyncio(loop_scope="module")
PROBE = "<script>alert(1)</script>\"'"
FORMULA = "=cmd|' /C calc'!A0"


async def finance_key(gateway: RunningGateway) -> str:
    async with gateway.app[DATABASE].write() as conn:
        how: dict[str, Any] = {"kind": "admin", "scopes": ["admin:read"], "now": int(time.time())}
        return (await api_keys.create(conn, PEPPER, tenant_id=OPERATOR_TENANT, **how)).value


async def works(gateway: RunningGateway, key: str) -> bool:
    async with gateway.session(key) as session, session.get("/v1/models") as answer:
        return answer.status == 200


def value_in(text: str) -> str:
    [value] = re.findall(r"hg_live_\w{10}_\w{43}_\w{6}", text)
    return str(value)


async def test_every_tenant_is_on_a_page_of_the_list(
    shared_gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = {(await shared_gateway.new_tenant(f"listed {number}"))[0] for number in range(3)}
    monkeypatch.setattr(choices, "MAX_TENANTS", 1)
    monkeypatch.setattr(keys, "PAGE_ROWS", 2)
    seen: set[str] = set()
    async with signed_in(shared_gateway, shared_gateway.keys.admin_key) as operator:
        address: str | None = "/keys"
        while address is not None:
            page = await operator.get(address)
            seen |= set(re.findall(r"/keys\?project_id=(proj_\w+)", page.text))
            found = re.search(r'rel="next" href="/console([^"]+)"', page.text)
            address = unescape(found[1]) if found else None
        file = await operator.get("/keys?format=csv")
    assert made <= seen
    assert all(tenant in file.text for tenant in made)


async def test_the_screen_knows_every_scope() -> None:
    assert SCOPES.keys() == api_keys.TENANT_SCOPES


async def test_the_operator_makes_rotates_disables_and_revokes_a_key(shared_gateway: RunningGateway) -> None:
    gateway = shared_gateway
    tenant, _ = await gateway.new_tenant("keyed")
    async with signed_in(gateway, gateway.keys.admin_key) as operator:
        assert "Choose a tenant" in (await operator.get("/keys")).words
        await operator.get(f"/keys/new?project_id={tenant}")
        fields = {"project_id": tenant, "name": PROBE, "scopes": "chat", "max_running_requests": "7"}
        page = await operator.submit("/keys", **fields, models="", addresses="", days="30")
        assert page.status == 200, page.words
        first = value_in(page.text)
        assert await works(gateway, first)
        listed = await operator.get(f"/keys?project_id={tenant}")
        assert "<script>alert" not in listed.text
        assert first not in listed.text
        [key_id] = set(re.findall(r'href="/console/keys/(key_\w+)">&lt;script', listed.text))
        page = await operator.get(f"/keys/{key_id}")
        assert "Requests at one time 7" in page.words
        page = await operator.submit(f"/keys/{key_id}/rotate", overlap="3600")
        second = value_in(page.text)
        assert await works(gateway, first)
        assert await works(gateway, second)
        await operator.get(f"/keys/{key_id}")
        page = await operator.submit(f"/keys/{key_id}/disable")
        assert "The key is disabled." in page.words
        assert not await works(gateway, second)
        page = await operator.submit(f"/keys/{key_id}/enable")
        assert await works(gateway, second)
        page = await operator.submit(f"/keys/{key_id}/revoke")
        assert "The key is revoked." in page.words
        assert key_id not in page.text
        assert not await works(gateway, second)


async def test_a_refused_form_says_why_and_keeps_what_was_filled_in(shared_gateway: RunningGateway) -> None:
    tenant, _ = await shared_gateway.new_tenant("keyed")
    async with signed_in(shared_gateway, shared_gateway.keys.admin_key) as operator:
        await operator.get(f"/keys/new?project_id={tenant}")
        fields = {"project_id": tenant, "name": "mine", "scopes": "chat", "models": PROBE, "addresses": FORMULA}
        page = await operator.submit("/keys", **fields)
        assert page.status == 400
        assert "Each entry is an address or a network" in page.words
        assert 'value="mine"' in page.text
        assert "<script>alert" not in page.text
        page = await operator.submit("/keys", **fields | {"addresses": "", "max_running_requests": "many"})
        assert (page.status, "max_running_requests" in page.words) == (400, True)
        page = await operator.submit("/keys", **{name: value for name, value in fields.items() if name != "scopes"})
        assert "Choose at least one scope." in page.words


async def test_bounds_are_changed_and_no_model_is_not_every_model(shared_gateway: RunningGateway) -> None:
    gateway = shared_gateway
    tenant, _ = await gateway.new_tenant("keyed", models=[])
    [row] = await gateway.sql("SELECT id FROM api_key WHERE tenant_id = :t", t=tenant)
    async with signed_in(gateway, gateway.keys.admin_key) as operator:
        page = await operator.get(f"/keys/{row.id}")
        assert "Models none" in page.words
        page = await operator.submit(
            f"/keys/{row.id}", only_models="on", models="", addresses="", max_running_requests="3"
        )
        assert "Models none" in page.words
        assert "Requests at one time 3" in page.words
        page = await operator.submit(f"/keys/{row.id}", only_models="on", models="a\nb", addresses="")
        assert "Models a, b" in page.words
        assert "Requests at one time no limit of its own" in page.words
        page = await operator.submit(f"/keys/{row.id}", only_addresses="on", models="", addresses="nowhere")
        assert page.status == 400
        assert "nowhere</textarea>" in page.text


async def test_names_are_inert_in_exports(shared_gateway: RunningGateway) -> None:
    tenant, _ = await shared_gateway.new_tenant("keyed")
    async with shared_gateway.app[DATABASE].write() as conn:
        await api_keys.create(conn, PEPPER, tenant_id=tenant, now=1, name=FORMULA)
    async with signed_in(shared_gateway, shared_gateway.keys.admin_key) as operator:
        page = await operator.get(f"/keys?project_id={tenant}&format=csv")
        assert "'" + FORMULA in page.text


async def test_finance_reads_keys_and_gets_no_form(shared_gateway: RunningGateway) -> None:
    gateway = shared_gateway
    tenant, _ = await gateway.new_tenant("keyed")
    [row] = await gateway.sql("SELECT id FROM api_key WHERE tenant_id = :t", t=tenant)
    async with signed_in(gateway, await finance_key(gateway)) as finance:
        page = await finance.get(f"/keys?project_id={tenant}")
        assert row.id in page.text
        assert "New key" not in page.words
        page = await finance.get(f"/keys/{row.id}")
        assert "Revoke" not in page.words
        page = await finance.submit(f"/keys/{row.id}/revoke")
        assert page.status == 403
        assert (await finance.get(f"/keys/{row.id}")).status == 200


async def test_a_key_of_the_operator_leads_to_no_page_of_a_tenant(shared_gateway: RunningGateway) -> None:
    """The operator is no tenant with a page: the link was a 404."""
    [(key_id, tenant_id)] = await shared_gateway.sql("SELECT id, tenant_id FROM api_key WHERE kind = 'admin' LIMIT 1")
    async with signed_in(shared_gateway, shared_gateway.keys.admin_key) as operator:
        page = await operator.get(f"/keys/{key_id}")
        assert (page.status, f"Tenant {tenant_id} State" in page.words) == (200, True)
        assert f'href="/console/tenants/{tenant_id}"' not in page.text


async def test_a_tenant_manages_its_own_keys_and_no_others(shared_gateway: RunningGateway) -> None:
    gateway = shared_gateway
    stranger, _ = await gateway.new_tenant("stranger", scopes=["chat"])
    [foreign] = await gateway.sql("SELECT id FROM api_key WHERE tenant_id = :t", t=stranger)
    tenant, key = await gateway.new_tenant("keyed", scopes=["chat", "keys"])
    async with signed_in(gateway, key) as manager:
        page = await manager.get("/keys/new")
        assert 'value="batch"' not in page.text, "only scopes that it has are offered"
        page = await manager.submit("/keys", project_id=stranger, name="mine", scopes="chat")
        assert await works(gateway, value_in(page.text))
        assert len(await gateway.sql("SELECT id FROM api_key WHERE tenant_id = :t", t=tenant)) == 2
        page = await manager.submit("/keys", name="more", scopes="batch", form_token=await token(manager))
        assert (page.status, "go beyond those of this API key" in page.words) == (403, True)
        assert (await manager.get(f"/keys?project_id={stranger}")).text.count(foreign.id) == 0
        assert (await manager.get(f"/keys/{foreign.id}")).status == 404
        await manager.get("/keys/new")
        for action in ("", "/rotate", "/disable", "/enable", "/revoke"):
            page = await manager.submit(f"/keys/{foreign.id}{action}", overlap="0")
            assert page.status == 404, action
            await manager.get("/keys/new")
    [after] = await gateway.sql("SELECT disabled, revoked_at, previous_hash FROM api_key WHERE id = :k", k=foreign.id)
    assert tuple(after) == (0, None, None)


async def test_a_key_without_the_scope_is_told_what_is_missing(shared_gateway: RunningGateway) -> None:
    async with signed_in(shared_gateway) as tenant:
        page = await tenant.get("/keys")
        assert "has the scope keys" in page.words


async def token(browser: Any) -> str:
    return str((await browser.get("/keys/new")).form_token)
