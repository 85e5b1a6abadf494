"""Every route against every identity over HTTP (security.md C05, C06, C17). What a room may answer stands in `EXPECTED`,
by the scope that tests/architecture/test_routes.py pins for each route."""

from __future__ import annotations

import itertools
import json
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import FormData
from gateways import MODEL, RunningGateway, running_gateway
from redis_db import emptied

from accounting.access import api_keys
from accounting.lifecycle import tenant_status
from accounting.values.tenant_types import KeyChanges
from gateway.app import api_routes
from gateway.base.addresses import LOOPBACK
from gateway.base.app_keys import DATABASE
from gateway.http.route_table import Route

TENANT_SCOPES = ("chat", "embeddings", "batch", "files:read", "files:write", "usage:read", "keys")
IN = 0
"""Let in: the room answers, with whatever it says to an empty body or an unknown id."""

NOBODY = {"none": 401, "bad": 401, "expired": 401, "disabled": 401, "revoked": 401, "moved": 401}
RESTING = {"suspended": 403, "archived": 403}
STRANGERS = {**dict.fromkeys(TENANT_SCOPES, 403), **RESTING, "operator": 403, "all": 403}
EVERYBODY = dict.fromkeys([*NOBODY, *STRANGERS], IN)

EXPECTED: dict[str, dict[str, int]] = {
    "none": EVERYBODY,
    "any": {**NOBODY, **dict.fromkeys(STRANGERS, IN), **RESTING, "operator": 403},
    "admin": {**NOBODY, **STRANGERS, "operator": IN},
    **{
        scope: {**NOBODY, **STRANGERS, scope: IN, "all": IN}
        for scope in TENANT_SCOPES
        if scope not in {"usage:read", "keys"}
    },
    "keys": {**NOBODY, **STRANGERS, "keys": IN},
    "run": {**NOBODY, **STRANGERS},
    "usage:read": {**NOBODY, **STRANGERS, "usage:read": IN, "all": IN, "operator": IN},
}
NEVER = {
    "project_id": "proj_" + "0" * 32,
    "tenant_id": "proj_" + "0" * 32,
    "account_id": "svc_acct_" + "0" * 32,
    "key_id": "key_" + "0" * 32,
    "rate_limit_id": "rl-none",
    "alert_id": "spend_alert_" + "0" * 32,
    "prefix_id": "prefix_" + "0" * 32,
    "file": "file-" + "0" * 32,
    "batch": "batch_" + "0" * 32,
    "id": "none",
    "budget_id": "budget_" + "0" * 32,
    "adapter_id": "adapter_" + "0" * 32,
    "number": "INV-none",
    "sheet": "none",
    "version": "1",
    "webhook_id": "we_" + "0" * 32,
    "request_id": "req_" + "0" * 32,
    "response_id": "resp_" + "0" * 48,
    "worker_id": "none",
    "upstream": "none",
}
FIELDS = {
    "name": "robot",
    "threshold_amount": 1,
    "currency": "USD",
    "interval": "month",
    "notification_channel": {"type": "email", "recipients": ["a@b"]},
}
"""A body that every room of a project takes; each ignores what is not its own."""
_PART = re.compile(r"\{(\w+)(?::[^{}]*)?\}")
_REQUEST_ID = re.compile(rb',"request_id":"req_[0-9a-f]{32}"')
_address = itertools.count(1)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def gateway(redis_socket, tmp_path_factory):
    home = tmp_path_factory.mktemp("matrix")
    redis_url = emptied(redis_socket, 3)
    async with running_gateway(home, redis_url, trusted_networks=LOOPBACK) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def identities(gateway: RunningGateway) -> dict[str, str]:
    """Keys by the name of who holds them."""
    made = {"none": "", "bad": "hg_live_wrong", "operator": gateway.keys.admin_key}
    for scope in TENANT_SCOPES:
        made[scope] = (await gateway.new_tenant(scope, scopes=[scope]))[1]
    made["all"] = (await gateway.new_tenant("all"))[1]
    async with gateway.session(gateway.keys.admin_key) as session:
        wanted = {"name": "finance", "scopes": ["admin:read"]}
        async with session.post("/v1/organization/admin_api_keys", json=wanted) as answer:
            made["finance"] = (await answer.json())["value"]
    now = int(time.time())
    for name in ("disabled", "revoked", "moved", "suspended", "archived"):
        tenant, made[name] = await gateway.new_tenant(name)
        async with gateway.app[DATABASE].write() as conn:
            [key] = (await api_keys.list_keys(conn, tenant)).items
            if name == "disabled":
                await api_keys.change(conn, tenant, key.id, KeyChanges(disabled=True), now=now)
            elif name == "moved":
                away = KeyChanges(addresses=("192.0.2.1",))
                await api_keys.change(conn, tenant, key.id, away, now=now)
            elif name == "revoked":
                await api_keys.revoke(conn, tenant, key.id, now=now)
            elif name == "suspended":
                await tenant_status.suspend(conn, tenant, True, now=now)
            else:
                await tenant_status.archive(conn, tenant, now=now)
    made["expired"] = (await gateway.new_tenant("expired", expires_at=now - 1))[1]
    return made


