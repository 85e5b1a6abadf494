"""The life of a key after it was made: rotation, rest, addresses, limits, leaks, and an end that is felt everywhere."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from typing import Any

import aiohttp
import pytest
from fakes import ScriptedWorker
from gateways import MODEL, RunningGateway, running_gateway, until
from load import stretched

from gateway.base.addresses import LOOPBACK
from gateway.base.app_keys import RUNNING
from gateway.generation.stream import GENERATION

pytestmark = pytest.mark.rest

LONG: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "tell"}],
    "max_tokens": 1500,
    "stream": True,
    "stream_options": {"include_usage": True},
}


@pytest.fixture
async def gateway(tmp_path, redis_url):
    async with running_gateway(tmp_path, redis_url) as running:
        yield running


async def status(gateway: RunningGateway, key: str, **headers: str) -> int:
    async with gateway.session(key) as session, session.get("/v1/models", headers=headers) as answer:
        return answer.status


async def admin(gateway: RunningGateway, method: str, path: str, body: Any = None) -> Any:
    async with gateway.session(gateway.keys.admin_key) as session, session.request(method, path, json=body) as answer:
        assert answer.status == 200, await answer.text()
        return await answer.json()


async def key_of(gateway: RunningGateway, tenant: str) -> str:
    [row] = await gateway.sql("SELECT id FROM api_key WHERE tenant_id = :t", t=tenant)
    return str(row.id)


async def test_both_secrets_work_while_a_rotation_overlaps_and_the_old_one_ends(gateway):
    tenant, old = await gateway.new_tenant("rotating")
    key_id = await key_of(gateway, tenant)
    rotated = await admin(gateway, "POST", f"/admin/v1/keys/{key_id}/rotate", {"overlap_seconds": 4})
    new = rotated["value"]
    assert (rotated["id"], new != old) == (key_id, True)
    assert [await status(gateway, key) for key in (old, new)] == [200, 200]
    await asyncio.sleep(4.1)
    assert [await status(gateway, key) for key in (old, new)] == [401, 200]
    third = (await admin(gateway, "POST", f"/admin/v1/keys/{key_id}/rotate", {}))["value"]
    assert [await status(gateway, key) for key in (new, third)] == [401, 200]
    assert "value" not in await admin(gateway, "GET", f"/admin/v1/keys/{key_id}")


async def test_never_more_than_two_secrets_live(gateway):
    tenant, first = await gateway.new_tenant("rotating")
    key_id = await key_of(gateway, tenant)
    body = {"overlap_seconds": 600}
    second = (await admin(gateway, "POST", f"/admin/v1/keys/{key_id}/rotate", body))["value"]
    third = (await admin(gateway, "POST", f"/admin/v1/keys/{key_id}/rotate", body))["value"]
    assert [await status(gateway, key) for key in (first, second, third)] == [401, 200, 200]
    async with (
        gateway.session(gateway.keys.admin_key) as session,
        session.post(f"/admin/v1/keys/{key_id}/rotate", json={"overlap_seconds": 604_801}) as answer,
    ):
        assert answer.status == 400


async def test_a_key_rests_and_comes_back(gateway):
    tenant, key = await gateway.new_tenant("resting")
    path = f"/admin/v1/keys/{await key_of(gateway, tenant)}"
    assert (await admin(gateway, "PATCH", path, {"disabled": True}))["disabled"]
    assert await status(gateway, key) == 401
    await admin(gateway, "PATCH", path, {"disabled": False})
    assert await status(gateway, key) == 200


async def test_a_key_is_bound_to_addresses_as_listed_proxies_report_them(tmp_path, redis_url):
    async with running_gateway(tmp_path, redis_url, trusted_networks=LOOPBACK) as gateway:
        await check_addresses(gateway)


async def check_addresses(gateway: RunningGateway) -> None:
    tenant, key = await gateway.new_tenant("bound")
    path = f"/admin/v1/keys/{await key_of(gateway, tenant)}"
    changed = await admin(gateway, "PATCH", path, {"addresses": ["192.0.2.7", "2001:db8::/32"]})
    assert changed["addresses"] == ["192.0.2.7/32", "2001:db8::/32"]
    assert await status(gateway, key) == 401
    for report, expected in [
        ("192.0.2.7", 200),
        ("192.0.2.8", 401),
        ("2001:db8::5", 200),
        ("192.0.2.7, 198.51.100.1", 401),
        ("198.51.100.1, 192.0.2.7", 200),
        ("192.0.2.7, 127.0.0.1", 200),
        ("192.0.2.7, nonsense", 401),
    ]:
        found = await status(gateway, key, **{"x-forwarded-for": report})
        assert (report, found) == (report, expected)
    await admin(gateway, "PATCH", path, {"addresses": None})
    assert await status(gateway, key) == 200


async def test_attack_A11_an_unlisted_peer_cannot_choose_its_address(tmp_path, redis_url):
    async with running_gateway(tmp_path, redis_url) as gateway:
        tenant, key = await gateway.new_tenant("bound")
        path = f"/admin/v1/keys/{await key_of(gateway, tenant)}"
        await admin(gateway, "PATCH", path, {"addresses": ["192.0.2.7"]})
        assert await status(gateway, key, **{"x-forwarded-for": "192.0.2.7"}) == 401
        await admin(gateway, "PATCH", path, {"addresses": ["127.0.0.0/8"]})
        assert await status(gateway, key, **{"x-forwarded-for": "192.0.2.7"}) == 200


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"addresses": ["here"]}, "addresses"),
        ({"addresses": []}, "addresses"),
        ({"disabled": 1}, "disabled"),
        ({"max_running_requests": -1}, "max_running_requests"),
        ({"addresses": ["10.0.0.1/8"]}, "addresses"),
    ],
)
async def test_a_change_that_makes_no_sense_names_its_field(gateway, body, param):
    tenant, _ = await gateway.new_tenant("odd")
    async with (
        gateway.session(gateway.keys.admin_key) as session,
        session.patch(f"/admin/v1/keys/{await key_of(gateway, tenant)}", json=body) as answer,
    ):
        assert (answer.status, (await answer.json())["error"]["param"]) == (400, param)


async def test_the_last_use_of_a_key_is_known(gateway, monkeypatch):
    monkeypatch.setattr("gateway.http.last_use.EVERY_S", 0.05)
    tenant, key = await gateway.new_tenant("used")
    path = f"/admin/v1/keys/{await key_of(gateway, tenant)}"
    assert (await admin(gateway, "GET", path))["last_used_at"] is None
    assert await status(gateway, key) == 200
    deadline = time.monotonic() + stretched(10)
    while (used := (await admin(gateway, "GET", path))["last_used_at"]) is None:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)
    assert abs(used - time.time()) < 10


async def test_a_leaked_key_ends_and_the_answer_has_its_id(gateway):
    tenant, key = await gateway.new_tenant("leaky")
    answers = [
        await admin(gateway, "POST", "/admin/v1/leaked-keys", {"value": value})
        for value in (key, key, "hg_live_nonsense", key[:-7] + "A" + key[-6:])
    ]
    [held] = await gateway.sql("SELECT id FROM api_key WHERE tenant_id = :t", t=tenant)
    assert [answer["api_key_id"] for answer in answers] == [held.id, None, None, None]
    _, other = await gateway.new_tenant("other")
    leak = {"value": gateway.keys.admin_key}
    async with gateway.session(other) as session, session.post("/admin/v1/leaked-keys", json=leak) as answer:
        assert answer.status == 403, "operators alone may ask"
    assert await status(gateway, key) == 401
    rows = await gateway.sql("SELECT event FROM audit_log WHERE tenant_id = :t ORDER BY id", t=tenant)
    assert rows[-1].event == "api_key.deleted"


async def test_a_key_holds_a_bounded_number_of_requests(tmp_path, redis_url):
    async with (
        running_gateway(tmp_path / "home", redis_url, max_connections_per_key=3) as gateway,
        ScriptedWorker(tmp_path / "w0.sock", redis_url=redis_url, tokens_per_s=100),
    ):
        await gateway.workers(1)
        _, other = await gateway.new_tenant("other")
        async with contextlib.AsyncExitStack() as stack:
            session = await stack.enter_async_context(gateway.session())
            for _ in range(3):
                answer = await stack.enter_async_context(session.post("/v1/chat/completions", json=LONG))
                assert answer.status == 200
            async with session.get("/v1/models") as refused:
                error = (await refused.json())["error"]
                assert (refused.status, error["type"], error["code"]) == (429, "concurrency", "rate_limit_exceeded")
            assert await status(gateway, other) == 200
        await until(lambda: not gateway.app[RUNNING].key_ids)
        assert await status(gateway, gateway.keys.api_key) == 200


@contextlib.asynccontextmanager
async def two_gateways(tmp_path, redis_url):
    """One database and one Redis, two processes' worth of state, a slow worker that both are linked to."""
    home = tmp_path / "home"
    async with (
        running_gateway(home, redis_url) as one,
        running_gateway(home, redis_url, slot=1) as two,
        ScriptedWorker(tmp_path / "w0.sock", redis_url=redis_url, tokens_per_s=100, journal_dir=tmp_path / "w0"),
    ):
        await one.workers(1)
        await two.workers(1)
        yield one, two


