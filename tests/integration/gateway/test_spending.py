"""Spend limits, spend alerts and model permissions through the unmodified `openai` client."""

from __future__ import annotations

import asyncio
import time

import openai
import pytest
from fakes import ScriptedWorker
from gateways import MODEL, running_gateway, until
from load import stretched
from money import posting

from accounting.limits import spend_limits
from accounting.requests import request_postings
from accounting.values.types import Charge
from gateway.base.app_keys import DATABASE
from gateway.books.spending import SPENDING

EMAIL = {"type": "email", "recipients": ["ops@example.org"], "subject_prefix": "[farm]"}


@pytest.fixture
async def gateway(tmp_path, redis_url):
    async with (
        running_gateway(tmp_path / "home", redis_url) as running,
        ScriptedWorker(tmp_path / "w0.sock", redis_url=redis_url),
    ):
        await running.workers(1)
        yield running


async def spend(gateway, tenant: str, micro_units: int, request_id: str = "req_spent") -> None:
    now_ms = time.time_ns() // 1_000_000
    charge = Charge(micro_units, 0, 0, 0, micro_units)
    entry = posting(request_id, tenant_id=tenant, charge=charge, opened_at_ms=now_ms)
    async with gateway.app[DATABASE].write() as conn:
        await request_postings.post(conn, 7, now_ms, [entry])


async def chat(gateway, key: str | None = None):
    async with gateway.client(key) as client:
        return await client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "hi"}], max_tokens=1
        )


async def test_a_projects_spend_limit_is_a_hard_monthly_budget(gateway, organization):
    limits = organization.projects.spend_limit
    tenant = gateway.keys.tenant_id
    for missing in (limits.retrieve, limits.delete):
        with pytest.raises(openai.NotFoundError):
            await missing(tenant)
    terms = {"currency": "USD", "interval": "month"}
    made = await limits.update(tenant, threshold_amount=250, **terms)
    assert (made.object, made.threshold_amount) == ("project.spend_limit", 250)
    assert (made.currency, made.interval, made.enforcement.status) == ("USD", "month", "inactive")
    await limits.update(tenant, threshold_amount=300, **terms)
    rows = await gateway.sql("SELECT period, hardness, limit_micro_units FROM budget WHERE deleted_at IS NULL")
    assert [tuple(row) for row in rows] == [("month", "hard", 3_000_000)]
    await spend(gateway, tenant, 3_000_000)
    assert (await limits.retrieve(tenant)).enforcement.status == "enforcing"
    with pytest.raises(openai.RateLimitError) as refused:
        await chat(gateway)
    assert refused.value.code == "insufficient_quota"
    gone = await limits.delete(tenant)
    assert (gone.object, gone.deleted) == ("project.spend_limit.deleted", True)
    with pytest.raises(openai.NotFoundError):
        await limits.retrieve(tenant)
    await chat(gateway)


@pytest.mark.rest
async def test_the_organizations_limit_refuses_every_tenant_within_five_seconds(gateway, organization):
    terms = {"currency": "USD", "interval": "month"}
    await organization.spend_limit.update(threshold_amount=100, **terms)
    await chat(gateway)
    _, other = await gateway.new_tenant("other")
    tenant, _ = await gateway.new_tenant("spender")
    await spend(gateway, tenant, 100 * spend_limits.MICRO_UNITS_PER_CENT)
    await until(lambda: gateway.app[SPENDING].reached, stretched(5))
    with pytest.raises(openai.RateLimitError) as refused:
        await chat(gateway, other)
    assert refused.value.code == "insufficient_quota"
    assert refused.value.response.headers["x-should-retry"] == "false"
    found = await organization.spend_limit.retrieve()
    assert (found.object, found.enforcement.status) == ("organization.spend_limit", "enforcing")
    assert (await organization.spend_limit.delete()).deleted
    await until(lambda: not gateway.app[SPENDING].reached, 5)
    await chat(gateway, other)


