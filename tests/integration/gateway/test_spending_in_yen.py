"""Spend limits, alerts and budgets of tenants that pay in yen, beside others that pay in dollars."""

from __future__ import annotations

import json
import time

import openai
import pytest
import pytest_asyncio
from fakes import ScriptedWorker
from gateways import MODEL, RunningGateway, running_gateway
from money import posting

from accounting.limits import spend_limits
from accounting.limits.spend_alerts import DueAlert, SpendAlertInfo
from accounting.prices import prices
from accounting.requests import request_postings
from accounting.values.types import Charge, Rates
from gateway.base.app_keys import DATABASE
from gateway.books import spending

YEN = 1_000_000
A_YEN_PER_TOKEN = Rates(cache_read=0, cache_write=0, uncached=0, output=YEN * 1_000_000)
MONTHLY = {"interval": "month"}
CHANNEL = {"type": "email", "recipients": ["ops@example.org"]}


@pytest.fixture
async def gateway(tmp_path, redis_url):
    async with (
        running_gateway(tmp_path / "home", redis_url) as running,
        ScriptedWorker(tmp_path / "w0.sock", redis_url=redis_url),
    ):
        await running.workers(1)
        yield running


async def made_payer(gateway: RunningGateway) -> tuple[str, str]:
    """Returns a tenant that pays one yen for each token of an answer, with its key."""
    tenant, key = await gateway.new_tenant("payer")
    async with gateway.app[DATABASE].write() as conn:
        await prices.create_sheet(conn, "yen", "JPY", 1)
        tiers = ("interactive", "batch")
        await prices.add_version(conn, "yen", {(MODEL, tier): A_YEN_PER_TOKEN for tier in tiers}, 1000)
        await prices.assign(conn, tenant, "yen", 1000)
    return tenant, key


@pytest.fixture
async def payer(gateway: RunningGateway) -> tuple[str, str]:
    return await made_payer(gateway)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def shared_payer(shared_gateway: RunningGateway) -> str:
    """One for all that are refused."""
    tenant, _ = await made_payer(shared_gateway)
    return tenant


async def spend(gateway: RunningGateway, tenant: str, micro_units: int, **changes) -> None:
    now_ms = time.time_ns() // 1_000_000
    charge = Charge(micro_units, 0, 0, 0, micro_units)
    entry = posting(f"req_{tenant}_{micro_units}", tenant_id=tenant, charge=charge, opened_at_ms=now_ms, **changes)
    async with gateway.app[DATABASE].write() as conn:
        await request_postings.post(conn, 7, now_ms, [entry])


async def chat(gateway: RunningGateway, key: str):
    async with gateway.client(key) as client:
        return await client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "hi"}], max_tokens=1
        )


async def call(gateway: RunningGateway, method: str, path: str, body: dict | None = None) -> tuple[int, dict]:
    async with gateway.session(gateway.keys.admin_key) as admin, admin.request(method, path, json=body) as answer:
        return answer.status, await answer.json()


def project(tenant: str, what: str = "spend_limit") -> str:
    return f"/v1/organization/projects/{tenant}/{what}"


async def test_a_limit_of_1000_yen_refuses_the_token_after_the_thousandth(gateway, payer):
    tenant, key = payer
    status, made = await call(
        gateway, "POST", project(tenant), {"threshold_amount": 1000, "currency": "JPY", **MONTHLY}
    )
    assert status == 200, made
    assert (made["threshold_amount"], made["amount"], made["currency"]) == (1000, "1000", "JPY")
    rows = await gateway.sql("SELECT limit_micro_units FROM budget WHERE deleted_at IS NULL")
    assert [row.limit_micro_units for row in rows] == [1000 * YEN]
    await spend(gateway, tenant, 999 * YEN, currency="JPY", price_version="yen@1")
    assert (await call(gateway, "GET", project(tenant)))[1]["enforcement"]["status"] == "inactive"
    await chat(gateway, key)
    with pytest.raises(openai.RateLimitError) as refused:
        await chat(gateway, key)
    assert refused.value.code == "insufficient_quota"
    assert f"hard budget of project {tenant}: 1000 JPY." in refused.value.message


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("what", ["spend_limit", "spend_alerts"])
@pytest.mark.parametrize(
    ("given", "says", "param"),
    [
        ({"threshold_amount": 1000, "currency": "USD"}, "This project pays in JPY", "currency"),
        ({"amount": "12", "currency": "EUR"}, "This project pays in JPY", "currency"),
        ({"amount": "12.50"}, "An amount in JPY has at most 0 decimals.", "amount"),
        ({"threshold_amount": 1000}, "Missing required parameter: 'currency'", "currency"),
        ({"threshold_amount": 1, "amount": "1", "currency": "JPY"}, "not both", "amount"),
        ({"currency": "JPY"}, "Missing required parameter: 'threshold_amount'", "threshold_amount"),
        ({"amount": "-1"}, "digits and one decimal point", "amount"),
        ({"amount": "999999999999"}, "At most", "amount"),
    ],
)
async def test_another_currency_and_amounts_that_nobody_pays_are_refused(
    shared_gateway, shared_payer, what, given, says, param
):
    body = {**given, **MONTHLY} | ({"notification_channel": CHANNEL} if what == "spend_alerts" else {})
    status, answer = await call(shared_gateway, "POST", project(shared_payer, what), body)
    assert status == 400, answer
    assert says in answer["error"]["message"]
    assert answer["error"]["param"] == param