async def endless(gateway: RunningGateway, session: aiohttp.ClientSession) -> str:
    """A whole stream as text."""
    async with session.post("/v1/chat/completions", json=LONG) as answer:
        assert answer.status == 200
        return (await answer.read()).decode()


ENDS = {
    "key": ("DELETE", "/v1/organization/projects/{tenant}/api_keys/{key}", None),
    "rest": ("PATCH", "/admin/v1/keys/{key}", {"disabled": True}),
    "suspended": ("PATCH", "/admin/v1/tenants/{tenant}", {"suspended": True}),
    "archived": ("POST", "/v1/organization/projects/{tenant}/archive", None),
    "account": ("DELETE", "/v1/organization/projects/{tenant}/service_accounts/{account}", None),
}


@pytest.mark.parametrize("how", ENDS)
async def test_attack_C04_s7_an_end_stops_streams_on_every_gateway_within_five_seconds(tmp_path, redis_url, how):
    """Without being asked to: the safer way is the default."""
    async with two_gateways(tmp_path, redis_url) as (one, two):
        tenant, key, account = await tenant_with_account(one)
        method, path, body = ENDS[how]
        path = path.format(tenant=tenant, key=await key_of(one, tenant), account=account)
        async with one.session(key) as here, two.session(key) as there, two.session() as another:
            streams = [
                asyncio.create_task(endless(gateway, session)) for gateway, session in ((one, here), (two, there))
            ]
            safe = asyncio.create_task(endless(two, another))
            for gateway in (one, two):
                await until(lambda gateway=gateway: gateway.app[GENERATION].running.key_ids)
            await asyncio.sleep(0.5)
            await admin(one, method, path, body)
            began = time.monotonic()
            texts = await asyncio.gather(*streams)
            assert time.monotonic() - began < stretched(5)
            assert not safe.done(), "another tenant's stream goes on"
            safe.cancel()
        for text in texts:
            assert '"error"' in text
            assert "[DONE]" not in text
        for gateway in (one, two):
            await gateway.balanced()
        charges = await one.sql(
            "SELECT output, charge FROM ledger_entry WHERE tenant_id = :t AND kind = 'settle'", t=tenant
        )
        assert len(charges) == 2
        assert all(row.output > 0 and row.charge > 0 for row in charges)


