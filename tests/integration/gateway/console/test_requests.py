"""The pages of requests: what filters find, what the histogram counts, and one request with its price and its spans."""

from __future__ import annotations

import asyncio
import csv
import functools
import io
import json
import re
import time
from datetime import UTC, datetime
from html import unescape
from typing import Any

import pytest
from billing_world import PERIOD, START
from console_pages import signed_in
from gateways import MODEL, RunningGateway
from money import posting
from yarl import URL

from accounting.prices import prices, pricing
from accounting.requests import request_log, request_postings
from accounting.requests.request_log import LoggedRequest
from accounting.values.types import Usage
from gateway.base.app_keys import DATABASE
from gateway.console.pages import EXPORTING

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROBE = "<script>alert(1)</script>\"'"
FORMULA = "=cmd|' /C calc'!A0"
TIMELINE = (
    "[[[0,0],[1,1000],[2,3000],[3,5000],[4,6000],[8,110000],[10,112000]],"
    "[[11,0],[12,4000,7,128],[13,20000,8,256],[14,30000,9,1],[8,100000]],0]"
)


@functools.cache
def half_an_hour_ago() -> int:
    """The same second for all rows of this file, however long they take: they belong into one bar of the histogram."""
    return int(time.time()) - 1800


def at_ms(number: int) -> int:
    return half_an_hour_ago() * 1000 + number


async def add(gateway: RunningGateway, number: int, **fields: Any) -> str:
    """A row of the log, `number` ms after half an hour ago. Returns its id."""
    row = {
        "request_id": f"req_{at_ms(number):012x}7{number:019x}",
        "is_tail": fields.get("outcome", "ok") != "ok",
        "started_at_ms": at_ms(number),
        "tenant_id": gateway.keys.tenant_id,
        "key_id": "key_1",
        "endpoint": "POST /v1/chat/completions",
        "model": MODEL,
        "status": 200,
        "outcome": "ok",
        "prompt_tokens": 500,
        "cached_tokens": 128,
        "cache_write_tokens": 256,
        "duration_ms": 113,
        "trace_id": f"{number:032x}",
        "timeline": TIMELINE,
        **fields,
    }
    async with gateway.app[DATABASE].write() as conn:
        await request_log.add(conn, [LoggedRequest(**row)])
    return row["request_id"]


async def test_filters_find_what_they_say_and_stay_in_the_form(shared_gateway: RunningGateway) -> None:
    slow = await add(shared_gateway, 1, duration_ms=987_654, key_id="key_slow")
    failed = await add(shared_gateway, 2, status=500, outcome="server_error", error_code="internal")
    early = await add(shared_gateway, 3 - 7_200_000, tier="batch", batch_id="batch_early", end_user="ann")
    minute = datetime.fromtimestamp(at_ms(0) / 1000 - 3600, UTC).strftime("%Y-%m-%dT%H:%M")
    async with signed_in(shared_gateway) as tenant:
        for query, there in (
            ("min_duration_ms=987654", {slow}),
            ("outcome=server_error&status_class=5xx", {failed}),
            ("api_key_id=key_slow", {slow}),
            (f"from={minute}", {slow, failed}),
            (f"until={minute}&model={MODEL}", {early}),
            (f"trace_id={1:032x}", {slow}),
            ("error_code=internal", {failed}),
            ("service_tier=batch", {early}),
            ("batch_id=batch_early", {early}),
            ("end_user=ann", {early}),
            ("", {slow, failed, early}),
        ):
            page = await tenant.get(f"/requests?{query}")
            assert page.status == 200
            assert {one for one in (slow, failed, early) if one in page.text} == there, query
            for name, value in (pair.split("=") for pair in query.split("&") if pair):
                assert f'value="{value}"' in page.text or f"selected>{value}" in page.text, (name, value)


async def test_a_wrong_filter_is_shown_with_the_sentence_and_its_value(shared_gateway: RunningGateway) -> None:
    async with signed_in(shared_gateway) as tenant:
        page = await tenant.get("/requests?from=yesterday")
        assert (page.status, "'from' must be a date and a time" in page.words) == (400, True)
        assert 'value="yesterday"' in page.text
        page = await tenant.get("/requests?min_duration_ms=-1")
        assert "'min_duration_ms' must be 0 to" in page.words


