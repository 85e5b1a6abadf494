"""The screens of tenants and limits: what the operator changes there, and what a tenant sees of its own."""

from __future__ import annotations

import re
import time
from urllib.parse import quote

import pytest
from console_pages import signed_in
from gateways import MODEL, RunningGateway
from money import posting

from accounting.requests import request_postings
from accounting.values.types import Charge, Usage
from gateway.base.app_keys import DATABASE

pytestmark = pytest.mark.asyncio(loop_scope="module")
PROBE = "<script>alert(1)</script>\"'"
FORMULA = "=cmd|' /C calc'!A0"


async def test_a_tenant_is_made_suspended_resumed_and_archived(shared_gateway: RunningGateway) -> None:
    async with signed_in(shared_gateway, shared_gateway.keys.admin_key) as operator:
        await operator.get("/tenants")
        page = await operator.submit("/tenants", name=PROBE)
        assert "Tenant " + PROBE in page.words
        assert "<script>alert" not in page.text
        path = page.path.removeprefix("/console").partition("?")[0]
        assert "The tenant is suspended." in (await operator.submit(f"{path}/suspend")).words
        assert "State suspended" in (await operator.get(path)).words
        assert "State active" in (await operator.submit(f"{path}/resume")).words
        assert "State archived" in (await operator.submit(f"{path}/archive")).words
        assert 'method="post" action="/console/tenants' not in (await operator.get(path)).text
        await operator.get("/tenants")
        page = await operator.submit("/tenants", name=" ")
        assert (page.status, "1 to 200" in page.words or "name" in page.words) == (400, True)


async def test_names_are_inert_in_exports(shared_gateway: RunningGateway) -> None:
    await shared_gateway.new_tenant(FORMULA)
    async with signed_in(shared_gateway, shared_gateway.keys.admin_key) as operator:
        assert "'" + FORMULA in (await operator.get("/tenants?format=csv")).text


async def test_limits_budgets_and_alerts_are_edited(shared_gateway: RunningGateway) -> None:
    tenant, key = await shared_gateway.new_tenant("bounded")
    path = f"/tenants/{tenant}"
    async with signed_in(shared_gateway, shared_gateway.keys.admin_key) as operator:
        await operator.get(path)
        page = await operator.submit(f"{path}/limits", max_requests_per_1_minute="77", max_tokens_per_1_minute="")
        assert "The change is stored." in page.words
        page = await operator.submit(
            f"{path}/limits", model=MODEL, max_requests_per_1_minute="55", max_tokens_per_1_minute="6666"
        )
        page = await operator.submit(
            f"{path}/budgets", period="day", amount="12.5", kind="hard", model="", api_key_id=""
        )
        assert "0.000000 USD of 12.500000 USD" in page.words
        page = await operator.submit(f"{path}/spend-limit", amount="99.50")
        assert "Limit: 99.50 USD, not reached." in page.words
        page = await operator.submit(f"{path}/alerts", amount="80.00", recipients="a@example.com, b@example.com")
        assert "Mail to a@example.com, b@example.com at 80.00 USD" in page.words
        for wrong, fields in (
            ("limits", {"max_requests_per_1_minute": PROBE, "max_tokens_per_1_minute": ""}),
            ("budgets", {"period": "day", "amount": PROBE}),
            ("spend-limit", {"amount": "1.234"}),
            ("alerts", {"amount": "1.00", "recipients": PROBE}),
        ):
            page = await operator.submit(f"{path}/{wrong}", **fields)
            says = "An amount in USD has at most 2 decimals." if wrong == "spend-limit" else "Invalid value"
            assert (page.status, says in page.words) == (400, True), wrong
            assert "<script>alert" not in page.text
        page = await operator.get(f"{path}?format=csv")
        assert "requests a minute" in page.text
        [alert] = re.findall(r"alerts/(\w+)/delete", (await operator.get(path)).text)
        assert "Mail to a@example.com" not in (await operator.submit(f"{path}/alerts/{alert}/delete")).words
        assert "No spend limit is set." in (await operator.submit(f"{path}/spend-limit", delete="yes")).words
        [budget] = re.findall(r"Deletion of budget (\w+)", operator.last.text if operator.last else "")
        await operator.submit(f"{path}/spend-limit", amount="99.50")
        page = await operator.submit(f"{path}/budgets/{budget}", amount="13")
        assert "of 13.000000 USD" in page.words
    async with signed_in(shared_gateway, key) as own:
        page = await own.get("/limits")
        for words in ("77", "55", "6,666", "13.000000 USD", "99.500000 USD"):
            assert words in page.words, words
        assert (await own.get(path)).status == 403
        await own.get("/limits")
        assert (await own.submit(f"{path}/limits", max_requests_per_1_minute="9999")).status == 403


