"""The screen of anomalies and its API: the operator sees all keys, a tenant its own, and both come to where it is stopped."""

from __future__ import annotations

import time

import pytest
from console_pages import signed_in
from gateways import PEPPER, RunningGateway
from money import posting

from accounting.access import api_keys
from accounting.requests import label_usage, request_postings
from accounting.requests.request_log import LoggedRequest
from accounting.values.types import Usage
from gateway.base.app_keys import DATABASE

pytestmark = pytest.mark.asyncio(loop_scope="module")
PROBE = "<script>alert(1)</script>\"'"
FORMULA = "=cmd|' /C calc'!A0"


async def leaking(gateway: RunningGateway, seq: int) -> tuple[str, str, str]:
    """(tenant, a key that manages its keys, the id of a key with a burst): old enough to be judged."""
    now = int(time.time())
    tenant, manager = await gateway.new_tenant(PROBE, scopes=["usage:read", "chat", "keys"])
    async with gateway.app[DATABASE].write() as conn:
        key = await api_keys.create(
            conn, PEPPER, tenant_id=tenant, now=now - 30 * 86_400, name=FORMULA, scopes=["chat"]
        )
        of_key = {"tenant_id": tenant, "key_id": key.info.id, "opened_at_ms": now * 1000, "model": PROBE}
        burst = [posting(f"req_burst{seq}_{n}", Usage(0, 0, 5, 5), **of_key) for n in range(40)]
        await request_postings.post(conn, 60 + seq, 1, burst)
    return tenant, manager, key.info.id


async def test_the_operator_finds_a_key_and_disables_it(shared_gateway: RunningGateway) -> None:
    gateway = shared_gateway
    tenant, _, key_id = await leaking(gateway, 1)
    async with signed_in(gateway, gateway.keys.admin_key) as operator:
        page = await operator.get(f"/anomalies?project_id={tenant}")
        assert "the key may be leaked" in page.words
        assert "an hour in which it was silent before" in page.words
        assert "40, 0" in page.words
        assert "<script>alert" not in page.text
        assert f'href="/console/keys/{key_id}#disable"' in page.text
        assert f'href="/console/tenants/{tenant}#suspend"' in page.text
        assert "'" + FORMULA in (await operator.get(f"/anomalies?project_id={tenant}&format=csv")).text
        page = await operator.get(f"/keys/{key_id}")
        assert 'id="disable"' in page.text
        await operator.submit(f"/keys/{key_id}/disable")
        assert "does not work any more" in (await operator.get(f"/anomalies?project_id={tenant}")).words
        assert "Nothing is unusual." in (await operator.get("/anomalies?project_id=proj_none")).words
        page = await operator.get("/anomalies?hours=25")
        assert (page.status, "'hours' must be 1 to 24." in page.words) == (400, True)


async def test_a_tenant_sees_its_own_keys_alone(shared_gateway: RunningGateway) -> None:
    gateway = shared_gateway
    _, _, foreign = await leaking(gateway, 2)
    tenant, manager, key_id = await leaking(gateway, 3)
    async with gateway.session(manager) as session, session.get(f"/v1/anomalies?project_id={foreign}") as answer:
        [one] = (await answer.json())["data"]
    assert (one["project_id"], one["api_key_id"], one["suspicion"]) == (tenant, key_id, "leaked_key")
    assert one["requests"] == {"observed": 40, "usual": 0, "upper": 30}
    async with signed_in(gateway, manager) as own:
        page = await own.get("/anomalies")
        assert foreign not in page.text
        assert f'href="/console/keys/{key_id}#disable"' in page.text
        assert "Suspend" not in page.words
    async with signed_in(gateway, (await gateway.new_tenant("reader", scopes=["usage:read"]))[1]) as reader:
        assert "Nothing is unusual." in (await reader.get("/anomalies")).words


async def test_an_end_user_whose_day_is_unusual_is_shown_as_text(shared_gateway: RunningGateway) -> None:
    tenant, key = await shared_gateway.new_tenant("with end users", scopes=["usage:read"])
    now_ms = int(time.time()) * 1000
    requests = [
        LoggedRequest(
            request_id=f"req_{now_ms:012x}8{day:09x}{number:010x}",
            is_tail=False,
            started_at_ms=now_ms - day * 86_400_000,
            tenant_id=tenant,
            key_id="key_1",
            endpoint="POST /v1/chat/completions",
            status=200,
            outcome="ok",
            end_user=PROBE,
            currency="USD",
        )
        for day in range(10)
        for number in range(1 if day else 40)
    ]
    async with shared_gateway.app[DATABASE].write() as conn:
        await label_usage.note(conn, requests)
    async with signed_in(shared_gateway, key) as own:
        page = await own.get("/anomalies")
        assert PROBE in page.words
        assert "<script>alert" not in page.text
        assert "40, 1" in page.words
        assert PROBE.replace('"', '""') in (await own.get("/anomalies?format=csv&table=unusual-end-users")).text
    _, other = await shared_gateway.new_tenant("other", scopes=["usage:read"])
    async with signed_in(shared_gateway, other) as own:
        assert PROBE not in (await own.get("/anomalies")).words
