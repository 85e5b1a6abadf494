"""Who gets in (security.md section 8, C and F): keys, scopes, revocation, and answers that tell nothing."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest
from gateways import MODEL, RunningGateway
from load import stretched
from sqlalchemy import event
from sqlalchemy.exc import OperationalError

from accounting.access import api_keys, credentials
from accounting.lifecycle import tenant_status
from gateway.base.app_keys import DATABASE, REDIS
from gateway.http.auth import AUTH, LookupFailed

CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}


async def ask(gateway: RunningGateway, headers: Any, path: str = "/v1/models") -> tuple[int, bytes]:
    async with gateway.session("") as session, session.get(path, headers=headers) as answer:
        return answer.status, await answer.read()


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": ""},
        {"authorization": "Bearer"},
        {"authorization": "Bearer "},
        {"authorization": "Basic abc"},
        {"authorization": "Bearer x y"},
        {"authorization": "Bearer ' OR 1=1 --"},
        {"authorization": "Bearer hg_live_'; DROP TABLE api_key; --"},
        {"authorization": "Bearer \xfc"},
        {"authorization": 'Bearer ["a"]'},
        {"x-api-key": "hg_live_"},
        {"api-key": "x" * 8000},
        {"authorization": "Bearer hg_live_0000000000_" + "0" * 43 + "_000000"},
    ],
)
async def test_attack_C01_every_bad_credential_gets_the_same_401(
    shared_gateway: RunningGateway, headers: dict[str, str]
) -> None:
    status, body = await ask(shared_gateway, headers)
    assert status == 401
    assert body == (await ask(shared_gateway, {}))[1]
    assert await shared_gateway.sql("SELECT count(*) FROM api_key") != []


async def test_a_key_is_taken_from_any_of_three_headers_but_only_one_key(gateway: RunningGateway) -> None:
    key = gateway.keys.api_key
    for headers in (
        {"authorization": f"bearer {key}"},
        {"authorization": f"BEARER  {key}"},
        {"x-api-key": key},
        {"api-key": key},
        {"x-api-key": key, "authorization": f"Bearer {key}"},
    ):
        assert (await ask(gateway, headers))[0] == 200
    assert (await ask(gateway, {"x-api-key": key, "api-key": "other"}))[0] == 401
    assert (await ask(gateway, [("authorization", f"Bearer {key}"), ("authorization", "Bearer x")]))[0] == 401
    assert (await ask(gateway, {}, f"/v1/models?api_key={key}"))[0] == 401


@pytest.mark.rest
async def test_attack_C03_s5_bad_keys_are_throttled_cost_little_sql_and_lock_nobody_out(
    bare_gateway: RunningGateway,
) -> None:
    num_statements = 0

    def count(*_: Any) -> None:
        nonlocal num_statements
        num_statements += 1

    good = {"authorization": f"Bearer {bare_gateway.keys.api_key}"}
    _, idle = await bare_gateway.new_tenant("idle")
    async with bare_gateway.session("") as session:

        async def bad() -> int:
            headers = {"authorization": f"Bearer {credentials.generate('live')}"}
            async with session.get("/v1/models", headers=headers) as answer:
                return answer.status

        assert (await ask(bare_gateway, good))[0] == 200
        assert await bad() == 401
        assert 429 in await asyncio.gather(*(bad() for _ in range(200)))
        engine = bare_gateway.app[DATABASE]._readers.sync_engine
        event.listen(engine, "before_cursor_execute", count)
        began = time.monotonic()
        statuses = [status for _ in range(20) for status in await asyncio.gather(*(bad() for _ in range(200)))]
        # Those who read the epoch, prefixes and so on ask as well, a few times a second.
        assert num_statements <= 40 + 40 * (time.monotonic() - began)
        assert num_statements <= len(statuses) / 10
        event.remove(engine, "before_cursor_execute", count)
        assert set(statuses) <= {401, 429}
        assert statuses.count(429) > len(statuses) / 2
        # Keys that are known already, and one that nobody has shown here yet, still work from there.
        assert (await ask(bare_gateway, good))[0] == 200
        assert (await ask(bare_gateway, {"authorization": f"Bearer {idle}"}))[0] == 200


@pytest.mark.parametrize("announced", [True, False])
async def test_attack_C04_a_revoked_key_is_refused_within_five_seconds(
    bare_gateway: RunningGateway, announced: bool
) -> None:
    tenant, key = await bare_gateway.new_tenant("leaving")
    headers = {"x-api-key": key}
    assert (await ask(bare_gateway, headers))[0] == 200
    async with bare_gateway.app[DATABASE].write() as conn:
        [made] = (await api_keys.list_keys(conn, tenant)).items
        await api_keys.revoke(conn, tenant, made.id, now=int(time.time()))
    if announced:
        await bare_gateway.app[REDIS].publish("hg:revoked", tenant)
    revoked = time.monotonic()
    while (await ask(bare_gateway, headers))[0] != 401:
        assert time.monotonic() - revoked < stretched(0.5 if announced else 5)
        await asyncio.sleep(0.05)


async def test_attack_C04_suspended_archived_and_expired_are_told_apart(bare_gateway: RunningGateway) -> None:
    now = int(time.time())
    tenant, key = await bare_gateway.new_tenant("late", expires_at=now)
    suspended, suspended_key = await bare_gateway.new_tenant("suspended")
    archived, archived_key = await bare_gateway.new_tenant("archived")
    async with bare_gateway.app[DATABASE].write() as conn:
        await tenant_status.suspend(conn, suspended, True, now=now)
        await tenant_status.archive(conn, archived, now=now)
    assert (await ask(bare_gateway, {"x-api-key": suspended_key}))[0] == 403
    status, body = await ask(bare_gateway, {"x-api-key": archived_key})
    assert (status, b"project_archived" in body) == (403, True)
    assert (await ask(bare_gateway, {"x-api-key": key}))[0] == 401
    assert tenant


async def test_attack_C05_scopes_and_models_of_a_key_hold(gateway: RunningGateway) -> None:
    _, reader = await gateway.new_tenant("reader", scopes={"files:read"})
    _, narrow = await gateway.new_tenant("narrow", models={"another"})
    admin = gateway.keys.admin_key
    for key, path, expected in [
        (reader, "/v1/chat/completions", 403),
        (admin, "/v1/chat/completions", 403),
        (admin, "/tokenize", 403),
        (narrow, "/v1/chat/completions", 403),
    ]:
        async with gateway.session(key) as session, session.post(path, json=CHAT) as answer:
            assert answer.status == expected
    assert (await ask(gateway, {"x-api-key": admin}))[0] == 403
    status, body = await ask(gateway, {"x-api-key": narrow})
    assert (status, b'"data": []' in body) == (200, True)


async def test_sql_away_serves_known_keys_and_503_for_others(bare_gateway: RunningGateway) -> None:

    auth = bare_gateway.app[AUTH]
    _, other = await bare_gateway.new_tenant("other")
    assert (await ask(bare_gateway, {"x-api-key": bare_gateway.keys.api_key}))[0] == 200

    async def fail(key: str) -> None:
        raise LookupFailed

    auth._lookup = fail
    assert (await ask(bare_gateway, {"x-api-key": bare_gateway.keys.api_key}))[0] == 200
    status, body = await ask(bare_gateway, {"x-api-key": other})
    assert (status, b"database_unavailable" in body) == (503, True)


async def test_the_list_of_models_is_503_without_sql(
    bare_gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with bare_gateway.session() as session:
        async with session.get("/v1/models") as answer:
            assert answer.status == 200

        def away() -> Any:
            raise OperationalError("SELECT", {}, OSError("no answer"))

        monkeypatch.setattr(bare_gateway.app[DATABASE], "read", away)
        async with session.get("/v1/models") as answer:
            assert (answer.status, b"database_unavailable" in await answer.read()) == (503, True)


async def test_attack_C15_keys_of_batch_lines_are_refused_from_others(gateway: RunningGateway) -> None:
    async with gateway.session() as session:
        for key in ("batch:batch_00:1", "x" * 256):
            headers = {"idempotency-key": key}
            async with session.post("/v1/chat/completions", json=CHAT, headers=headers) as answer:
                assert answer.status == 400, key


async def test_attack_F11_an_exception_tells_nothing(gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("secret /path and SELECT * FROM api_key")

    monkeypatch.setattr("gateway.routes.chat.sampling_params", broken)
    async with gateway.session() as session, session.post("/v1/chat/completions", json=CHAT) as answer:
        body = await answer.text()
        assert answer.status == 500
        assert answer.headers["x-request-id"].startswith("req_")
        assert answer.headers["server"] == "headgate"
    assert "secret" not in body
    assert "internal_error" in body


@pytest.mark.parametrize("value", ["mine", "x" * 5000, "req_" + "0" * 32])
async def test_attack_F12_a_clients_request_id_is_never_ours(gateway: RunningGateway, value: str) -> None:
    async with (
        gateway.session() as session,
        session.post("/v1/chat/completions", json=CHAT, headers={"x-request-id": value}) as answer,
    ):
        ours = answer.headers["x-request-id"]
    assert ours != value
    await gateway.settled()
    rows = await gateway.sql("SELECT request_id FROM ledger_entry")
    assert [row.request_id for row in rows] == [ours]


async def test_attack_F13_probes_tell_checks_and_nothing_of_a_tenant(bare_gateway: RunningGateway) -> None:
    """Fixed names and sentences, and the operator's own models: no version, path, address, tenant or key."""
    assert await ask(bare_gateway, {}, "/livez") == (200, b'{"status": "ok"}')
    headers = {"authorization": f"Bearer {bare_gateway.keys.api_key}"}
    assert (await ask(bare_gateway, headers, "/v1/models"))[0] == 200  # a tenant is known
    for path in ("/readyz", "/health"):
        status, body = await ask(bare_gateway, {}, path)
        assert status == 503, "no worker"
        told = json.loads(body)
        assert told.keys() == {"status", "checks"}
        states = {check["name"]: check.get("state") for check in told["checks"]}
        in_order = dict.fromkeys(("database", "limiter", "clock", "disk", "workers"))
        assert states == {**in_order, f"model:{MODEL}": "failing"}
        for secret in ("proj_", "key_", "hg_", str(bare_gateway.settings.home), "127.0.0.1"):
            assert secret not in body.decode()