async def test_a_model_with_a_slash_in_its_name_has_limits_and_links(shared_gateway: RunningGateway) -> None:
    gateway, model = shared_gateway, "org/model-7b v1"
    tenant, _ = await gateway.new_tenant("slashed")
    rates = {"model": model, "tier": "interactive", "cache_read": 1, "cache_write": 1, "uncached": 1, "output": 1}
    async with gateway.session(gateway.keys.admin_key) as admin:
        body = {"sheet": "slashes", "rates": [rates], "currency": "EUR"}
        async with admin.post("/admin/v1/price-sheets", json=body) as answer:
            assert answer.status == 200, await answer.text()
        async with admin.put(f"/admin/v1/tenants/{tenant}/price-sheet", json={"sheet": "slashes"}) as answer:
            assert answer.status == 200, await answer.text()
    async with signed_in(gateway, gateway.keys.admin_key) as operator:
        page = await operator.get(f"/tenants/{tenant}")
        assert model in page.words
        page = await operator.submit(
            f"/tenants/{tenant}/limits", model=model, max_requests_per_1_minute="4321", max_tokens_per_1_minute="8765"
        )
        assert (page.status, "The change is stored." in page.words) == (200, True), page.words
        assert 'value="4321"' in page.text
        for path in ("requests", "sessions", "usage", "usage/labels"):
            page = await operator.get(f"/{path}?model={quote(model, safe='')}")
            assert (page.status, model in page.text) == (200, True)
        assert (await operator.get("/prices/slashes/1")).status == 200
        # The tenant pays in euros, and every amount on its page says so.
        await operator.get(f"/tenants/{tenant}")
        page = await operator.submit(f"/tenants/{tenant}/budgets", period="day", amount="2", kind="hard")
        assert "of 2.000000 EUR" in page.words
        assert "budget – all 0.0 % 2.000000 EUR 0.000000 EUR" in page.words


async def test_a_limit_is_previewed_and_not_stored(shared_gateway: RunningGateway) -> None:
    gateway = shared_gateway
    tenant, _ = await gateway.new_tenant("previewed")
    minute_ms = time.time_ns() // 60_000_000_000 * 60_000 - 3_600_000
    async with gateway.app[DATABASE].write() as conn:
        of_tenant = {"tenant_id": tenant, "opened_at_ms": minute_ms}
        posted = [posting(f"req_preview{n}", Usage(0, 0, 5, 5), **of_tenant) for n in range(10)]
        await request_postings.post(conn, 77, 1, posted)
    async with signed_in(gateway, gateway.keys.admin_key) as operator:
        await operator.get(f"/tenants/{tenant}")
        page = await operator.submit(f"/tenants/{tenant}/limits", max_requests_per_1_minute="4", preview="yes")
        assert "would have refused 6 of 10 requests of the last 7 days" in page.words
        assert 'value="4"' in page.text, "the form keeps what was tried"
        page = await operator.submit(
            f"/tenants/{tenant}/limits", model="other", max_tokens_per_1_minute="4", preview="yes"
        )
        assert "sent no such requests" in page.words
        page = await operator.get(f"/tenants/{tenant}")
        assert 'value="4"' not in page.text
        assert (await operator.submit("/tenants/proj_none/limits", preview="yes")).status == 404


