"""Usage and costs through the real `openai` client: what was posted, in OpenAI's shapes."""

from __future__ import annotations

from decimal import Decimal

import openai
import pytest
from gateways import running_gateway
from money import NOON_MS, RATES, posting

from accounting.prices import pricing
from accounting.requests import request_postings
from accounting.values.types import Usage
from gateway.base.app_keys import DATABASE
from gateway.routes import common
from gateway.schema.money import decimal

NOON = NOON_MS // 1000
MIDNIGHT = NOON - 43_200
ONE = Usage(10, 20, 30, 40)
CHARGE = pricing.charge(ONE, RATES)


@pytest.fixture
async def gateway(tmp_path, redis_url):
    async with running_gateway(tmp_path, redis_url) as running:
        mine = {"tenant_id": running.keys.tenant_id, "key_id": "key_mine"}
        async with running.app[DATABASE].write() as conn:
            await request_postings.post(
                conn,
                9,
                1,
                [
                    posting("req_1", ONE, **mine),
                    posting("req_2", ONE, **mine, tier="batch"),
                    posting("req_3", ONE),
                    posting("req_4", ONE, **mine, opened_at_ms=NOON_MS + 86_400_000),
                ],
            )
        yield running


@pytest.fixture
async def usage(gateway):
    """`client.admin.organization.usage`, with the operator's key."""
    async with openai.AsyncOpenAI(
        base_url=f"{gateway.url}/v1", api_key="", admin_api_key=gateway.keys.admin_key, max_retries=0
    ) as client:
        yield client.admin.organization.usage


async def test_completions_has_the_five_sums_and_null_dimensions(usage):
    page = await usage.completions(start_time=MIDNIGHT, end_time=MIDNIGHT + 86_400)
    (bucket,) = page.data
    (result,) = bucket.results
    assert (bucket.start_time, bucket.end_time) == (MIDNIGHT, MIDNIGHT + 86_400)
    assert result.to_dict() == {
        "object": "organization.usage.completions.result",
        "input_tokens": 180,
        "input_cached_tokens": 30,
        "input_cache_write_tokens": 60,
        "input_uncached_tokens": 90,
        "output_tokens": 120,
        "num_model_requests": 3,
        "project_id": None,
        "user_id": None,
        "api_key_id": None,
        "model": None,
        "batch": None,
        "service_tier": None,
        "api_source": None,
    }


async def test_arrays_of_the_client_filter_and_group(usage, gateway):
    page = await usage.completions(
        start_time=MIDNIGHT,
        end_time=MIDNIGHT + 86_400,
        project_ids=[gateway.keys.tenant_id, "proj_none"],
        group_by=["project_id", "batch", "service_tier", "user_id"],
    )
    found = {(r.project_id, r.batch, r.service_tier): r.num_model_requests for r in page.data[0].results}
    mine = gateway.keys.tenant_id
    assert found == {(mine, False, "default"): 1, (mine, True, "batch"): 1}
    nobody = await usage.completions(start_time=MIDNIGHT, user_ids=["u"], end_time=NOON)
    assert nobody.data[0].results == []


async def test_counts_are_asked_for_by_the_currency_of_their_charges(usage, gateway):
    async with gateway.app[DATABASE].write() as conn:
        yen = [posting("req_5", ONE, currency="JPY"), posting("req_6", ONE, currency="JPY")]
        await request_postings.post(conn, 9, 2, yen)
    page = await usage.completions(start_time=MIDNIGHT, end_time=MIDNIGHT + 86_400, group_by=["currency"])
    found = [result.to_dict() for result in page.data[0].results]
    assert {r["currency"]: (r["num_model_requests"], r["output_tokens"]) for r in found} == {
        "usd": (3, 120),
        "jpy": (2, 80),
    }


async def test_pages_lead_on_to_the_end(usage):
    starts, page = [], None
    while True:
        more = {"page": page} if page else {}
        reply = await usage.completions(
            start_time=MIDNIGHT, end_time=MIDNIGHT + 2 * 86_400, bucket_width="1h", limit=20, **more
        )
        starts += [bucket.start_time for bucket in reply.data]
        assert reply.has_more == (reply.next_page is not None)
        if not reply.has_more:
            break
        page = reply.next_page
    assert starts == list(range(MIDNIGHT, MIDNIGHT + 2 * 86_400, 3600))