TOLD = {
    "rest": (401, "invalid_api_key", "The access of this API key was taken away while the request ran."),
    "suspended": (403, "tenant_suspended", "This project is suspended."),
    "archived": (403, "project_archived", "This project is archived."),
}
CUT: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": LONG,
    "/v1/completions": {"model": MODEL, "prompt": "tell", "max_tokens": 1500, "stream": True},
    "/v1/responses": {"model": MODEL, "input": "tell", "max_output_tokens": 1500, "stream": True},
    "/v1/messages": {"model": MODEL, "messages": LONG["messages"], "max_tokens": 1500, "stream": True},
}


async def last_event(gateway: RunningGateway, key: str, path: str) -> tuple[str, Any]:
    """(id of the request, the last event of its stream)."""
    async with gateway.session(key) as session, session.post(path, json=CUT[path]) as answer:
        assert answer.status == 200
        text = (await answer.read()).decode().rstrip()
        return answer.headers["x-request-id"], json.loads(text.rpartition("data: ")[2])


@pytest.mark.parametrize("how", TOLD)
async def test_a_request_that_is_ended_is_told_what_the_next_one_is(tmp_path, redis_url, how):
    """It was told of its key, whatever the operator had done."""
    status_code, code, message = TOLD[how]
    async with two_gateways(tmp_path, redis_url) as (one, _):
        tenant, key = await one.new_tenant("told")
        method, path, body = ENDS[how]
        streams = [asyncio.create_task(last_event(one, key, url)) for url in CUT]
        async with one.session(key) as session:
            whole = asyncio.create_task(
                session.post("/v1/chat/completions", json=LONG | {"stream": False, "stream_options": None})
            )
            running = one.app[GENERATION].running
            await until(lambda: sum(len(ends) for ends in running._ends.values()) == len(CUT) + 1)
            await asyncio.sleep(0.5)
            await admin(one, method, path.format(tenant=tenant, key=await key_of(one, tenant)), body)
            refused = await whole
            assert (refused.status, (await refused.json())["error"]["code"]) == (status_code, code)
        (chat_id, chat), (_, completion), (_, response), (_, message_event) = await asyncio.gather(*streams)
        assert await status(one, key) == status_code
        for error in (chat["error"], completion["error"]):
            assert (error["code"], error["message"], error["type"]) == (code, message, "invalid_request_error")
        assert response["type"] == "response.failed"
        assert (response["response"]["error"]["code"], response["response"]["error"]["message"]) == (code, message)
        kind = "authentication_error" if status_code == 401 else "permission_error"
        assert (message_event["error"]["type"], message_event["error"]["message"]) == (kind, message)
        await until(lambda: not running.key_ids)
        for _ in range(100):
            rows = await one.sql("SELECT error_code FROM request_log WHERE request_id = :id", id=chat_id)
            if rows:
                break
            await asyncio.sleep(0.05)
        assert [row.error_code for row in rows] == [code]
        await one.balanced()


