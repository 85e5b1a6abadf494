"""The screens of workers: what they show, the drain behind its confirming page, and who may not."""

from __future__ import annotations

import time
from urllib.parse import quote

from console_pages import signed_in
from fakes import ScriptedWorker
from gateways import MODEL, PEPPER, RunningGateway, until

from accounting.access import api_keys
from accounting.values.types import OPERATOR_TENANT
from gateway.base.app_keys import DATABASE
from gateway.generation.stream import GENERATION

PROBE = "<script>alert(1)</script>\"'"


async def read_only_key(gateway: RunningGateway) -> str:
    async with gateway.app[DATABASE].write() as conn:
        made = await api_keys.create(
            conn, PEPPER, tenant_id=OPERATOR_TENANT, now=int(time.time()), kind="admin", scopes=["admin:read"]
        )
    return made.value


async def test_a_worker_is_drained_behind_a_page_that_says_what_it_costs(
    gateway: RunningGateway, worker: ScriptedWorker
) -> None:
    async with gateway.client() as client:
        await client.completions.create(model=MODEL, prompt="twenty tokens", max_tokens=20)
    link = gateway.app[GENERATION].fleet.links[0]
    await until(lambda: link.report.step_times.num_steps >= 8 and link.report.tenants)
    one, ask = f"/workers/{worker.worker}", f"/workers/{worker.worker}/drain"
    async with signed_in(gateway, await read_only_key(gateway)) as finance:
        assert worker.worker in (await finance.get("/workers")).words
        assert "Drain this worker" not in (await finance.get(one)).words
        assert ((await finance.submit(ask)).status, link.status.draining) == (403, False)
    async with signed_in(gateway, gateway.keys.admin_key) as operator:
        page = await operator.get("/workers")
        assert all(text in page.words for text in (worker.worker, "ready", "Gateway 0 answered"))
        exported = (await operator.get("/workers?format=csv")).text
        assert exported.splitlines()[1].startswith(f'"{worker.worker}","ready"')
        page = await operator.get(one)
        assert gateway.keys.tenant_id in page.words
        assert "attention torch twin" in page.words
        assert "Recorded steps (CUDA graphs)" in page.words
        exported = (await operator.get(f"{one}?table=graphs&format=csv")).text.splitlines()
        assert exported == ['"num_rows","state"', '8,"equal"', '16,"differs"']
        assert "Duration of the last" in page.words
        assert "1 sequences, 0 prompt and 1 output tokens" in page.words
        assert "No other worker serves" in (await operator.get(ask)).words
        page = await operator.submit(ask)
        assert (page.status, page.path) == (200, f"/console{one}?asked=drain")
        await until(lambda: link.status.draining)
        assert "Nothing is left" in (await operator.get(one)).words
        async with signed_in(gateway, await read_only_key(gateway)) as finance:
            assert "Take requests again" not in (await finance.get(one)).words
        page = await operator.submit(f"{one}/resume")
        assert (page.status, page.path) == (200, f"/console{one}?asked=resume")
        await until(lambda: not link.status.draining)
        assert "Drain this worker" in (await operator.get(one)).words


async def test_tenants_see_no_workers_and_an_unknown_one_is_said_to_be_unknown(bare_gateway: RunningGateway) -> None:
    async with signed_in(bare_gateway) as tenant:
        assert "/console/workers" not in (await tenant.get("")).text
        for path in ("/workers", "/workers/worker-0", "/workers/worker-0/drain"):
            assert (await tenant.get(path)).status == 403
        await tenant.get("")
        assert (await tenant.submit("/workers/worker-0/drain")).status == 403
    async with signed_in(bare_gateway, bare_gateway.keys.admin_key) as operator:
        assert "No worker is linked" in (await operator.get("/workers")).words
        page = await operator.get("/workers/" + quote(PROBE, safe=""))
        assert (page.status, "<script>alert" in page.text) == (404, False)