async def test_costs_are_exact_decimals_and_line_items_add_up(usage):
    page = await usage.costs(start_time=MIDNIGHT, end_time=MIDNIGHT + 2 * 86_400)
    amounts = [bucket.results[0].amount for bucket in page.data]
    assert [amount.currency for amount in amounts] == ["usd", "usd"]
    assert [Decimal(str(a.value)) for a in amounts] == [Decimal(n * CHARGE.total).scaleb(-6) for n in (3, 1)]
    items = await usage.costs(start_time=MIDNIGHT, end_time=MIDNIGHT + 86_400, group_by=["line_item"])
    by_name = {r.line_item: r for r in items.data[0].results}
    assert by_name["m, output, batch"].quantity == 40
    assert by_name["m, output"].quantity_unit == "tokens"
    assert sum(Decimal(str(r.amount.value)) for r in by_name.values()) == Decimal(3 * CHARGE.total).scaleb(-6)


async def test_a_tenant_key_sees_its_own_tenant_whatever_it_asks_for(gateway):
    async with gateway.session() as session:
        for more in ({}, {"project_ids[]": "proj_a"}, {"project_ids": "proj_a", "api_key_ids": "key_mine"}):
            params = {"start_time": MIDNIGHT, "end_time": MIDNIGHT + 86_400, "group_by": "project_id", **more}
            async with session.get("/v1/organization/usage/completions", params=params) as answer:
                (bucket,) = (await answer.json())["data"]
                results = [(r["project_id"], r["num_model_requests"]) for r in bucket["results"]]
                assert results == [(gateway.keys.tenant_id, 2)]


async def test_a_long_page_is_written_off_the_loop_and_is_the_same(gateway, monkeypatch):
    params = {"start_time": MIDNIGHT, "end_time": MIDNIGHT + 86_400, "group_by": "project_id"}

    async def read(path):
        async with gateway.session(gateway.keys.admin_key) as session, session.get(path, params=params) as answer:
            return {**(await answer.json()), "as_of": 0}

    paths = ("/v1/organization/usage/completions", "/v1/organization/usage/embeddings", "/v1/organization/costs")
    near = [await read(path) for path in paths]
    monkeypatch.setattr(common, "INLINE_ENTRIES", 0)
    assert [await read(path) for path in paths] == near


async def test_a_tenants_page_does_not_fit_the_operator(gateway):
    path, asked = "/v1/organization/costs", {"start_time": MIDNIGHT, "limit": 1}
    async with gateway.session() as mine, gateway.session(gateway.keys.admin_key) as operator:
        async with mine.get(path, params=asked) as answer:
            page = (await answer.json())["next_page"]
        async with mine.get(path, params={**asked, "page": page}) as answer:
            assert answer.status == 200
        async with operator.get(path, params={**asked, "page": page}) as answer:
            assert (answer.status, (await answer.json())["error"]["param"]) == (400, "page")


async def test_a_key_without_the_scope_is_refused(gateway):
    _, key = await gateway.new_tenant("other", scopes=["chat"])
    async with (
        gateway.session(key) as session,
        session.get("/v1/organization/costs", params={"start_time": 0}) as answer,
    ):
        assert (answer.status, (await answer.json())["error"]["code"]) == (403, "insufficient_scope")


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("params", "param"),
    [
        ({}, "start_time"),
        ({"start_time": "x"}, "start_time"),
        ({"start_time": "1.5"}, "start_time"),
        ({"start_time": 0, "bucket_width": "2d"}, "bucket_width"),
        ({"start_time": 0, "limit": 32}, "limit"),
        ({"start_time": 0, "group_by": "line_item"}, "group_by"),
        ({"start_time": 0, "batch": "yes"}, "batch"),
        ({"start_time": 0, "colour": "red"}, None),
        ({"start_time": 0, "page": "nonsense"}, "page"),
        ({"start_time": 10**17}, "start_time"),
        ({"start_time": 0, "end_time": 2**40}, "start_time"),
    ],
)
async def test_what_cannot_be_asked_is_a_400(shared_gateway, params, param):
    async with (
        shared_gateway.session(shared_gateway.keys.admin_key) as session,
        session.get("/v1/organization/usage/completions", params=params) as answer,
    ):
        assert (answer.status, (await answer.json())["error"]["param"]) == (400, param)


@pytest.mark.parametrize(
    ("micro_units", "written"),
    [
        (0, b"0"),
        (1, b"0.000001"),
        (410_000, b"0.41"),
        (1_000_000, b"1"),
        (-1_500_000, b"-1.5"),
        (2**53 - 1, b"9007199254.740991"),
    ],
)
def test_money_is_written_from_integers_with_at_most_six_places(micro_units, written):
    assert decimal(micro_units).encode() == written