async def tenant_with_account(gateway: RunningGateway) -> tuple[str, str, str]:
    """(tenant id, key, id of the service account that owns the key)."""
    projects = "/v1/organization/projects"
    project = await admin(gateway, "POST", projects, {"name": "ending"})
    made = await admin(gateway, "POST", f"{projects}/{project['id']}/service_accounts", {"name": "robot"})
    return project["id"], made["api_key"]["value"], made["id"]


@pytest.mark.slow
@pytest.mark.parametrize("how", ENDS)
async def test_s7_a_graceful_end_lets_a_running_stream_finish(tmp_path, redis_url, how):
    async with two_gateways(tmp_path, redis_url) as (one, _):
        tenant, key, account = await tenant_with_account(one)
        method, path, body = ENDS[how]
        path = path.format(tenant=tenant, key=await key_of(one, tenant), account=account)
        short = LONG | {"max_tokens": 300}
        async with one.session(key) as session:
            async with session.post("/v1/chat/completions", json=short) as answer:
                await admin(one, method, path + "?revoke=graceful", body)
                assert (await answer.read()).decode().rstrip().endswith("data: [DONE]")
            assert await status(one, key) in {401, 403}


async def test_s7_a_change_that_takes_nothing_away_lets_streams_finish(tmp_path, redis_url):
    async with two_gateways(tmp_path, redis_url) as (one, _):
        tenant, key = await one.new_tenant("going on")
        short = LONG | {"max_tokens": 300}
        async with one.session(key) as session, session.post("/v1/chat/completions", json=short) as answer:
            body = {"max_requests_per_1_minute": 50}
            await admin(one, "PATCH", f"/admin/v1/keys/{await key_of(one, tenant)}", body)
            assert (await answer.read()).decode().rstrip().endswith("data: [DONE]")


async def test_a_tenant_that_comes_back_streams_again(tmp_path, redis_url):
    async with two_gateways(tmp_path, redis_url) as (one, two):
        tenant, key = await one.new_tenant("resting")
        path = f"/admin/v1/tenants/{tenant}?revoke=immediate"
        await admin(one, "PATCH", path, {"suspended": True})
        assert await status(two, key) == 403
        await admin(one, "PATCH", path, {"suspended": False})
        async with asyncio.timeout(stretched(5)):
            while await status(two, key) == 403:  # noqa: ASYNC110 - nobody tells when it has heard
                await asyncio.sleep(0.05)
        async with two.session(key) as session:
            text = await endless(two, session)
        assert text.rstrip().endswith("data: [DONE]")
