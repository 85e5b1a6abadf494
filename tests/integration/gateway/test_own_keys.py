"""`/v1/keys`: a tenant manages its own keys, and nothing that it tries makes a key that may do more than the one it has."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from typing import Any

import pytest
from gateways import PEPPER, RunningGateway
from sqlalchemy import text

from accounting.access import api_keys
from accounting.values.types import Limits
from gateway.base.app_keys import DATABASE
from gateway.http.auth import AUTH

pytestmark = pytest.mark.asyncio(loop_scope="module")
HOLDING = ("chat", "usage:read", "keys")


async def call(gateway: RunningGateway, key: str, method: str, path: str, body: Any = None) -> tuple[int, Any]:
    async with gateway.session(key) as session, session.request(method, path, json=body) as answer:
        return answer.status, await answer.json()


async def other_key(gateway: RunningGateway, tenant: str, **how: Any) -> str:
    """The id of another key of the tenant."""
    async with gateway.app[DATABASE].write() as conn:
        made = await api_keys.create(conn, PEPPER, tenant_id=tenant, now=int(time.time()), **how)
    return made.info.id


async def test_a_tenant_makes_uses_rotates_and_revokes_its_own_keys(shared_gateway: RunningGateway) -> None:
    gateway = shared_gateway
    tenant, key = await gateway.new_tenant("own", scopes=HOLDING)
    wanted = {"name": "ci", "scopes": ["chat"], "models": ["m"], "addresses": ["127.0.0.1"], "max_running_requests": 3}
    status, made = await call(gateway, key, "POST", "/v1/keys", wanted)
    assert (status, made["project_id"], made["scopes"], made["models"]) == (200, tenant, ["chat"], ["m"])
    assert (made["addresses"], made["max_running_requests"]) == (["127.0.0.1/32"], 3)
    assert (await call(gateway, made["value"], "GET", "/v1/models"))[0] == 200
    assert (await call(gateway, made["value"], "GET", "/v1/keys"))[0] == 403
    status, listed = await call(gateway, key, "GET", "/v1/keys")
    assert (status, [one["name"] for one in listed["data"]]) == (200, ["ci", None])
    assert "value" not in listed["data"][0]
    path = f"/v1/keys/{made['id']}"
    _, rotated = await call(gateway, key, "POST", f"{path}/rotate", {"overlap_seconds": 60})
    for value in (made["value"], rotated["value"]):
        assert (await call(gateway, value, "GET", "/v1/models"))[0] == 200
    assert (await call(gateway, key, "PATCH", path, {"disabled": True}))[1]["disabled"]
    assert (await call(gateway, rotated["value"], "GET", "/v1/models"))[0] == 401
    assert (await call(gateway, key, "DELETE", path))[1]["deleted"]
    assert (await call(gateway, key, "GET", path))[0] == 404
    actors = await gateway.sql("SELECT DISTINCT actor FROM audit_log WHERE object_id = :k", k=made["id"])
    assert [row.actor for row in actors] == [listed["data"][1]["id"]]


async def test_what_is_left_out_is_as_it_is_for_the_key_that_asks(shared_gateway: RunningGateway) -> None:
    bounds = {"models": ["m"], "addresses": ["127.0.0.0/8"], "expires_at": int(time.time()) + 1000}
    _, key = await shared_gateway.new_tenant("own", scopes=HOLDING, **bounds)
    _, made = await call(shared_gateway, key, "POST", "/v1/keys", {})
    assert made["scopes"] == ["chat", "usage:read"], "the scope `keys` is passed on only where it is named"
    assert {name: made[name] for name in bounds} == bounds
    _, made = await call(shared_gateway, key, "POST", "/v1/keys", {"scopes": ["keys"]})
    assert made["scopes"] == ["keys"]


@pytest.mark.parametrize(
    "beyond",
    [
        {"scopes": ["batch"]},
        {"scopes": ["chat", "files:read"]},
        {"models": ["m", "other"]},
        {"addresses": ["126.0.0.0/7"]},
        {"addresses": ["127.0.0.1", "192.0.2.1"]},
        {"expires_in_seconds": 2000},
    ],
    ids=str,
)
async def test_a_key_beyond_the_key_that_asks_is_refused_and_not_made(
    shared_gateway: RunningGateway, beyond: dict[str, Any]
) -> None:
    bounds = {"models": ["m"], "addresses": ["127.0.0.0/8"], "expires_at": int(time.time()) + 1000}
    tenant, key = await shared_gateway.new_tenant("own", scopes=HOLDING, **bounds)
    status, refusal = await call(shared_gateway, key, "POST", "/v1/keys", beyond)
    assert (status, refusal["error"]["code"]) == (403, "beyond_own_key")
    assert len(await shared_gateway.sql("SELECT id FROM api_key WHERE tenant_id = :t", t=tenant)) == 1


async def test_scopes_of_the_operator_cannot_be_named(shared_gateway: RunningGateway) -> None:
    _, key = await shared_gateway.new_tenant("own", scopes=HOLDING)
    for scope in ("admin", "admin:read", "root"):
        assert (await call(shared_gateway, key, "POST", "/v1/keys", {"scopes": [scope]}))[0] == 400


async def test_a_mightier_key_is_neither_taken_over_nor_touched(shared_gateway: RunningGateway) -> None:
    gateway = shared_gateway
    tenant, key = await gateway.new_tenant("own", scopes=HOLDING)
    mightier = f"/v1/keys/{await other_key(gateway, tenant)}"
    for method, path, body in (
        ("POST", f"{mightier}/rotate", {}),
        ("PATCH", mightier, {"disabled": True}),
        ("DELETE", mightier, None),
    ):
        status, refusal = await call(gateway, key, method, path, body)
        assert (status, refusal["error"]["code"]) == (403, "beyond_own_key"), method
    assert not (await call(gateway, key, "GET", mightier))[1]["disabled"]


async def test_a_change_cannot_lift_a_key_beyond_the_one_that_asks(shared_gateway: RunningGateway) -> None:
    gateway = shared_gateway
    tenant, key = await gateway.new_tenant("own", scopes=HOLDING, models=["m"], addresses=["127.0.0.0/8"])
    lesser = await other_key(gateway, tenant, scopes=["chat"], models=["m"], addresses=["127.0.0.1"])
    [own] = [one["id"] for one in (await call(gateway, key, "GET", "/v1/keys"))[1]["data"] if one["id"] != lesser]
    for key_id in (lesser, own):
        for body in ({"models": None}, {"models": ["x"]}, {"addresses": None}, {"addresses": ["0.0.0.0/0"]}):
            assert (await call(gateway, key, "PATCH", f"/v1/keys/{key_id}", body))[0] == 403, body
        shown = (await call(gateway, key, "GET", f"/v1/keys/{key_id}"))[1]
        assert shown["models"] == ["m"]
    assert (await call(gateway, key, "PATCH", f"/v1/keys/{lesser}", {"models": []}))[1]["models"] == []


async def test_a_key_with_limits_of_its_own_cannot_multiply_them(shared_gateway: RunningGateway) -> None:
    gateway = shared_gateway
    tenant, key = await gateway.new_tenant("own", scopes=HOLDING, limits=Limits(requests_per_minute=5))
    lesser = await other_key(gateway, tenant, scopes=["chat"], limits=Limits(requests_per_minute=5))
    for method, path, body in (
        ("POST", "/v1/keys", {"max_requests_per_1_minute": 5}),
        ("POST", f"/v1/keys/{lesser}/rotate", {}),
        ("PATCH", f"/v1/keys/{lesser}", {"max_requests_per_1_minute": 4}),
    ):
        assert (await call(gateway, key, method, path, body))[0] == 403, path
    assert (await call(gateway, key, "DELETE", f"/v1/keys/{lesser}"))[0] == 200, "ending a key gives nothing"


async def test_a_secret_that_was_replaced_gives_nothing_that_outlives_it(shared_gateway: RunningGateway) -> None:
    """Within the overlap it made lasting keys, and rotated its own key back."""
    gateway = shared_gateway
    _, old = await gateway.new_tenant("own", scopes=HOLDING)
    [own] = (await call(gateway, old, "GET", "/v1/keys"))[1]["data"]
    _, rotated = await call(gateway, old, "POST", f"/v1/keys/{own['id']}/rotate", {"overlap_seconds": 600})
    for method, path, body in (
        ("POST", f"/v1/keys/{own['id']}/rotate", {"overlap_seconds": 600}),
        ("POST", "/v1/keys", {"expires_in_seconds": 700}),
        ("POST", "/v1/webhooks", {"url": "https://example.com/"}),
    ):
        status, refusal = await call(gateway, old, method, path, body)
        assert (status, refusal["error"].get("code")) == (403, "beyond_own_key"), path
    _, made = await call(gateway, old, "POST", "/v1/keys", {})
    assert 0 < made["expires_at"] - time.time() <= 600
    _, lasting = await call(gateway, rotated["value"], "POST", "/v1/keys", {})
    assert lasting["expires_at"] is None


@pytest.mark.parametrize("ending", ["disabled = true", "expires_at = 1"])
async def test_a_key_that_has_ended_changes_no_key_while_it_is_remembered(
    shared_gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    """It enabled itself again, or made keys that lasted, in the seconds until every gateway knew of its end."""
    gateway, auth = shared_gateway, shared_gateway.app[AUTH]
    tenant, key = await gateway.new_tenant("own", scopes=HOLDING)
    lesser = await other_key(gateway, tenant, scopes=["chat"])
    _, listed = await call(gateway, key, "GET", "/v1/keys")
    [own] = [one["id"] for one in listed["data"] if one["id"] != lesser]
    lookup = auth._lookup
    before = await lookup(key)

    async def remembered(asked: str) -> Any:
        return before if asked == key else await lookup(asked)

    monkeypatch.setattr(auth, "_lookup", remembered)
    async with gateway.app[DATABASE].write() as conn:
        await conn.execute(text(f"UPDATE api_key SET {ending} WHERE id = :k"), {"k": own})
    assert (await call(gateway, key, "GET", "/v1/models"))[0] == 200, "this gateway does not know of it yet"
    for method, path, body in (
        ("PATCH", f"/v1/keys/{own}", {"disabled": False}),
        ("PATCH", f"/v1/keys/{lesser}", {"disabled": False}),
        ("POST", "/v1/keys", {}),
        ("POST", f"/v1/keys/{own}/rotate", {}),
        ("DELETE", f"/v1/keys/{lesser}", None),
        ("POST", "/v1/webhooks", {"url": "https://example.com/"}),
    ):
        assert (await call(gateway, key, method, path, body))[0] == 401, (method, path)


async def test_changes_of_keys_are_bounded_and_cost_a_neighbour_little(
    shared_gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each one made every gateway look up every key in use, as often as one tenant liked."""
    gateway, auth = shared_gateway, shared_gateway.app[AUTH]
    tenant, key = await gateway.new_tenant("own", scopes=HOLDING)
    lesser = f"/v1/keys/{await other_key(gateway, tenant, scopes=['chat'])}"
    _, neighbour = await gateway.new_tenant("neighbour")
    looked_up, lookup = [], auth._lookup

    async def counted(asked: str) -> Any:
        looked_up.append(asked)
        return await lookup(asked)

    monkeypatch.setattr(auth, "_lookup", counted)
    statuses: Counter[int] = Counter()
    async with gateway.session(key) as session, gateway.session(neighbour) as other:

        async def some(number: int) -> None:
            for _ in range(number):
                async with session.patch(lesser, json={"disabled": False}) as answer:
                    statuses[answer.status] += 1
                    assert answer.status == 200 or int(answer.headers["retry-after"]) == 1
                async with other.get("/v1/models") as answer:
                    assert answer.status == 200

        started = time.monotonic()
        await asyncio.gather(*(some(5) for _ in range(40)))
        took_s = time.monotonic() - started
    assert 60 <= statuses[200] <= 61 + took_s
    assert set(statuses) == {200, 429}
    assert looked_up.count(neighbour) <= 4 + 8 * took_s