async def test_spend_alerts_have_all_verbs_for_projects_and_the_organization(gateway, organization):
    tenant = gateway.keys.tenant_id
    terms = {"currency": "USD", "interval": "month", "notification_channel": EMAIL}
    alerts = organization.projects.spend_alerts
    made = [await alerts.create(tenant, threshold_amount=n, **terms) for n in (10, 20, 30)]
    assert made[0].object == "project.spend_alert"
    assert made[0].notification_channel.recipients == ["ops@example.org"]
    listed = [alert.threshold_amount async for alert in alerts.list(tenant, limit=2)]
    assert sorted(listed) == [10, 20, 30]
    changed = await alerts.update(made[0].id, project_id=tenant, threshold_amount=15, **terms)
    read = await alerts.retrieve(made[0].id, project_id=tenant)
    assert changed == read
    assert read.threshold_amount == 15
    assert (await alerts.delete(made[0].id, project_id=tenant)).deleted
    with pytest.raises(openai.NotFoundError):
        await alerts.retrieve(made[0].id, project_id=tenant)
    foreign, _ = await gateway.new_tenant("other")
    with pytest.raises(openai.NotFoundError):
        await alerts.retrieve(made[1].id, project_id=foreign)
    own = await organization.spend_alerts.create(threshold_amount=5, **terms)
    assert own.object == "organization.spend_alert"
    updated = await organization.spend_alerts.update(own.id, threshold_amount=6, **terms)
    assert updated.threshold_amount == 6
    assert [a.id async for a in organization.spend_alerts.list()] == [own.id]
    assert (await organization.spend_alerts.retrieve(own.id)).id == own.id
    assert (await organization.spend_alerts.delete(own.id)).deleted


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("threshold_amount", -1),
        ("threshold_amount", True),
        ("currency", "EUR"),
        ("interval", "day"),
        ("notification_channel", {"type": "sms", "recipients": ["a@b"]}),
        ("notification_channel", {"type": "email", "recipients": ["a@b\r\nbcc: c@d"]}),
        ("notification_channel", {"type": "email", "recipients": ["a@b"], "subject_prefix": "x\nbcc: c@d"}),
        ("notification_channel", {"type": "email", "recipients": []}),
        ("notification_channel", {"type": "email", "recipients": ["a@b\n"]}),
        ("notification_channel", {"type": "email", "recipients": ["a@b,c@d"]}),
        ("notification_channel", {"type": "email", "recipients": ["a@b"], "subject_prefix": "x\n"}),
    ],
)
async def test_an_alert_that_makes_no_sense_is_a_400_that_names_the_field(shared_gateway, field, value):
    terms = {"threshold_amount": 1, "currency": "USD", "interval": "month", "notification_channel": EMAIL}
    async with shared_gateway.operator() as client:
        with pytest.raises(openai.BadRequestError) as refused:
            await client.admin.organization.spend_alerts.create(**{**terms, field: value})
    assert (refused.value.param or "").startswith(field)


async def test_model_permissions_bind_every_key_of_the_project(gateway, organization):
    permissions = organization.projects.model_permissions
    tenant = gateway.keys.tenant_id
    before = await permissions.retrieve(tenant)
    assert (before.mode, before.api_model_ids) == ("deny_list", [])
    await chat(gateway)
    stored = await permissions.update(tenant, mode="deny_list", model_ids=[MODEL])
    assert (stored.object, stored.api_model_ids) == ("project.model_permissions", [MODEL])
    with pytest.raises(openai.PermissionDeniedError) as refused:
        await chat(gateway)
    assert refused.value.code == "model_not_allowed"
    async with gateway.client() as client:
        assert (await client.models.list()).data == []
    await permissions.update(tenant, mode="allow_list", model_ids=[MODEL, "another"])
    await chat(gateway)
    await permissions.update(tenant, mode="allow_list", model_ids=["another"])
    with pytest.raises(openai.PermissionDeniedError):
        await chat(gateway)
    gone = await permissions.delete(tenant)
    assert (gone.object, gone.deleted) == ("project.model_permissions.deleted", True)
    await chat(gateway)


class Post:
    """An SMTP server that takes everything."""

    def __init__(self) -> None:
        self.letters: list[str] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 post\r\n")
        while line := await reader.readline():
            verb = line[:4].upper().strip()
            if verb == b"DATA":
                writer.write(b"354 go\r\n")
                letter = await reader.readuntil(b"\r\n.\r\n")
                self.letters.append(letter.decode())
            writer.write(b"221 bye\r\n" if verb == b"QUIT" else b"250 post\r\n")
            if verb == b"QUIT":
                break
        writer.close()


async def test_an_alert_is_mailed_once_a_month_and_threshold(tmp_path, redis_url, monkeypatch):
    monkeypatch.setattr("gateway.books.spending.EVERY_S", 0.05)
    monkeypatch.setattr("gateway.books.spending.ALERTS_EVERY_S", 0.05)
    post = Post()
    server = await asyncio.start_server(post.serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with (
        server,
        running_gateway(tmp_path, redis_url, smtp_url=f"smtp://127.0.0.1:{port}") as gateway,
        openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="", admin_api_key=gateway.keys.admin_key) as client,
    ):
        terms = {"currency": "USD", "interval": "month", "notification_channel": EMAIL}
        alerts = client.admin.organization.projects.spend_alerts
        await alerts.create(gateway.keys.tenant_id, threshold_amount=200, **terms)
        await alerts.create(gateway.keys.tenant_id, threshold_amount=900, **terms)
        await spend(gateway, gateway.keys.tenant_id, 2_500_000)
        await until(lambda: post.letters, 10)
        await spend(gateway, gateway.keys.tenant_id, 100_000, "req_more")
        await asyncio.sleep(0.5)
    [letter] = post.letters
    assert "To: ops@example.org" in letter
    assert "Subject: [farm] Spend alert: 2.00 USD this month" in letter
    assert "2.50 USD" in letter