class Answer:
    """An answer without what differs from request to request: its id, which Anthropic's shape has in the body too."""

    def __init__(self, status: int, headers: Any, body: bytes) -> None:
        self.status, self.body = status, _REQUEST_ID.sub(b"", body)
        own = {"x-request-id", "request-id", "date"}
        self.headers = {name.lower(): value for name, value in headers.items() if name.lower() not in own}

    @property
    def all(self) -> tuple[int, dict[str, str], bytes]:
        return self.status, self.headers, self.body


Ask = Callable[..., Awaitable[Answer]]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def ask(gateway: RunningGateway) -> AsyncIterator[Ask]:
    """Asks with a key, each time from an address of its own, so that bad keys are never throttled."""

    async def asked(key: str, route: Route, fields: Any = None, **parts: str) -> Answer:
        number = next(_address)
        headers = {
            "x-forwarded-for": f"10.{number >> 16 & 255}.{number >> 8 & 255}.{number & 255}",
            "host": "localhost",
        }
        if key:
            headers["authorization"] = f"Bearer {key}"
        path = _PART.sub(lambda match: parts.get(match[1], NEVER[match[1]]), route.path)
        body = (fields or {}) if route.method in {"POST", "PATCH", "PUT"} else None
        async with session.request(route.method, path, json=body, headers=headers) as answer:
            return Answer(answer.status, answer.headers, await answer.read())

    async with gateway.session("") as session:
        yield asked


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("route", api_routes(), ids=lambda route: f"{route.method} {route.path}")
async def test_attack_C05_each_identity_gets_what_the_table_says(ask, identities, route):
    expected = EXPECTED[route.scope]
    # A key of the operator that only reads gets what the operator gets, from GET alone.
    expected = {**expected, "finance": expected["operator"] if route.scope == "none" or route.method == "GET" else 403}
    if route.or_scope is not None:
        expected = {**expected, route.or_scope: IN}
    if route.path.startswith("/v1/webhooks"):
        expected = {**expected, "keys": 403}  # events tell usage, so the scope of that is needed, too
    assert set(identities) == set(expected)
    for name, key in identities.items():
        status = (await ask(key, route)).status
        if expected[name] == IN:
            assert status not in {401, 403, 405, 429, 500}, (name, status)
        else:
            assert status == expected[name], name


@pytest.mark.asyncio(loop_scope="module")
async def test_a_finance_key_reads_what_the_operator_reads(ask, identities):
    """Every GET answers both keys with one status; a list without parameters is 200."""
    read = [route for route in api_routes() if route.method == "GET" and route.scope in {"admin", "usage:read"}]
    for route in read:
        finance, operator = [await ask(identities[name], route) for name in ("finance", "operator")]
        assert finance.status == operator.status, route.path
        assert finance.status in {200, 400, 404}, route.path
        # Two lists need a tenant, and no spend limit is set.
        is_empty = route.path in {"/admin/v1/quotas", "/admin/v1/keys", "/v1/organization/spend_limit"}
        assert finance.status != 404 or "{" in route.path or is_empty, route.path