async def test_a_tenant_makes_itself_so_many_keys(
    shared_gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.routes.keys.MAX_KEYS", 3)
    tenant, key = await shared_gateway.new_tenant("own", scopes=HOLDING)
    made = [await call(shared_gateway, key, "POST", "/v1/keys", {}) for _ in range(3)]
    assert [status for status, _ in made] == [200, 200, 409]
    assert (await call(shared_gateway, key, "DELETE", f"/v1/keys/{made[0][1]['id']}"))[0] == 200
    assert (await call(shared_gateway, key, "POST", "/v1/keys", {}))[0] == 200
    wanted = {"project_id": tenant}
    assert (await call(shared_gateway, shared_gateway.keys.admin_key, "POST", "/admin/v1/keys", wanted))[0] == 200


async def test_another_tenants_keys_do_not_exist(shared_gateway: RunningGateway) -> None:
    gateway = shared_gateway
    _, key = await gateway.new_tenant("own", scopes=HOLDING)
    stranger, _ = await gateway.new_tenant("stranger", scopes=["chat"])
    [row] = await gateway.sql("SELECT id FROM api_key WHERE tenant_id = :t", t=stranger)
    [operators] = await gateway.sql("SELECT id FROM api_key WHERE kind = 'admin' LIMIT 1")
    for key_id in (row.id, operators.id):
        path = f"/v1/keys/{key_id}"
        for method, target, body in (
            ("GET", path, None),
            ("PATCH", path, {"disabled": True}),
            ("DELETE", path, None),
            ("POST", f"{path}/rotate", {}),
        ):
            assert (await call(gateway, key, method, target, body))[0] == 404, method
    status, made = await call(gateway, key, "POST", "/v1/keys", {"project_id": stranger})
    assert (status, made["project_id"] != stranger) == (200, True)
    status, listed = await call(gateway, key, "GET", f"/v1/keys?project_id={stranger}")
    assert {one["project_id"] for one in listed["data"]} == {made["project_id"]}


async def test_the_operator_makes_lists_and_revokes_by_the_same_shapes(shared_gateway: RunningGateway) -> None:
    gateway, admin = shared_gateway, shared_gateway.keys.admin_key
    tenant, _ = await gateway.new_tenant("own", scopes=["chat"])
    wanted = {"project_id": tenant, "name": "new", "scopes": ["keys"], "models": []}
    _, made = await call(gateway, admin, "POST", "/admin/v1/keys", wanted)
    assert (made["scopes"], made["models"]) == (["keys"], [])
    _, plain = await call(gateway, admin, "POST", "/admin/v1/keys", {"project_id": tenant})
    assert "keys" not in plain["scopes"], "nobody has it who did not ask for it"
    _, listed = await call(gateway, admin, "GET", f"/admin/v1/keys?project_id={tenant}")
    assert {made["id"], plain["id"]} < {one["id"] for one in listed["data"]}
    assert (await call(gateway, admin, "DELETE", f"/admin/v1/keys/{made['id']}"))[0] == 200
    for body in ({}, {"project_id": "proj_x"}, {"project_id": "operator"}):
        assert (await call(gateway, admin, "POST", "/admin/v1/keys", body))[0] == 404, body
    assert (await call(gateway, admin, "GET", "/admin/v1/keys"))[0] == 404
