"""The shares of tenants: received against promised, waits and refusals, on the API and on the screen."""

from __future__ import annotations

import asyncio
import time

import pytest
from console_pages import signed_in
from gateways import MODEL, RunningGateway

from accounting.tenants import tenants
from accounting.values.types import CacheShare, Limits
from gateway.base.app_keys import DATABASE
from gateway.schema import fairness as shapes
from workers.engine.queueing import fairness as scheduler


def test_tokens_weigh_as_they_do_in_the_scheduler() -> None:
    assert shapes.COMPUTED_COST == scheduler.COMPUTED_CHARGE
    assert shapes.CACHED_COST == scheduler.CACHED_CHARGE
    assert shapes.OUTPUT_COST == scheduler.OUTPUT_CHARGE


async def ask(gateway: RunningGateway, key: str, num_tokens: int) -> int:
    body = {"model": MODEL, "prompt": "x" * 9, "max_tokens": num_tokens}
    async with gateway.session(key) as session, session.post("/v1/completions", json=body) as answer:
        await answer.read()
        return answer.status


@pytest.mark.usefixtures("worker")
async def test_shares_follow_weights_and_refusals_name_the_limit(gateway: RunningGateway) -> None:
    tenant_id, key = await gateway.new_tenant("heavy")
    now = int(time.time())
    async with gateway.app[DATABASE].write() as conn:
        await tenants.set_shares(conn, tenant_id, 3.0, CacheShare(), floor_limit=None, now=now)
        await tenants.set_limits(conn, tenant_id, Limits(requests_per_minute=1), now=now)
    assert await ask(gateway, gateway.keys.api_key, 20) == 200
    assert [await ask(gateway, key, 10), await ask(gateway, key, 10)] == [200, 429]
    await gateway.settled()

    async def rows() -> int:
        return (await gateway.sql("SELECT count(*) FROM request_log WHERE endpoint LIKE '%completions'"))[0][0]

    num_rows = 0
    while num_rows < 3:
        num_rows = await rows()
    async with gateway.session(gateway.keys.admin_key) as http, http.get("/admin/v1/fairness") as answer:
        found = await answer.json()
    of = {one["project_id"]: one for one in found["tenants"]}
    light, heavy = of[gateway.keys.tenant_id], of[tenant_id]
    assert (light["promised_share"], heavy["promised_share"]) == (0.25, 0.75)
    assert (light["service_tokens"], heavy["service_tokens"]) == (9 + 2 * 20, 9 + 2 * 10)
    assert light["received_share"] + heavy["received_share"] == pytest.approx(1)
    assert heavy["mean_queue_ms"] >= 0
    assert found["refusals"] == [{"project_id": tenant_id, "code": "rate_limit_exceeded", "num_requests": 1}]

    async with signed_in(gateway, gateway.keys.admin_key) as operator:
        page = await operator.get("/fairness?minutes=5")
        assert f"rate_limit_exceeded 1 {tenant_id}" in page.words
        assert "promised 75.0 %" in page.words
        exported = (await operator.get("/fairness?table=refusals&format=csv")).text
        assert exported.splitlines()[1] == f'"heavy","rate_limit_exceeded",1,"{tenant_id}"'
        page = await operator.get("/fairness?minutes=<script>alert(1)</script>")
        assert (page.status, "<script>alert" in page.text) == (400, False)
        # Until the worker's next report, in which nobody runs any more.
        while "Nobody was served" not in (await operator.get("/fairness?tier=batch")).words:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    async with signed_in(gateway) as tenant:
        assert (await tenant.get("/fairness")).status == 403
