"""`/admin/v1/webhooks` and `headgate webhooks`, with a sender and a receiver at the other end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sqlite3

import pytest
from click.testing import CliRunner
from gateways import running_gateway
from load import stretched
from sqlalchemy import update
from webhook_receiver import Receiver, Verifier, receiving

from accounting.access import api_keys
from accounting.tables.outbox_models import Outbox, Webhook
from accounting.values.types import Limits
from gateway.base.app_keys import DATABASE
from gateway.cli.main import main
from workers.jobs.base.settings import JobsSettings
from workers.jobs.webhooks.sender import Sender

PATH = "/admin/v1/webhooks"
LOOPBACK = "127.0.0.0/8"


@pytest.fixture
async def gateway(tmp_path, redis_url):
    async with running_gateway(tmp_path, redis_url, webhook_allowed_networks=LOOPBACK) as running:
        yield running


@contextlib.asynccontextmanager
async def sending(gateway):
    settings = JobsSettings(
        home=gateway.settings.home,
        database_url=gateway.settings.sql_url,
        url=gateway.url,
        broker_url="redis://127.0.0.1:1",
        webhook_allowed_networks=LOOPBACK,
        test_time_scale=0.2,
    )
    task = asyncio.create_task(Sender(settings, gateway.app[DATABASE]).run())
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def call(gateway, method, path=PATH, body=None, key=None):
    async with gateway.session(key or gateway.keys.admin_key) as session:
        answer = await session.request(method, path, json=body)
        return answer.status, await answer.json()


async def headgate(gateway, *arguments):
    env = {"HEADGATE_URL": gateway.url, "HEADGATE_API_KEY": gateway.keys.admin_key}
    command = ["webhooks", *arguments, "--home", str(gateway.settings.home)]
    done = await asyncio.to_thread(CliRunner().invoke, main, command, env=env)
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exc_info
    return done.exit_code, done.output


async def delivered(gateway, webhook_id):
    _, page = await call(gateway, "GET", f"{PATH}/{webhook_id}/deliveries?state=delivered")
    return page["data"]


async def test_the_secret_is_shown_once_and_lies_nowhere(gateway):
    tenant = gateway.keys.tenant_id
    body = {"url": "https://example.com/x", "events": ["headgate.usage.v1"], "project_id": tenant}
    status, made = await call(gateway, "POST", body=body)
    assert status == 200
    assert made.pop("secret").startswith("whsec_")
    assert (made["project_id"], made["events"]) == (tenant, ["headgate.usage.v1"])
    _, found = await call(gateway, "GET", f"{PATH}/{made['id']}")
    assert found == made
    _, listed = await call(gateway, "GET", f"{PATH}?project_id={tenant}")
    assert listed["data"] == [made]
    _, everywhere = await call(gateway, "POST", body={"url": "https://example.com/y"})
    with sqlite3.connect(gateway.settings.home / "headgate.db") as db:
        assert everywhere["secret"] not in "\n".join(db.iterdump())
    assert (await call(gateway, "DELETE", f"{PATH}/{made['id']}"))[1]["deleted"] is True
    for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/test"), ("GET", "/deliveries")):
        status, error = await call(gateway, method, f"{PATH}/{made['id']}{path}")
        assert (status, error["error"]["type"]) == (404, "invalid_request_error")


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"url": "https://localhost./"}, "url"),
        ({"url": "https://10.0.0.1/"}, "url"),
        ({"url": "http://127.0.0.1:6379/"}, "url"),
        ({"url": "https://u:p@example.com/"}, "url"),
        ({}, "url"),
        ({"url": "https://example.com/", "events": []}, "events"),
        ({"url": "https://example.com/", "events": ["all"]}, "events"),
    ],
)
async def test_what_cannot_be_is_refused_with_its_name(shared_gateway, body, param):
    status, error = await call(shared_gateway, "POST", body=body)
    assert (status, error["error"]["param"]) == (400, param)
    assert "10.0.0.1" not in error["error"]["message"]
    is_place = body.get("url") in ("https://localhost./", "https://10.0.0.1/", "http://127.0.0.1:6379/")
    assert ("HEADGATE_WEBHOOK_ALLOWED_NETWORKS permits" in error["error"]["message"]) == is_place


async def test_a_tenants_own_webhook_goes_to_public_addresses_only(gateway):
    """The operator's networks are closed to it when it is made, and at each connect, whatever its name says then."""
    tenant, key = await gateway.new_tenant("hooks", ("keys", "usage:read"))
    async with receiving(Receiver()) as receiver, sending(gateway):
        status, error = await call(gateway, "POST", "/v1/webhooks", {"url": receiver.url}, key)
        assert (status, error["error"]["param"]) == (400, "url")
        assert "HEADGATE_" not in error["error"]["message"]
        made = (await call(gateway, "POST", "/v1/webhooks", {"url": "https://hook.example.com/"}, key))[1]
        # As if the name had been of a public address when it was given, and of this machine when it is connected to.
        async with gateway.app[DATABASE].write() as conn:
            await conn.execute(update(Webhook).where(Webhook.id == made["id"]).values(url=receiver.url))
        await call(gateway, "POST", f"/v1/webhooks/{made['id']}/test", key=key)
        deliveries = f"/v1/webhooks/{made['id']}/deliveries"
        async with asyncio.timeout(20):
            while not (found := (await call(gateway, "GET", deliveries, key=key))[1]["data"])[0]["last_error"]:  # noqa: ASYNC110 - the state is the server's
                await asyncio.sleep(0.05)
        assert found[0]["last_error"] == "refused"
        assert receiver.came == []
        operators = (await call(gateway, "POST", body={"url": receiver.url, "project_id": tenant}))[1]
        await call(gateway, "POST", f"{PATH}/{operators['id']}/test")
        async with asyncio.timeout(20):
            while not receiver.came:  # noqa: ASYNC110 - as above
                await asyncio.sleep(0.05)


