"""Every table of every page has an export, and the export's rows are those of the table."""

from __future__ import annotations

import csv
import io
import re
import time
from collections import deque
from html import unescape

import pytest
import pytest_asyncio
from console_pages import Browser, signed_in
from console_world import spend
from gateways import MODEL, RunningGateway

from accounting.requests import request_log
from accounting.requests.request_log import LoggedRequest
from gateway.base.app_keys import DATABASE

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(120)]
MAX_PAGES = 60
BY_HAND = {"causes"}
"""Tables that are drawn with bars beside their rows. Their exports are the rows."""


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def tenant(shared_gateway: RunningGateway) -> str:
    """The id of a tenant with what tables show: charges, failed requests, an upstream, a budget, a webhook."""
    gateway = shared_gateway
    tenant_id, _ = await gateway.new_tenant("exported")
    await spend(gateway, tenant_id)
    at_ms = int(time.time() * 1000) - 60_000
    failed = LoggedRequest(
        request_id=f"req_{at_ms:012x}7{1:019x}",
        is_tail=True,
        started_at_ms=at_ms,
        tenant_id=tenant_id,
        key_id="key_1",
        endpoint="POST /v1/chat/completions",
        model=MODEL,
        status=429,
        outcome="refused",
        error_code="insufficient_quota",
        session_id="talk",
        trace_id="b" * 32,
        timeline="[[[0,0]],[],0]",
    )
    other = {"status": 429, "outcome": "refused", "error_code": "rate_limit_exceeded"}
    async with gateway.app[DATABASE].write() as conn:
        rows = [failed]
        for number in (2, 3):
            name = f"req_{at_ms:012x}7{number:019x}"
            rows.append(LoggedRequest(**{**_fields(failed), **other, "request_id": name}))
        await request_log.add(conn, rows)
    upstream = {"name": "spare", "url": "http://127.0.0.1:9/v1", "models": {"spare": {}}}
    async with gateway.session(gateway.keys.admin_key) as admin:
        for path, body in (
            ("/admin/v1/upstreams", upstream),
            ("/admin/v1/budgets", {"project_id": tenant_id, "period": "month", "limit_micro_units": 10**9}),
            ("/admin/v1/webhooks", {"url": "https://example.com/hook"}),
        ):
            async with admin.post(path, json=body) as answer:
                assert answer.status == 200, await answer.text()
    return tenant_id


def _fields(one: LoggedRequest) -> dict[str, object]:
    return {name: getattr(one, name) for name in one.__struct_fields__}


async def exported(one: Browser, starts: list[str]) -> dict[str, str]:
    """Walks from link to link and compares each table with its export. Returns the page of each table by its name."""
    waiting, seen, found = deque(starts), set(), {}
    num_pages = 0
    while waiting and num_pages < MAX_PAGES:
        path = waiting.popleft()
        kind = re.sub(r"/[^/]*[0-9@_][^/]*", "/*", path.partition("?")[0])
        if kind in seen or "format=" in path or "/assets/" in path:
            continue
        seen.add(kind)
        page = await one.get(path)
        if page.status >= 400 or not page.headers["content-type"].startswith("text/html"):
            continue
        num_pages += 1
        head, *parts = re.split(r'<table(?! class="waterfall")', page.text)
        named = re.findall(r'aria-label="Table: ([^"]*)">\s*$', head)
        for part in parts:
            link = re.search(r'href="/console([^"]*format=csv[^"]*)"', part)
            assert link is not None, f"{path}: a table without an export"
            file = await one.get(unescape(link[1]))
            assert file.status == 200, (path, link[1])
            [name] = re.findall(r'filename="headgate-(.*)\.csv"', file.headers["content-disposition"])
            if name not in BY_HAND:
                assert named == [name], f"{path}: the export of {named} is {name}"
                rows = list(csv.reader(io.StringIO(file.text)))[1:]
                body = part.partition("</tbody>")[0]
                assert "Next page" in page.text or len(rows) == body.count("<tr>") - 1, (path, name)
            found[name] = path
            named = re.findall(r'aria-label="Table: ([^"]*)">\s*$', part)
        for link in re.findall(r'href="/console([^"#]*)', page.text):
            waiting.append(unescape(link))
    return found


async def test_every_table_of_every_screen_is_exported_as_itself(shared_gateway: RunningGateway, tenant: str) -> None:
    """The export of Upstreams gave the workers; Home's failures and a worker's kernels had none."""
    async with signed_in(shared_gateway, shared_gateway.keys.admin_key) as operator:
        starts = [
            "",
            f"/tenants/{tenant}",
            f"/keys?project_id={tenant}",
            "/usage/labels",
            f"/prices?tenant_id={tenant}",
        ]
        starts += [f"/usage/changes?project_id={tenant}", "/prices/month?sheet=standard@1", "/sessions", "/requests"]
        found = await exported(operator, starts)
    expected = {
        "workers",
        "upstreams",
        "kernels",
        "graphs",
        "failures",
        "limits",
        "top-tenants",
        "requests",
        "keys",
        "tenants",
    }
    expected |= {"usage-by-time", "settings", "checks", "sessions", "session", "events"}
    assert expected <= found.keys(), expected - found.keys()
    async with signed_in(shared_gateway) as own:
        assert {"limits", "keys", "requests"} & (await exported(own, ["", "/limits", "/requests"])).keys()


async def test_a_cause_of_failures_leads_to_the_requests_that_it_counts(
    shared_gateway: RunningGateway, tenant: str
) -> None:
    """`429 insufficient_quota: 1` led to everything that was refused."""
    async with signed_in(shared_gateway, shared_gateway.keys.admin_key) as operator:
        page = await operator.get("")
        assert "429 insufficient_quota 1" in page.words
        [link] = re.findall(r'href="/console(/requests[^"]*error_code=insufficient_quota[^"]*)"', page.text)
        rows = list(csv.DictReader(io.StringIO((await operator.get(unescape(link) + "&format=csv")).text)))
        assert [(row["outcome"], row["project_id"]) for row in rows] == [("refused", tenant)]
