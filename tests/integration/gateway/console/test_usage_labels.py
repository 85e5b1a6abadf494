"""Usage by label: `/v1/usage/labels` and its page, from real requests, for one tenant and for all."""

from __future__ import annotations

import asyncio
import html
import re
import urllib.parse
from typing import Any

import pytest
from console_pages import signed_in
from gateways import MODEL, RunningGateway

pytestmark = pytest.mark.asyncio(loop_scope="module")
PROBE = '<b onclick="x()">\''
FORMULA = "=1+1"


async def ask(gateway: RunningGateway, key: str, **fields: Any) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2, **fields}
    async with gateway.session(key) as session, session.post("/v1/chat/completions", json=body) as answer:
        assert answer.status == 200, await answer.text()


async def labels(gateway: RunningGateway, key: str, path: str = "/v1/usage/labels", **asked: Any) -> tuple[int, Any]:
    async with gateway.session(key) as session, session.get(path, params=asked) as answer:
        return answer.status, await answer.json()


async def all_of(gateway: RunningGateway, key: str, num_requests: int, **asked: Any) -> Any:
    """The answer, as soon as the log has this many requests."""
    async with asyncio.timeout(20):
        while True:
            status, found = await labels(gateway, key, **asked)
            assert status == 200, found
            if sum(one["num_requests"] for one in found["data"]) == num_requests:
                return found
            await asyncio.sleep(0.05)


async def test_a_tenant_sees_what_each_of_its_users_and_teams_cost(shared_gateway: RunningGateway) -> None:
    tenant_id, key = await shared_gateway.new_tenant("labelled", ["chat", "usage:read"])
    await ask(shared_gateway, key, user="maria", metadata={"team": "crops"})
    await ask(shared_gateway, key, user="maria", metadata={"team": "soil"})
    await ask(shared_gateway, key, user="jo")
    found = await all_of(shared_gateway, key, 3)
    assert found["labels"] == ["end_user", "metadata.team"]
    assert [(one["value"], one["num_requests"]) for one in found["data"]] == [("maria", 2), ("jo", 1)]
    await shared_gateway.settled()
    [(charged,)] = await shared_gateway.sql("SELECT sum(charge) FROM rollup_day WHERE tenant_id = :id", id=tenant_id)
    assert sum(one["charge_micro_units"] for one in found["data"]) == charged > 0
    teams = await all_of(shared_gateway, key, 2, label="metadata.team")
    assert sorted(one["value"] for one in teams["data"]) == ["crops", "soil"]
    _, all_tenants = await labels(
        shared_gateway, shared_gateway.keys.admin_key, "/admin/v1/usage/labels", project_id=tenant_id
    )
    assert all_tenants["data"] == found["data"]


async def test_another_tenants_labels_are_not_shown(shared_gateway: RunningGateway) -> None:
    tenant_id, key = await shared_gateway.new_tenant("secretive", ["chat", "usage:read"])
    await ask(shared_gateway, key, user="secret-user")
    await all_of(shared_gateway, key, 1)
    _, other = await shared_gateway.new_tenant("curious", ["usage:read"])
    for asked in ({}, {"project_id": tenant_id}):
        _, found = await labels(shared_gateway, other, **asked)
        assert (found["data"], found["labels"]) == ([], [])
    async with signed_in(shared_gateway, other) as browser:
        assert "secret-user" not in (await browser.get(f"/usage/labels?project_id={tenant_id}")).text


async def test_wrong_queries_are_refused_by_name(shared_gateway: RunningGateway) -> None:
    key = shared_gateway.keys.api_key
    for asked in ({"label": "key"}, {"label": "metadata."}, {"start_time": -1}, {"limit": 0}, {"label": "metadata.\0"}):
        status, answer = await labels(shared_gateway, key, **asked)
        assert (status, answer["error"]["param"]) == (400, next(iter(asked)))
    assert (await labels(shared_gateway, key, order="asc"))[0] == 400


async def test_a_month_of_days_is_summed_at_a_time(shared_gateway: RunningGateway) -> None:
    key, day, first = shared_gateway.keys.api_key, 86_400, 20_000 * 86_400
    status, answer = await labels(shared_gateway, key, start_time=0, by_day="true")
    assert (status, answer["error"]["param"]) == (400, "start_time")
    for num_seconds, expected in ((31 * day, 200), (31 * day + 1, 400)):
        status, _ = await labels(shared_gateway, key, start_time=first, end_time=first + num_seconds)
        assert status == expected
    assert (await labels(shared_gateway, key))[0] == (await labels(shared_gateway, key, end_time=day))[0] == 200


async def test_the_page_shows_hostile_values_as_text_and_exports_them_inert(shared_gateway: RunningGateway) -> None:
    _, key = await shared_gateway.new_tenant("hostile labels", ["chat", "usage:read"])
    await ask(shared_gateway, key, user=FORMULA, metadata={PROBE: PROBE})
    await all_of(shared_gateway, key, 1)
    async with signed_in(shared_gateway, key) as browser:
        assert "Usage by label" in (await browser.get("/usage")).words
        for label in ("end_user", "metadata." + PROBE):
            page = await browser.get("/usage/labels?label=" + urllib.parse.quote(label))
            assert page.status == 200
            assert (FORMULA if label == "end_user" else PROBE) in page.words
            assert "<b onclick" not in page.text
            leads = "/console/requests?end_user=" in page.text
            assert leads == (label == "end_user"), "the log has no filter for the metadata"
            if leads:
                [target] = re.findall(r'href="/console(/requests\?end_user=[^"]*)"', page.text)
                assert "1 row Export" in (await browser.get(html.unescape(target))).words
        csv = await browser.get("/usage/labels?format=csv")
        head, row = csv.text.splitlines()
        assert head == '"value","requests","prompt","cached","cached_share","output","cost","currency"'
        assert row.startswith("\"'=1+1"), "a spreadsheet takes it for text"
        assert (await browser.get("/usage/labels?start=soon")).status == 400