async def test_a_tenant_has_few_webhooks_of_its_own_and_none_of_the_operators(gateway):
    tenant, key = await gateway.new_tenant("few", ("keys", "usage:read"))
    operators = (await call(gateway, "POST", body={"url": "https://example.com/op", "project_id": tenant}))[1]
    url = {"url": "https://example.com/own"}
    statuses = [(await call(gateway, "POST", "/v1/webhooks", url, key))[0] for _ in range(4)]
    assert statuses == [200, 200, 200, 409]
    listed = (await call(gateway, "GET", "/v1/webhooks", key=key))[1]["data"]
    assert operators["id"] not in {one["id"] for one in listed}
    for method, tail in (("GET", ""), ("DELETE", ""), ("POST", "/test"), ("GET", "/deliveries")):
        assert (await call(gateway, method, f"/v1/webhooks/{operators['id']}{tail}", key=key))[0] == 404
    assert (await call(gateway, "POST", body={"url": "https://example.com/2", "project_id": tenant}))[0] == 200


async def test_few_tests_of_a_webhook_wait_at_once(gateway):
    """Each call wrote a row that waits up to a day, and one of the audit log, however many waited already."""
    tenant, key = await gateway.new_tenant("tests", ("keys", "usage:read"))
    made, other = [
        (await call(gateway, "POST", "/v1/webhooks", {"url": "https://example.com/own"}, key))[1] for _ in range(2)
    ]
    path = f"/v1/webhooks/{made['id']}/test"
    answers = [await call(gateway, "POST", path, key=key) for _ in range(12)]
    assert [status for status, _ in answers] == [200] * 10 + [409] * 2
    assert "10 tests" in answers[-1][1]["error"]["message"]
    assert (await call(gateway, "POST", f"/v1/webhooks/{other['id']}/test", key=key))[0] == 200
    tested = "SELECT count(*) AS number FROM audit_log WHERE tenant_id = :t AND event LIKE '%webhook.tested'"
    assert (await gateway.sql(tested, t=tenant))[0].number == 11
    async with gateway.app[DATABASE].write() as conn:
        ended = update(Outbox).where(Outbox.webhook_id == made["id"])
        await conn.execute(ended.values(state="delivered", ended_at_ms=1))
    assert (await call(gateway, "POST", path, key=key))[0] == 200
    async with gateway.app[DATABASE].write() as conn:
        await conn.execute(update(Webhook).where(Webhook.id == made["id"]).values(is_full=True))
    assert (await call(gateway, "POST", path, key=key))[0] == 409


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    "bound", [{"expires_at": 4_000_000_000}, {"addresses": ("127.0.0.0/8",)}, {"limits": Limits(concurrency=4)}]
)
async def test_a_key_that_is_bound_makes_no_webhook(shared_gateway, bound):
    _, key = await shared_gateway.new_tenant("bound", ("keys", "usage:read"), **bound)
    status, _ = await call(shared_gateway, "POST", "/v1/webhooks", {"url": "https://example.com/"}, key)
    assert status == 403