async def test_a_file_that_cannot_be_made_is_a_page_with_the_sentence(shared_gateway: RunningGateway) -> None:
    request_id = await add(shared_gateway, 4)
    async with signed_in(shared_gateway) as tenant:
        for path, sentence in (
            ("/requests?from=yesterday&format=csv", "'from' must be a date"),
            ("/requests?min_duration_ms=-1&format=csv", "'min_duration_ms' must be"),
            ("/requests?format=xml", "'format' must be one of csv, parquet."),
            (f"/requests/{request_id}?format=csv", "no table to export"),
            ("/playground?format=csv", "no table to export"),
            ("/usage?table=nothing&format=csv", "no such table"),
            ("/usage?start=2026-01-01&end=2026-12-01&format=csv", "A page shows at most"),
            ("/usage?width=minute&start=2026-01-01&end=2026-01-09&format=parquet", "A page shows at most"),
            ("/usage/labels?start=soon&format=csv", "A time is written like"),
            ("/usage/changes?start=soon&format=csv", "A time is written like"),
        ):
            page = await tenant.get(path)
            assert (page.status, page.headers["content-type"]) == (400, "text/html; charset=utf-8"), path
            assert "content-disposition" not in page.headers
            assert sentence in page.words, (path, page.words)


async def test_the_histogram_counts_the_period_and_not_the_page(
    shared_gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    tenant_id, key = await shared_gateway.new_tenant("busy", ["usage:read", "chat"])
    for number in range(1000, 1103):
        await add(shared_gateway, number, tenant_id=tenant_id)
    await add(shared_gateway, 1103, tenant_id=tenant_id, status=503, outcome="server_error")
    async with signed_in(shared_gateway, key) as tenant:
        page = await tenant.get("/requests")
        assert page.text.count("<tr>") == 1 + 100
        assert "104 requests, 1 failed" in page.words
        # A file has all that match, wherever the page stands, or it is none.
        [after] = re.findall(r"after=(req_\w+)", page.text)[:1]
        assert "Export all rows" in (await tenant.get(f"/requests?after={after}")).words
        for query, num_rows in ((f"&after={after}", 104), ("&status_class=5xx", 1)):
            file = await tenant.get(f"/requests?format=csv{query}")
            rows = list(csv.DictReader(io.StringIO(file.text)))
            assert len({row["id"] for row in rows}) == len(rows) == num_rows
        making = shared_gateway.app[EXPORTING]
        making.add(tenant_id)
        busy = await tenant.get("/requests?format=csv")
        assert (busy.status, "one at a time" in busy.words) == (429, True)
        assert (await tenant.get("/requests")).status == 200
        making.clear()
        monkeypatch.setattr("gateway.console.viewer.MAX_EXPORTED_ROWS", 103)
        refused = await tenant.get("/requests?format=csv")
        assert (refused.status, "A file has at most 103 rows" in refused.words, making) == (400, True, set())


async def test_a_request_shows_its_phases_its_cache_and_its_events(shared_gateway: RunningGateway) -> None:
    batch = await add(
        shared_gateway, 5000, miss_reason="diverged", diverged_at_token=130, batch_id="batch_1", worker="w0"
    )
    async with (
        signed_in(shared_gateway) as tenant,
        signed_in(shared_gateway, shared_gateway.keys.admin_key) as operator,
    ):
        page = await tenant.get(f"/requests/{batch}")
        for words in (
            "queue critical path",
            "prefill critical path",
            "wire critical path",
            "from the cache: 128 computed and kept: 256 computed: 116",
            "like a cached one for 130 tokens",
            "everything after the change has to be computed",
            "batch_1",
            f"traceparent: 00-{5000:032x}-",
            "The ledger has no charge for this request.",
        ):
            assert words in page.words, words
        assert "Worker w0" not in page.words
        assert "Worker w0" in (await operator.get(f"/requests/{batch}")).words
        events = await tenant.get(f"/requests/{batch}?table=events&format=csv")
        rows = list(csv.DictReader(io.StringIO(events.text)))
        assert [row["name"] for row in rows if row["source"] == "worker"] == [
            "queued",
            "matched",
            "chunk",
            "first_token",
            "finished",
        ]
        spans = await tenant.get(f"/requests/{batch}/otlp")
        assert spans.headers["content-disposition"].startswith("attachment")
        assert json.loads(spans.text)["resourceSpans"][0]["scopeSpans"][0]["spans"][0]["traceId"] == f"{5000:032x}"


async def test_a_refused_request_has_no_figure_of_the_cache(shared_gateway: RunningGateway) -> None:
    """Its prompt was counted and nothing of it computed, yet the page said that all of it was."""
    marks = "[[[0,0],[1,1000],[2,3000],[7,9000],[9,9500]],[],0]"
    refused = {"status": 429, "outcome": "refused", "error_code": "insufficient_quota", "prompt_tokens": 137}
    request_id = await add(shared_gateway, 6500, **refused, cached_tokens=0, cache_write_tokens=0, timeline=marks)
    async with signed_in(shared_gateway) as tenant:
        page = await tenant.get(f"/requests/{request_id}")
        assert "The prompt has 137 tokens. The request was not answered and cost nothing" in page.words
        assert "from the cache:" not in page.words
        assert "admit critical path 3.00 ms 6.00 ms" in page.words
        assert ',137,"",0,' in (await tenant.get(f"/requests?request_id={request_id}&format=csv")).text


async def test_the_price_on_the_page_is_the_ledgers_charge(shared_gateway: RunningGateway) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "what does it cost?"}], "max_tokens": 8}
    async with shared_gateway.session() as session, session.post("/v1/chat/completions", json=body) as answer:
        request_id, charge = answer.headers["x-request-id"], (await answer.json())["headgate"]["charge_micro_units"]
    await shared_gateway.settled()
    async with signed_in(shared_gateway) as tenant:
        for _ in range(100):
            page = await tenant.get(f"/requests/{request_id}?table=price&format=csv")
            if page.status == 200:
                break
            await asyncio.sleep(0.05)
        *parts, total = list(csv.DictReader(io.StringIO(page.text)))
        assert sum(int(part["amount_micro_units"]) for part in parts) == int(total["amount_micro_units"]) == charge > 0
        assert {part["part"]: part["quantity"] for part in parts}["Output"] == "8"


