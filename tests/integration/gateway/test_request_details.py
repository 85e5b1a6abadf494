"""What the log says of one request beyond its row: why it cost what it did, its spans; and how many there were."""

from __future__ import annotations

import asyncio
import base64
import time
from typing import Any

import pytest
from gateways import MODEL, RunningGateway
from google.protobuf import json_format
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from accounting.prices import pricing
from accounting.requests import request_postings
from accounting.values.types import TOKEN_CLASSES, Rates, Usage
from gateway.base.app_keys import DATABASE

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hello " * 40}], "max_tokens": 8}
SERVER, CLIENT, INTERNAL = 2, 3, 1


async def call(gateway: RunningGateway, path: str, key: str = "", body: Any = None, **params: Any) -> tuple[int, Any]:
    method = "GET" if body is None else "POST"
    async with (
        gateway.session(key or gateway.keys.admin_key) as session,
        session.request(method, path, json=body, params=params) as answer,
    ):
        return answer.status, {"_id": answer.headers["x-request-id"], **await answer.json()}


async def ask(gateway: RunningGateway, key: str = "", path: str = "/v1/chat/completions", **more: Any) -> str:
    """Sends a request that succeeds; returns its id once the log and the ledger have it."""
    body = {name: value for name, value in (CHAT | more).items() if value is not None}
    status, answer = await call(gateway, path, key or gateway.keys.api_key, body)
    assert status == 200, answer
    await gateway.settled()
    await logged(gateway, answer["_id"])
    return answer["_id"]


async def logged(gateway: RunningGateway, request_id: str) -> dict[str, Any]:
    for _ in range(100):
        status, one = await call(gateway, f"/admin/v1/requests/{request_id}")
        if status == 200:
            return one
        await asyncio.sleep(0.05)
    raise AssertionError("the request is not in the log")


def amounts(price: dict[str, Any]) -> int:
    return sum(part["amount_micro_units"] for part in price["parts"])


async def test_rates_times_tokens_are_the_charge_of_the_ledger_exactly(shared_gateway: RunningGateway) -> None:
    gateway = shared_gateway
    await ask(gateway)
    request_id = await ask(gateway)  # the second one reads the cache
    one = await logged(gateway, request_id)
    price = one["price"]
    [entry] = await gateway.sql("SELECT * FROM ledger_entry WHERE request_id = :id AND kind = 'settle'", id=request_id)
    assert amounts(price) == price["charge_micro_units"] == entry.charge == one["charge_micro_units"] > 0
    assert (price["version"], price["currency"], price["is_reversed"]) == (entry.price_version, entry.currency, False)
    parts = {part["part"]: part for part in price["parts"]}
    assert list(parts) == list(TOKEN_CLASSES)
    usage = Usage(*(parts[name]["quantity"] for name in TOKEN_CLASSES))
    rates = Rates(*(parts[name]["rate_micro_units_per_million"] for name in TOKEN_CLASSES))
    charge = pricing.charge(usage, rates)
    assert [parts[name]["amount_micro_units"] for name in TOKEN_CLASSES] == [getattr(charge, n) for n in TOKEN_CLASSES]
    assert usage.output == 8
    assert usage.cache_read == one["usage"]["cached_tokens"] > 0


async def test_further_prompts_are_a_part_of_their_own(shared_gateway: RunningGateway) -> None:
    body = {"messages": None, "prompt": ["one", "two and three"]}
    one = await logged(shared_gateway, await ask(shared_gateway, path="/v1/completions", **body))
    others = one["price"]["parts"][-1]
    assert (others["part"], others["rate_micro_units_per_million"]) == ("other_prompts", None)
    assert others["quantity"] == len("two and three") + 8
    assert amounts(one["price"]) == one["charge_micro_units"] > others["amount_micro_units"] > 0


async def test_a_refused_request_has_no_price_and_a_reversed_one_says_so(shared_gateway: RunningGateway) -> None:
    status, answer = await call(
        shared_gateway, "/v1/chat/completions", shared_gateway.keys.api_key, CHAT | {"max_tokens": -1}
    )
    assert status == 400
    assert (await logged(shared_gateway, answer["_id"]))["price"] is None
    request_id = await ask(shared_gateway)
    async with shared_gateway.app[DATABASE].write() as conn:
        await request_postings.reverse(conn, [request_id], "sdk_retry")
    assert (await logged(shared_gateway, request_id))["price"]["is_reversed"]