async def test_an_unknown_project_and_a_tenants_key_find_nothing(gateway):
    body = {"url": "https://example.com/", "project_id": "proj_none"}
    assert (await call(gateway, "POST", body=body))[0] == 404
    assert (await call(gateway, "GET", key=gateway.keys.api_key))[0] in (401, 403)


async def test_from_the_command_line_to_the_receiver_and_the_audit_log(gateway):
    async with receiving(Receiver()) as receiver, sending(gateway):
        status, output = await headgate(gateway, "add", receiver.url, "--json")
        assert status == 0
        made = json.loads(output)
        status, output = await headgate(gateway, "test", made["id"])
        assert (status, "delivered" in output) == (0, True), output
        async with gateway.app[DATABASE].write() as conn:
            key = await api_keys.create(conn, b"p" * 32, tenant_id=gateway.keys.tenant_id, now=1)
        async with gateway.session(gateway.keys.admin_key) as session:
            path = f"/v1/organization/projects/{gateway.keys.tenant_id}/api_keys/{key.info.id}"
            assert (await session.delete(path)).status == 200
        async with asyncio.timeout(stretched(10)):
            while len(await delivered(gateway, made["id"])) < 2:  # noqa: ASYNC110 - the receiver knows before
                await asyncio.sleep(0.05)
        kinds = [event["type"] for event in receiver.events()]
        assert kinds == ["headgate.webhook.test.v1", "headgate.api_key.revoked.v1"]
        verifier = Verifier(made["secret"])
        for headers, body in receiver.came:
            verifier.check(headers, body)
    status, output = await headgate(gateway, "list")
    assert made["id"] in output
    assert made["secret"] not in output
    status, output = await headgate(gateway, "deliveries", made["id"], "--state", "delivered")
    assert output.count(" delivered ") == 2
    assert (await headgate(gateway, "remove", made["id"]))[1].strip() == made["id"]
    _, log = await call(gateway, "GET", "/v1/organization/audit_logs?limit=20")
    types = [entry["type"] for entry in log["data"] if "webhook" in entry["type"]]
    assert types == [f"headgate.webhook.{verb}" for verb in ("deleted", "tested", "created")]
    assert made["secret"] not in str(log)


@pytest.mark.rest
async def test_a_test_that_does_not_come_through_says_why_and_fails(gateway):
    async with receiving(Receiver(statuses=[418] * 9)) as receiver, sending(gateway):
        _, output = await headgate(gateway, "add", receiver.url, "--json")
        status, output = await headgate(gateway, "test", json.loads(output)["id"])
    assert (status, "status 418" in output) == (1, True)


async def test_without_a_sender_a_test_says_so(gateway, monkeypatch):
    monkeypatch.setattr("gateway.cli.serving_commands.WAIT_S", 0.2)
    _, output = await headgate(gateway, "add", "https://example.com/", "--json")
    status, output = await headgate(gateway, "test", json.loads(output)["id"])
    assert (status, "nobody has tried" in output) == (1, True)