async def test_a_budget_and_quotas_are_previewed_and_not_stored(shared_gateway: RunningGateway) -> None:
    """They were tried for requests and tokens a minute only."""
    gateway = shared_gateway
    tenant, _ = await gateway.new_tenant("tried")
    path = f"/tenants/{tenant}"
    minute_ms = time.time_ns() // 60_000_000_000 * 60_000
    async with gateway.app[DATABASE].write() as conn:
        of_tenant = {"tenant_id": tenant, "opened_at_ms": minute_ms, "charge": Charge(100, 0, 0, 0, 100)}
        posted = [posting(f"req_tried{n}", Usage(0, 0, 50, 5), **of_tenant) for n in range(10)]
        await request_postings.post(conn, 79, 1, posted)
    async with signed_in(gateway, gateway.keys.admin_key) as operator:
        await operator.get(path)
        new = {"period": "hour", "amount": "0.0006", "kind": "hard", "model": "", "api_key_id": ""}
        page = await operator.submit(f"{path}/budgets", **new, preview="yes")
        assert "would have refused 4 of 10 requests of the last 7 days, in 1 hour" in page.words
        assert ('value="0.0006"' in page.text, "No budget is set." in page.words) == (True, True)
        page = await operator.submit(f"{path}/budgets", **new)
        [budget] = re.findall(r"Deletion of budget (\w+)", page.text)
        page = await operator.submit(f"{path}/budgets/{budget}", amount="0.0001", preview="yes")
        assert "would have refused 9 of 10 requests" in page.words
        assert "of 0.000600 USD" in page.words, "nothing is stored"
        for dimension, limit, refused in (
            ("input_tokens_per_minute", "250", 5),
            ("output_tokens_per_minute", "49", 1),
            ("requests_per_day", "3", 7),
        ):
            quota = {"level": "tenant", "dimension": dimension, "subject": "", "limit": limit}
            page = await operator.submit(f"{path}/quotas", **quota, preview="yes")
            assert f"would have refused {refused} of 10 requests" in page.words, dimension
            assert "No quota is set." in page.words
        of_users = {"level": "end_user", "dimension": "requests_per_day", "subject": "", "limit": "1"}
        page = await operator.submit(f"{path}/quotas", **of_users, preview="yes")
        assert (page.status, "can be tried on past requests" in page.words) == (400, True)


async def test_quotas_are_set_and_removed_and_those_that_watch_say_what_they_would_have_refused(
    shared_gateway: RunningGateway,
) -> None:
    gateway = shared_gateway
    tenant, key = await gateway.new_tenant("watched")
    [[key_id]] = await gateway.sql("SELECT id FROM api_key WHERE tenant_id = :t", t=tenant)
    path = f"/tenants/{tenant}"
    quota = {"level": "key", "dimension": "requests_per_day", "subject": key_id}
    async with signed_in(gateway, gateway.keys.admin_key) as operator:
        await operator.get(path)
        page = await operator.submit(f"{path}/quotas", **quota, limit="")
        assert (page.status, "No quota is set." in page.words) == (400, True)
        page = await operator.submit(f"{path}/quotas", **quota, limit="0", shadow="on")
        assert "of one key " + key_id + " : 0, watches only" in page.words, page.words
        async with gateway.session(key) as session:
            body = {"model": MODEL, "prompt": "the water", "max_tokens": 2}
            async with session.post("/v1/completions", json=body) as answer:
                assert answer.status == 200, await answer.text()
        page = await operator.get(f"/keys/{key_id}")
        assert re.search(r"key requests a day – interactive – 0 1 0 0 \S+ \S+( UTC)? watches only 1", page.words), (
            page.words
        )
        text = (await operator.get(f"/keys/{key_id}?format=csv")).text
        assert (text.count("watches only"), "would_have_refused" in text) == (1, True)
        await operator.get(path)
        page = await operator.submit(f"{path}/quotas", **quota, delete="yes")
        assert "No quota is set." in page.words
        await operator.submit(
            f"{path}/quotas", level="key", dimension="requests_per_day", subject="key_none", limit="3"
        )
        assert operator.last is not None
        assert (operator.last.status, "has no such api key" in operator.last.words) == (400, True)