@pytest.mark.asyncio(loop_scope="module")
async def test_a_401_is_the_same_whatever_was_wrong_with_the_key(ask, identities):
    for route in api_routes():
        if EXPECTED[route.scope]["none"] == IN:
            continue
        answers = [(await ask(identities[name], route)).all for name in NOBODY]
        assert all(answer == answers[0] for answer in answers), route.path


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def owned(gateway: RunningGateway) -> dict[str, str]:
    """Ids of objects of the first tenant."""
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"model": MODEL}}
    form = FormData({"purpose": "batch"})
    form.add_field("file", json.dumps(line).encode(), filename="in.jsonl")
    async with gateway.session() as session:
        async with session.post("/v1/files", data=form) as answer:
            file = (await answer.json())["id"]
        wanted = {"input_file_id": file, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
        async with session.post("/v1/batches", json=wanted) as answer:
            batch = (await answer.json())["id"]
    root = f"/v1/organization/projects/{gateway.keys.tenant_id}"
    async with gateway.session(gateway.keys.admin_key) as session:
        async with session.post(f"{root}/service_accounts", json={"name": "robot"}) as answer:
            account = await answer.json()
        async with session.post(f"{root}/spend_alerts", json=FIELDS) as answer:
            alert_id = (await answer.json())["id"]
    return {
        "file": file,
        "batch": batch,
        "account_id": account["id"],
        "key_id": account["api_key"]["id"],
        "alert_id": alert_id,
    }


OWNED_BY_TENANTS = [
    route for route in api_routes() if route.scope != "admin" and set(_PART.findall(route.path)) & {"file", "batch"}
]
IN_A_PROJECT = [
    route
    for route in api_routes()
    if "{project_id}" in route.path and set(_PART.findall(route.path)) & {"account_id", "key_id", "alert_id"}
]


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("route", OWNED_BY_TENANTS, ids=lambda route: f"{route.method} {route.path}")
async def test_attack_C06_another_tenants_object_is_one_that_never_existed(ask, identities, owned, route):
    foreign = await ask(identities["all"], route, **owned)
    never = await ask(identities["all"], route)
    assert foreign.status == 404
    assert foreign.all == never.all


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("route", IN_A_PROJECT, ids=lambda route: f"{route.method} {route.path}")
async def test_attack_C06_an_object_of_another_project_is_one_that_never_existed(ask, gateway, owned, route):
    other, _ = await gateway.new_tenant("neighbour")
    operator = gateway.keys.admin_key
    foreign = await ask(operator, route, FIELDS, project_id=other, **owned)
    never = await ask(operator, route, FIELDS, project_id=other)
    assert foreign.status == 404
    assert foreign.all == never.all


@pytest.mark.asyncio(loop_scope="module")
async def test_attack_C08_ids_end_in_128_random_bits(gateway, owned):
    made = [await gateway.new_tenant("many") for _ in range(20)]
    ids = [tenant for tenant, _ in made] + list(owned.values())
    ends = [re.split(r"[_-]", name)[-1] for name in ids]
    assert all(re.fullmatch(r"([0-9a-f]{16})?[0-9a-f]{32}", end) for end in ends), "a time at most"
    randoms = [end[-32:] for end in ends]
    for part in (slice(0, 8), slice(-8, None)):
        assert len({random[part] for random in randoms}) == len(randoms), "no time, no counter"


@pytest.mark.asyncio(loop_scope="module")
async def test_the_description_is_served_to_anyone_and_names_every_route(gateway):
    async with gateway.session("") as session, session.get("/openapi.json") as answer:
        described = await answer.json()
    assert described["openapi"].startswith("3.1")
    served = {(_PART.sub(r"{\1}", route.path), route.method.lower()) for route in api_routes()}
    listed = {(path, method) for path, methods in described["paths"].items() for method in methods}
    assert listed == served