async def test_free_text_is_inert_on_every_page(shared_gateway: RunningGateway) -> None:
    named = {
        "model": PROBE,
        "end_user": PROBE,
        "metadata": {PROBE: PROBE},
        "finish_reason": FORMULA,
        "error_code": PROBE,
    }
    hostile = await add(shared_gateway, 6000, status=500, outcome="server_error", key_id=PROBE, **named)
    async with signed_in(shared_gateway) as tenant:
        for path in ("/requests", f"/requests/{hostile}", f"/requests?model={PROBE}&from={PROBE}&trace_id={PROBE}"):
            page = await tenant.get(path)
            assert page.status == (400 if "from=" in path else 200)
            assert "<script>alert" not in page.text
            assert "alert(1)" in page.text
        export = await tenant.get("/requests?format=csv")
        assert "'=cmd" in export.text
        assert ",=cmd" not in export.text


async def test_another_tenants_request_is_not_there(shared_gateway: RunningGateway) -> None:
    request_id = await add(shared_gateway, 7000)
    _, key = await shared_gateway.new_tenant("curious", ["usage:read"])
    async with signed_in(shared_gateway, key) as other:
        for path in (f"/requests/{request_id}", f"/requests/{request_id}/otlp"):
            assert (await other.get(path)).status == 404
        found = await other.get(f"/requests?project_id={shared_gateway.keys.tenant_id}")
        assert (found.status, request_id in found.text) == (200, False)


async def test_what_a_page_reads_is_no_request_of_the_key_and_what_a_form_sends_is_one(
    shared_gateway: RunningGateway,
) -> None:
    _, key = await shared_gateway.new_tenant("looks only")
    async with signed_in(shared_gateway, key) as tenant:
        for path in ("", "/requests", "/usage", "/limits"):
            assert (await tenant.get(path)).status == 200
        await tenant.get("/playground")
        await tenant.submit("/playground", model=MODEL, message="Hello", max_tokens="4")
        rows: list[dict[str, str]] = []
        while not rows:
            await asyncio.sleep(0.1)
            rows = list(csv.DictReader(io.StringIO((await tenant.get("/requests?format=csv")).text)))
        # Rows are written in the order in which requests end, so a read before the chat would be there now.
        assert [(row["model"], row["status"]) for row in rows] == [(MODEL, "200")]