async def test_a_budget_in_another_currency_is_refused(gateway, payer):
    body = {"project_id": payer[0], "period": "day", "limit_micro_units": YEN, "currency": "USD"}
    status, answer = await call(gateway, "POST", "/admin/v1/budgets", body)
    assert (status, answer["error"]["param"]) == (400, "currency")
    status, made = await call(gateway, "POST", "/admin/v1/budgets", {**body, "currency": "jpy"})
    assert (status, made["currency"]) == (200, "JPY")
    one = f"/admin/v1/budgets/{made['id']}"
    assert (await call(gateway, "PATCH", one, {"limit_micro_units": 1, "currency": "EUR"}))[0] == 400
    moment = {"micro_units": 1, "from": 1, "to": 2}
    assert (await call(gateway, "POST", f"{one}/adjustments", {**moment, "currency": "EUR"}))[0] == 400


async def test_the_alert_at_80_percent_says_yen(gateway, payer):
    tenant, _ = payer
    hook = {"url": "https://example.com/", "project_id": tenant}
    assert (await call(gateway, "POST", "/admin/v1/webhooks", hook))[0] == 200
    await call(gateway, "POST", project(tenant), {"amount": "1000", **MONTHLY})
    await spend(gateway, tenant, 800 * YEN, currency="JPY", price_version="yen@1")
    rows = await gateway.sql("SELECT body FROM outbox WHERE type = 'headgate.budget.alert.v1'")
    told = [json.loads(row.body)["data"] for row in rows]
    assert {(one["threshold"], one["currency"], one["limit_micro_units"]) for one in told} == {
        (50, "JPY", 1000 * YEN),
        (80, "JPY", 1000 * YEN),
    }


async def test_the_organizations_limit_counts_only_its_own_currency(gateway, payer):
    tenant, _ = payer
    limit = {"threshold_amount": 100, "currency": "USD", **MONTHLY}
    assert (await call(gateway, "POST", "/v1/organization/spend_limit", limit))[0] == 200
    await spend(gateway, tenant, 1000 * YEN, currency="JPY", price_version="yen@1")
    async with gateway.app[DATABASE].read() as conn:
        assert await spend_limits.reached(conn, time.time_ns() // 1_000_000) is False
    await spend(gateway, gateway.keys.tenant_id, 1_000_000)
    async with gateway.app[DATABASE].read() as conn:
        assert await spend_limits.reached(conn, time.time_ns() // 1_000_000) is True


async def test_a_tenant_says_what_it_pays_in(gateway, payer):
    assert (await call(gateway, "GET", f"/admin/v1/tenants/{payer[0]}"))[1]["currency"] == "JPY"
    listed = (await call(gateway, "GET", "/admin/v1/tenants"))[1]["data"]
    assert {one["id"]: one["currency"] for one in listed} == {payer[0]: "JPY", gateway.keys.tenant_id: "USD"}


@pytest.mark.parametrize(
    ("currency", "cents", "spent", "subject", "says"),
    [
        ("JPY", 100_000, 1_234_567_890, "1000 JPY", "1234 JPY"),
        ("USD", 250, 2_507_999, "2.50 USD", "2.50 USD"),
        ("KWD", 250, 2_507_999, "2.500 KWD", "2.507 KWD"),
    ],
)
def test_the_mail_of_an_alert_is_in_the_tenants_currency(currency, cents, spent, subject, says):
    alert = SpendAlertInfo("spend_alert_1", "proj_a", cents, ("a@example.org",), None, 1)
    due = DueAlert(alert, "acme", 0, spent, currency)
    assert spending._subject(due) == f"Spend alert: {subject} this month"
    assert f"acme has spent {says} in January 1970" in spending._text(due)
    assert f"set at {subject};" in spending._text(due)
