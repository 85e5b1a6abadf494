"""A member that an endpoint does not know is refused where the endpoint is Headgate's own, and named in a header where
OpenAI's clients call it.
"""

from __future__ import annotations

from typing import Any

import pytest
from gateways import RunningGateway

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def call(gateway: RunningGateway, key: str, method: str, path: str, body: Any) -> tuple[int, Any, str]:
    async with gateway.session(key) as session, session.request(method, path, json=body) as answer:
        return answer.status, await answer.json(), answer.headers.get("x-headgate-ignored", "")


@pytest.mark.parametrize(
    ("method", "path", "body", "param", "meant"),
    [
        ("POST", "keys", {"project_id": "P", "expires_at": 1795805900}, "expires_at", None),
        (
            "POST",
            "keys",
            {"project_id": "P", "max_requests_per_minute": 5},
            "max_requests_per_minute",
            "max_requests_per_1_minute",
        ),
        ("PATCH", "keys/K", {"scopes": ["chat"], "foo": 1}, "scopes", None),
        ("PATCH", "keys/K", {"disable": True}, "disable", "disabled"),
        ("PATCH", "keys/K", {"address": None}, "address", "addresses"),
        ("PATCH", "tenants/P", {"suspend": True}, "suspend", "suspended"),
        ("PATCH", "tenants/P/billing", {"vat": "DE1"}, "vat", None),
        ("POST", "budgets", {"project_id": "P", "period": "day", "limit_micro_units": 5, "kind": "soft"}, "kind", None),
        (
            "POST",
            "budgets",
            {"project_id": "P", "period": {"start": 1, "end": 2, "ends": 3}, "limit_micro_units": 5},
            "period.ends",
            "end",
        ),
        ("POST", "budgets/B/adjustments", {"micro_units": 1, "from": 1, "to": 2, "until": 3}, "until", None),
        (
            "POST",
            "quotas",
            {"project_id": "P", "level": "tenant", "dimension": "requests_per_minute", "limits": 1},
            "limits",
            "limit",
        ),
        ("POST", "webhooks", {"url": "https://example.com", "event": ["x"]}, "event", "events"),
        ("POST", "upstreams", {"name": "u", "url": "https://example.com", "models": {}, "ranks": 1}, "ranks", "rank"),
        ("POST", "price-sheets", {"sheet": "s", "rates": [{"model": "m", "tiers": "batch"}]}, "rates[0].tiers", "tier"),
        ("POST", "leaked-keys", {"value": "x", "values": []}, "values", "value"),
        ("POST", "leaked-keys", {"value": "x", 'a" - at `$.b`': 1}, None, None),
    ],
)
async def test_an_unknown_member_is_refused_with_its_name_and_the_nearest_known_one(
    shared_gateway: RunningGateway, method: str, path: str, body: dict[str, Any], param: str | None, meant: str | None
) -> None:
    tenant, _ = await shared_gateway.new_tenant("wrong")
    admin_key, path = shared_gateway.keys.admin_key, path.replace("/P", f"/{tenant}")
    status, answer, _ = await call(shared_gateway, admin_key, method, f"/admin/v1/{path}", body)
    assert status == 400, answer
    error = answer["error"]
    assert (error["code"], error["param"], error["type"]) == ("unknown_parameter", param, "invalid_request_error")
    if param is not None:
        hint = f" Did you mean '{meant}'?" if meant else ""
        assert error["message"] == f"Unknown parameter: '{param}'.{hint}"


@pytest.mark.parametrize(
    ("path", "body", "param", "meant"),
    [
        ("/v1/keys", {"scope": ["chat"]}, "scope", "scopes"),
        ("/v1/keys", {"expires_in": 60}, "expires_in", "expires_in_seconds"),
        ("/v1/keys", {"model": "z"}, "model", "models"),
        ("/v1/webhooks", {"url": "https://example.com", "event": ["x"]}, "event", "events"),
        ("/v1/quotes", {"endpoint": "/v1/completions", "body": {}, "bodies": {}}, "bodies", "body"),
    ],
)
async def test_what_a_tenants_own_key_asks_for_by_a_wrong_name_is_refused(
    shared_gateway: RunningGateway, path: str, body: dict[str, Any], param: str, meant: str
) -> None:
    tenant, key = await shared_gateway.new_tenant("wrong", scopes=("chat", "usage:read", "keys"))
    before = await shared_gateway.sql("SELECT count(*) FROM api_key WHERE tenant_id = :t", t=tenant)
    status, answer, _ = await call(shared_gateway, key, "POST", path, body)
    assert (status, answer["error"]["code"], answer["error"]["param"]) == (400, "unknown_parameter", param)
    assert answer["error"]["message"] == f"Unknown parameter: '{param}'. Did you mean '{meant}'?"
    assert await shared_gateway.sql("SELECT count(*) FROM api_key WHERE tenant_id = :t", t=tenant) == before


async def test_what_openais_clients_send_in_addition_is_named_in_a_header(shared_gateway: RunningGateway) -> None:
    keys, path = shared_gateway.keys, "/v1/organization/projects"
    more = {"name": "p", "retention": {"type": "none"}, "a-b": 1, "colour": None}
    status, made, ignored = await call(shared_gateway, keys.admin_key, "POST", path, more)
    assert (status, made["name"], ignored) == (200, "p", "retention")
    channel = {"type": "email", "recipients": ["a@example.com"], "colour": "red"}
    alert = {"interval": "month", "threshold_amount": 9, "currency": "USD", "notification_channel": channel}
    path = f"{path}/{made['id']}/spend_alerts"
    status, _, ignored = await call(shared_gateway, keys.admin_key, "POST", path, alert)
    assert (status, ignored) == (200, "notification_channel.colour")