async def test_the_times_of_a_link_are_the_filters_of_the_page_that_it_leads_to(shared_gateway: RunningGateway) -> None:
    owner, key = await shared_gateway.new_tenant("follows links")
    inside, outside = (
        await add(shared_gateway, 70, tenant_id=owner),
        await add(shared_gateway, -7_200_000, tenant_id=owner),
    )
    hour = half_an_hour_ago() // 3600 * 3600
    start = time.strftime("%Y-%m-%dT%H:%M", time.gmtime(hour))
    end = time.strftime("%Y-%m-%dT%H:%M", time.gmtime(hour + 3600))
    async with signed_in(shared_gateway, key) as tenant:
        page = await tenant.get(f"/usage?width=minute&start={start}&end={end}")
        minute = half_an_hour_ago() // 60 * 60
        links = [unescape(link) for link in re.findall(r'href="/console(/requests\?[^"]*)"', page.text)]
        [link] = {one for one in links if time.strftime("T%H:%M", time.gmtime(minute)) in URL(one).query["from"]}
        found = await tenant.get(link)
        assert (inside in found.text, outside in found.text) == (True, False)


async def charged(gateway: RunningGateway, owner: str, number: int, opened_ms: int) -> str:
    """A request that is in the ledger and in the log. Returns its id."""
    request_id = f"req_{opened_ms:012x}{number:020x}"
    usage = Usage(10, 20, 30, 40)
    async with gateway.app[DATABASE].write() as conn:
        rates = await prices.rates_of(conn, "standard@1", MODEL, "interactive")
        assert rates is not None
        fields = {"tenant_id": owner, "model": MODEL, "opened_at_ms": opened_ms, "charge": pricing.charge(usage, rates)}
        await request_postings.post(conn, 7, number, [posting(request_id, usage, **fields)])
    return await add(gateway, 0, request_id=request_id, started_at_ms=opened_ms, tenant_id=owner)


async def invoiced(gateway: RunningGateway, path: str, body: dict[str, str]) -> str:
    """The number of the invoice that a close or a void makes."""
    async with gateway.session(gateway.keys.admin_key) as admin, admin.post(path, json=body) as answer:
        made = await answer.json()
        assert answer.status == 200, made
    number: str = made["data"][-1]["number"] if "data" in made else made["number"]
    return number


async def test_a_request_leads_to_the_lines_of_its_invoice_or_of_the_draft(shared_gateway: RunningGateway) -> None:
    """A late charge is on the next invoice: the page named that of its month, which does not have it."""
    owner, key = await shared_gateway.new_tenant("billed")
    opened_ms = (START + 86_400) * 1000
    request_id = await charged(shared_gateway, owner, 7, opened_ms)
    async with signed_in(shared_gateway, key) as tenant:

        async def leads_to(request_id: str) -> tuple[str, str]:
            page = await tenant.get(f"/requests/{request_id}")
            assert f"The charge is in the period {PERIOD} (UTC)" in page.words
            [(path, name)] = re.findall(r'href="/console(/invoices/[^#"]*)#lines">([^<]*)</a>', page.text)
            assert 'id="lines"' in (await tenant.get(path)).text
            return path, name

        assert await leads_to(request_id) == (f"/invoices/draft?period={PERIOD}", f"the draft of {PERIOD}")
        first = await invoiced(shared_gateway, "/admin/v1/invoices", {"period": PERIOD, "project_id": owner})
        assert await leads_to(request_id) == (f"/invoices/{first}", f"invoice {first}")
        late = await charged(shared_gateway, owner, 8, opened_ms + 1)
        assert await leads_to(late) == ("/invoices/draft?period=2025-10", "the draft of 2025-10")
        following = await invoiced(shared_gateway, "/admin/v1/invoices", {"period": "2025-10", "project_id": owner})
        again = await invoiced(shared_gateway, f"/admin/v1/invoices/{first}/void", {"reason": "wrong address"})
        assert await leads_to(late) == (f"/invoices/{following}", f"invoice {following}")
        assert await leads_to(request_id) == (f"/invoices/{again}", f"invoice {again}")


async def test_an_empty_part_of_the_list_leads_on_to_what_follows(
    shared_gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    tenant, key = await shared_gateway.new_tenant("sparse")
    wanted = await add(shared_gateway, 70_001, tenant_id=tenant, duration_ms=9000)
    for number in (70_002, 70_003):
        await add(shared_gateway, number, tenant_id=tenant, duration_ms=5)
    monkeypatch.setattr(request_log, "MAX_SCANNED_ROWS", 1)
    async with signed_in(shared_gateway, key) as browser:
        address = "/requests?min_duration_ms=8000"
        for _ in range(2):
            page = await browser.get(address)
            assert "Nothing was found in this part of the list." in page.words
            [found] = re.findall(r'rel="next" href="/console([^"]+)"', page.text)
            address = unescape(found)
        assert wanted in (await browser.get(address)).text