async def test_a_request_as_otlp_is_what_a_collector_reads(shared_gateway: RunningGateway) -> None:
    request_id = await ask(shared_gateway)
    one = await logged(shared_gateway, request_id)
    status, found = await call(shared_gateway, f"/admin/v1/requests/{request_id}/otlp")
    assert status == 200
    del found["_id"]
    parsed = json_format.ParseDict(as_protobuf(found), ExportTraceServiceRequest())
    spans = parsed.resource_spans[0].scope_spans[0].spans
    root = spans[0]
    assert (root.name, root.kind, root.parent_span_id) == ("POST /v1/chat/completions", SERVER, b"")
    assert root.start_time_unix_nano == one["created_at_ms"] * 1_000_000
    assert {span.trace_id.hex() for span in spans} == {one["trace_id"]}
    assert one["traceparent"] == f"00-{one['trace_id']}-{root.span_id.hex()}-01"
    assert len({span.span_id for span in spans}) == len(spans)
    assert {span.parent_span_id for span in spans[1:]} <= {span.span_id for span in spans}
    assert {"admit", f"chat {MODEL}", "prefill", "decode", "settle"} <= {span.name for span in spans}
    for span in spans:
        assert root.start_time_unix_nano <= span.start_time_unix_nano <= span.end_time_unix_nano
    [chat] = [span for span in spans if span.kind == CLIENT]
    given = {attribute.key: attribute.value for attribute in chat.attributes}
    assert given["gen_ai.usage.output_tokens"].int_value == 8
    assert "headgate.worker.id" in given
    _, own = await call(shared_gateway, f"/v1/requests/{request_id}/otlp", shared_gateway.keys.api_key)
    assert "headgate.worker.id" not in str(own)


def as_protobuf(document: Any) -> Any:
    """OTLP/JSON writes ids in hexadecimal digits, where JSON of Protobuf has base64. Everything else is the same."""
    if isinstance(document, list):
        return [as_protobuf(one) for one in document]
    if not isinstance(document, dict):
        return document
    return {
        name: base64.b64encode(bytes.fromhex(value)).decode() if name.lower().endswith("id") else as_protobuf(value)
        for name, value in document.items()
    }


async def test_the_volume_counts_all_of_a_period_and_failed_ones_apart(shared_gateway: RunningGateway) -> None:
    tenant_id, key = await shared_gateway.new_tenant("counted", ["chat", "usage:read"])
    start = int(time.time())
    for _ in range(2):
        await ask(shared_gateway, key)
    await call(shared_gateway, "/v1/chat/completions", key, CHAT | {"max_tokens": -1})
    await asyncio.sleep(0)
    for path, reader, more in (
        ("/v1/requests/volume", key, {}),
        ("/admin/v1/requests/volume", "", {"project_id": tenant_id}),
    ):
        params = {"start_time": start, "end_time": start + 3600, "num_buckets": 2, "model": MODEL, **more}
        for _ in range(100):
            status, found = await call(shared_gateway, path, reader, **params)
            if status != 200 or found["data"][0]["num_requests"] == 2:
                break
            await asyncio.sleep(0.05)
        assert status == 200
        assert found["counted_from_ms"] == start * 1000
        assert [(one["num_requests"], one["num_failed"]) for one in found["data"]] == [(2, 0), (0, 0)]
        assert [one["end_ms"] - one["start_ms"] for one in found["data"]] == [1_800_000] * 2
    for wrong in ({}, {"start_time": start, "num_buckets": 0}, {"start_time": start, "end_time": start}, {"limit": 1}):
        assert (await call(shared_gateway, "/v1/requests/volume", key, **wrong))[0] == 400


async def test_another_tenants_request_is_unknown_in_every_form(shared_gateway: RunningGateway) -> None:
    request_id = await ask(shared_gateway)
    _, other = await shared_gateway.new_tenant("curious", ["usage:read"])
    for path in (f"/v1/requests/{request_id}", f"/v1/requests/{request_id}/otlp"):
        status, answer = await call(shared_gateway, path, other)
        assert (status, request_id in str(answer)) == (404, False)


async def test_a_session_is_what_the_client_names_in_three_ways(shared_gateway: RunningGateway) -> None:
    tenant_id, key = await shared_gateway.new_tenant("talking", ["chat", "usage:read"])
    ids = [
        await ask(shared_gateway, key, prompt_cache_key="by key", metadata={"session_id": "x"}, user="maria"),
        await ask(shared_gateway, key, metadata={"session_id": "by metadata"}, user="maria"),
        await ask(shared_gateway, key, user="by user"),
        await ask(shared_gateway, key, user="by user", safety_identifier="maria"),
        await ask(shared_gateway, key),
    ]
    named = [(await logged(shared_gateway, one))["session_id"] for one in ids]
    assert named == ["by key", "by metadata", "by user", "by user", None]
    _, found = await call(shared_gateway, "/v1/sessions", key)
    assert [(one["id"], one["num_requests"]) for one in found["data"]] == [
        ("by user", 2),
        ("by metadata", 1),
        ("by key", 1),
    ]
    _, turns = await call(shared_gateway, "/v1/requests", key, session_id="by user")
    assert [one["id"] for one in turns["data"]] == [ids[3], ids[2]]
    assert sum(one["charge_micro_units"] for one in turns["data"]) == found["data"][0]["charge_micro_units"]
    _, others = await call(shared_gateway, "/v1/requests", shared_gateway.keys.api_key, session_id="by user")
    assert others["data"] == []
    assert (await call(shared_gateway, "/admin/v1/requests", session_id="by user"))[0] == 400
    _, all_of_it = await call(shared_gateway, "/admin/v1/requests", session_id="by user", project_id=tenant_id)
    assert len(all_of_it["data"]) == 2
