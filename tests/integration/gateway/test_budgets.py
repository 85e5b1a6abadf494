"""What a tenant may spend, from the operator's command to the client's last chunk."""

from __future__ import annotations

import asyncio
import json
import time

import pytest
from click.testing import CliRunner
from gateways import MODEL, until

from gateway.cli.main import main
from gateway.telemetry.metrics import METRICS

BUDGETS = "/admin/v1/budgets"
QUOTAS = "/admin/v1/quotas"


async def call(gateway, method, path, body=None, key=None):
    async with gateway.session(key or gateway.keys.admin_key) as session:
        answer = await session.request(method, path, json=body)
        return answer.status, await answer.json()


async def headgate(gateway, *arguments):
    """(exit status, output), in a thread beside the gateway's loop."""
    env = {"HEADGATE_URL": gateway.url, "HEADGATE_API_KEY": gateway.keys.admin_key}
    command = [*arguments, "--home", str(gateway.settings.home)]
    done = await asyncio.to_thread(CliRunner().invoke, main, command, env=env)
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exc_info
    return done.exit_code, done.output


async def budget(gateway, tenant, limit, **fields):
    body = {"project_id": tenant, "period": "month", "limit_micro_units": limit} | fields
    status, made = await call(gateway, "POST", BUDGETS, body)
    assert status == 200, made
    return made


async def ask(gateway, key, max_tokens=400, **fields):
    body = {"model": MODEL, "prompt": "the water runs", "max_tokens": max_tokens, "ignore_eos": True}
    async with gateway.session(key) as session:
        answer = await session.post("/v1/completions", json=body | fields)
        return answer, await answer.json()


def shadow_refusals(gateway, level, dimension):
    labels = {"level": level, "dimension": dimension}
    registry = gateway.app[METRICS].registry
    return registry.get_sample_value("headgate_shadow_refusals_total", labels)


async def spent(gateway, tenant):
    await gateway.settled()
    [(charge,)] = await gateway.sql("SELECT coalesce(sum(charge), 0) FROM ledger_entry WHERE tenant_id = :t", t=tenant)
    return int(charge)


async def test_a_request_ends_at_its_budget_and_the_next_one_is_refused(gateway):
    tenant, key = await gateway.new_tenant("anna")
    made = await budget(gateway, tenant, 30)
    answer, body = await ask(gateway, key)
    assert answer.status == 200
    assert answer.headers["x-headgate-stop"] == "budget"
    assert body["choices"][0]["finish_reason"] == "length"
    told = body["headgate"]
    assert (told["stop"], told["scope"], told["budget"]) == ("budget", "tenant", made["id"])
    assert told["resets_at"] == made["current"]["end"] > time.time()
    assert 40 < body["usage"]["completion_tokens"] < 100
    assert 20 <= await spent(gateway, tenant) == told["charge_micro_units"] <= 30

    await call(gateway, "PATCH", f"{BUDGETS}/{made['id']}", {"limit_micro_units": 1})
    answer, body = await ask(gateway, key, max_tokens=1)
    assert answer.status == 429
    assert answer.headers["x-should-retry"] == "false"
    error = body["error"]
    assert (error["type"], error["code"]) == ("insufficient_quota", "insufficient_quota")
    assert error["headgate"] == {
        "level": "tenant",
        "dimension": "budget_micro_units",
        "limit": 1,
        "used": told["charge_micro_units"],
        "reserved": 0,
        "scope": "tenant",
        "resets_at": made["current"]["end"],
        "budget": made["id"],
        "currency": "USD",
    }
    await gateway.balanced()


@pytest.mark.asyncio(loop_scope="module")
async def test_a_stream_that_a_budget_ends_says_so_in_its_last_event(shared_gateway):
    tenant, key = await shared_gateway.new_tenant("anna")
    await budget(shared_gateway, tenant, 30)
    async with shared_gateway.client(key) as client:
        stream = await client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "on"}],
            max_tokens=500,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        chunks = [chunk async for chunk in stream]
    assert chunks[-1].choices[0].finish_reason == "length"
    assert chunks[-1].model_extra["headgate"]["stop"] == "budget"
    assert await spent(shared_gateway, tenant) <= 30


@pytest.mark.asyncio(loop_scope="module")
async def test_a_message_that_a_budget_ends_has_not_filled_the_context(shared_gateway):
    tenant, key = await shared_gateway.new_tenant("anna")
    await budget(shared_gateway, tenant, 30)
    body = {"model": MODEL, "messages": [{"role": "user", "content": "on"}], "max_tokens": 5000, "temperature": 0}
    status, message = await call(shared_gateway, "POST", "/v1/messages", body, key)
    assert (status, message["headgate"]["stop"]) == (200, "budget")
    assert message["stop_reason"] == "max_tokens"


@pytest.mark.asyncio(loop_scope="module")
async def test_a_big_max_tokens_alone_is_no_429(shared_gateway):
    tenant, key = await shared_gateway.new_tenant("anna")
    await budget(shared_gateway, tenant, 300)
    answer, body = await ask(shared_gateway, key, max_tokens=1900)
    assert answer.status == 200
    assert body["usage"]["completion_tokens"] > 500
    assert await spent(shared_gateway, tenant) <= 300


@pytest.mark.asyncio(loop_scope="module")
async def test_a_budget_made_while_a_tenant_runs_counts_what_was_spent_before(shared_gateway):
    tenant, key = await shared_gateway.new_tenant("anna")
    answer, body = await ask(shared_gateway, key, max_tokens=100)
    assert answer.status == 200
    await shared_gateway.settled()
    await budget(shared_gateway, tenant, body["headgate"]["charge_micro_units"])
    answer, refused = await ask(shared_gateway, key, max_tokens=10)
    assert answer.status == 429
    assert refused["error"]["headgate"]["used"] == body["headgate"]["charge_micro_units"]


@pytest.mark.asyncio(loop_scope="module")
async def test_keys_models_and_tiers_narrow_a_budget_and_a_soft_one_refuses_nobody(shared_gateway):
    tenant, key = await shared_gateway.new_tenant("anna")
    await budget(shared_gateway, tenant, 0, model="another")
    await budget(shared_gateway, tenant, 0, tier="batch")
    soft = await budget(shared_gateway, tenant, 5, hard=False)
    answer, body = await ask(shared_gateway, key, max_tokens=100)
    assert answer.status == 200
    assert body["headgate"]["stop"] is None
    await shared_gateway.settled()
    _, shown = await call(shared_gateway, "GET", f"{BUDGETS}/{soft['id']}")
    assert shown["current"]["settled_micro_units"] == body["headgate"]["charge_micro_units"]
    assert shown["current"]["thresholds"] == [50, 80, 100]


async def test_each_threshold_is_noted_once(gateway):
    tenant, key = await gateway.new_tenant("anna")
    made = await budget(gateway, tenant, 100, hard=False)
    noted = []
    for _ in range(7):
        await ask(gateway, key, max_tokens=60)
        await gateway.settled()
        rows = await gateway.sql("SELECT threshold, used_micro_units FROM budget_alert ORDER BY threshold")
        noted.append([row.threshold for row in rows])
    assert noted[0] == []
    assert noted[-1] == [50, 80, 100]
    assert [row.used_micro_units >= row.threshold for row in rows] == [True] * 3
    assert made["current"]["thresholds"] == []


async def test_a_lowered_limit_stops_a_request_that_runs(gateway, worker, monkeypatch):
    monkeypatch.setattr("gateway.limiter.upkeep.EVERY_S", 0.1)
    worker.runner.step_s = 0.02
    tenant, key = await gateway.new_tenant("anna")
    made = await budget(gateway, tenant, 100_000)
    running = asyncio.create_task(ask(gateway, key, max_tokens=1900))
    await until(lambda: worker.num_tokens_sent > 5)
    await call(gateway, "PATCH", f"{BUDGETS}/{made['id']}", {"limit_micro_units": 60})
    answer, body = await running
    assert answer.headers["x-headgate-stop"] == "budget"
    assert body["usage"]["completion_tokens"] < 1000


async def test_an_adjustment_raises_the_limit_for_its_time_only(gateway):
    tenant, key = await gateway.new_tenant("anna")
    made = await budget(gateway, tenant, 0)
    answer, _ = await ask(gateway, key, max_tokens=1)
    assert answer.status == 429
    now = int(time.time())
    path = f"{BUDGETS}/{made['id']}/adjustments"
    await call(gateway, "POST", path, {"micro_units": 500, "from": now + 3600, "to": now + 7200})
    answer, _ = await ask(gateway, key, max_tokens=1)
    assert answer.status == 429
    status, after = await call(gateway, "POST", path, {"micro_units": 500, "from": now, "to": now + 60})
    assert (status, after["current"]["limit_micro_units"]) == (200, 500)
    answer, _ = await ask(gateway, key, max_tokens=1)
    assert answer.status == 200


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"limit_micro_units": 2**53}, "limit_micro_units"),
        ({"limit_micro_units": -1}, "limit_micro_units"),
        ({"limit_micro_units": 1.5}, "limit_micro_units"),
        ({"period": "year"}, "period"),
        ({"period": {"start": 60, "end": 60}}, "period.end"),
        ({"period": {"start": 61, "end": 600}}, "period.start"),
        ({"api_key_id": "key_of_nobody"}, "api_key_id"),
    ],
)
async def test_what_is_no_budget_is_refused_by_name(shared_gateway, fields, param):
    tenant, _ = await shared_gateway.new_tenant("anna")
    body = {"project_id": tenant, "period": "day", "limit_micro_units": 5} | fields
    status, answer = await call(shared_gateway, "POST", BUDGETS, body)
    assert (status, answer["error"]["param"]) == (400, param)


async def test_a_key_sees_every_limit_and_budget_of_its_own(gateway):
    tenant, key = await gateway.new_tenant("anna")
    _, other = await gateway.new_tenant("bert")
    made = await budget(gateway, tenant, 5000)
    quota = {"project_id": tenant, "level": "tenant", "dimension": "requests_per_day", "limit": 7}
    assert (await call(gateway, "POST", QUOTAS, quota))[0] == 200
    _, body = await ask(gateway, key, max_tokens=50)
    await gateway.settled()
    _, shown = await call(gateway, "GET", "/v1/me/limits", key=key)
    by_name = {(one["level"], one["dimension"]): one for one in shown["data"]}
    of_budget = by_name["tenant", "budget_micro_units"]
    assert (of_budget["budget"], of_budget["limit"], of_budget["reserved"]) == (made["id"], 5000, 0)
    assert of_budget["currency"] == "USD"
    assert of_budget["used"] == body["headgate"]["charge_micro_units"]
    assert by_name["tenant", "requests_per_day"]["used"] == 1
    assert by_name["model", "requests_per_minute"]["model"] == MODEL
    assert by_name["model", "tokens_per_minute"]["used"] == body["usage"]["total_tokens"]
    _, others = await call(gateway, "GET", "/v1/me/limits", key=other)
    assert {one["level"] for one in others["data"]} == {"model"}


async def test_quotas_of_each_kind_refuse_by_name_and_a_shadow_one_only_counts(gateway):
    cases = [
        ("tenant", "requests_per_day", 1, "requests"),
        ("tenant", "input_tokens_per_minute", 20, "tokens"),
        ("model", "output_tokens_per_minute", 30, "tokens"),
        ("end_user", "requests_per_minute", 1, "requests"),
    ]
    for level, dimension, limit, kind in cases:
        tenant, key = await gateway.new_tenant("anna")
        subject = MODEL if level == "model" else ""
        quota = {"project_id": tenant, "level": level, "subject": subject, "dimension": dimension, "limit": limit}
        assert (await call(gateway, "POST", QUOTAS, quota))[0] == 200
        first, _ = await ask(gateway, key, max_tokens=30, user="ann")
        second, body = await ask(gateway, key, max_tokens=30, user="ann")
        assert (first.status, second.status) == (200, 429), dimension
        told = body["error"]["headgate"]
        assert (told["level"], told["dimension"], told["limit"]) == (level, dimension, limit)
        assert body["error"]["type"] == kind
        other, _ = await ask(gateway, key, max_tokens=30, user="bea")
        assert other.status == (200 if level == "end_user" else 429)
        await call(gateway, "POST", QUOTAS, quota | {"shadow": True})
        shadowed, _ = await ask(gateway, key, max_tokens=30, user="ann")
        assert shadowed.status == 200
        assert shadow_refusals(gateway, level, dimension) == 1
        [[key_id]] = await gateway.sql("SELECT id FROM api_key WHERE tenant_id = :t", t=tenant)
        told = {}
        for path in (f"/admin/v1/tenants/{tenant}/limits", f"/admin/v1/keys/{key_id}/limits"):
            _, found = await call(gateway, "GET", path)
            told[path] = [one["would_have_refused"] for one in found["data"] if one["dimension"] == dimension]
        counts = [] if level == "end_user" else [1]  # a limit on each end user has no place in the list
        assert all([count for count in seen if count is not None] == counts for seen in told.values()), told


async def test_a_shadow_budget_says_how_many_requests_it_would_have_refused(gateway):
    tenant, key = await gateway.new_tenant("anna")
    made = await budget(gateway, tenant, 0, shadow=True)
    for _ in range(3):
        answer, _ = await ask(gateway, key, max_tokens=5)
        assert answer.status == 200
    _, found = await call(gateway, "GET", "/v1/me/limits", key=key)
    assert [one["would_have_refused"] for one in found["data"] if one.get("budget") == made["id"]] == [3]
    assert {one["would_have_refused"] for one in found["data"] if "budget" not in one} == {None}


async def test_a_models_limit_is_held_against_that_model_alone(gateway):
    tenant, key = await gateway.new_tenant("anna")
    path = f"/v1/organization/projects/{tenant}/rate_limits/rl-{MODEL}"
    await call(gateway, "POST", path, {"max_requests_per_1_minute": 1})
    first, _ = await ask(gateway, key, max_tokens=5)
    second, body = await ask(gateway, key, max_tokens=5)
    assert (first.status, second.status) == (200, 429)
    assert body["error"]["headgate"]["level"] == "model"


async def test_an_operator_types_it(gateway):
    tenant, key = await gateway.new_tenant("acme")
    status, output = await headgate(gateway, "budgets", "add", tenant, "--limit", "0.001", "--period", "day")
    budget_id = output.strip()
    assert (status, budget_id[:7]) == (0, "budget_")
    assert (await headgate(gateway, "budgets", "add", tenant, "--limit", "1"))[0] == 2
    assert (await headgate(gateway, "budgets", "set", budget_id, "--limit", "0", "--kind", "hard"))[0] == 0
    assert (await ask(gateway, key))[0].status == 429
    status, output = await headgate(gateway, "budgets", "adjust", budget_id, "0.00009", "--to", "2099-01-01")
    assert status == 0, output
    assert (await ask(gateway, key))[0].status == 200
    listed = (await headgate(gateway, "budgets", "list"))[1]
    assert budget_id in listed
    assert " 0.00009 USD " in listed
    status, listed = await headgate(gateway, "budgets", "list", "--json")
    assert (status, json.loads(listed)[0]["id"]) == (0, budget_id), listed
    assert (await headgate(gateway, "budgets", "remove", budget_id))[0] == 0
    assert budget_id not in (await headgate(gateway, "budgets", "list", "--json"))[1]
    assert (await ask(gateway, key))[0].status == 200


async def test_ends_of_budgets_are_shown_by_the_tenants_clocks_and_stay_what_they_are(gateway):
    """22:00 UTC is midnight in Berlin in summer; the period is UTC's day all the same."""
    tenant, key = await gateway.new_tenant("anna")
    end = 1_909_000_800  # 2030-06-29T22:00:00Z
    fixed = {"start": 1_700_000_040, "end": end}
    made = await budget(gateway, tenant, 10**6, period=fixed)
    assert made["current"]["end_local"] == "2030-06-29T22:00:00+00:00"
    listed = (await headgate(gateway, "budgets", "list"))[1]
    assert ("2030-06-29 22:00:00" in listed, "+00:00" in listed) == (True, False), listed
    status, _ = await headgate(gateway, "tenants", "set", "anna", "--time-zone", "Europe/Berlin")
    assert status == 0
    _, shown = await call(gateway, "GET", f"{BUDGETS}/{made['id']}")
    assert (shown["current"]["end"], shown["current"]["end_local"]) == (end, "2030-06-30T00:00:00+02:00")
    assert "2030-06-30 00:00:00+02:00" in (await headgate(gateway, "budgets", "list"))[1]
    _, limits = await call(gateway, "GET", "/v1/me/limits", key=key)
    [mine] = [one for one in limits["data"] if one["dimension"] == "budget_micro_units"]
    assert (mine["resets_at"], mine["resets_at_local"]) == (end, "2030-06-30T00:00:00+02:00")
    path = f"/admin/v1/tenants/{tenant}"
    for wrong in ("Middle/Earth", "../../etc/passwd", "localtime", "Factory", "", 7):
        status, told = await call(gateway, "PATCH", path, {"time_zone": wrong})
        assert (status, told["error"]["param"]) == (400, "time_zone")
    assert (await call(gateway, "GET", path))[1]["time_zone"] == "Europe/Berlin"
    assert (await call(gateway, "PATCH", path, {"time_zone": None}))[1]["time_zone"] == "UTC"


async def keyed(gateway, path, body, key):
    """(status, whether it is the stored answer, the answer)."""
    async with gateway.session(gateway.keys.admin_key) as session:
        answer = await session.post(path, json=body, headers={"idempotency-key": key})
        return answer.status, answer.headers.get("idempotent-replayed"), await answer.json()


async def test_repeats_of_a_budget_under_one_key_make_one_budget_also_at_the_same_moment(gateway):
    tenant, _ = await gateway.new_tenant("repeats")
    body = {"project_id": tenant, "period": "month", "limit_micro_units": 30}
    answers = await asyncio.gather(*(keyed(gateway, BUDGETS, body, "one") for _ in range(8)))
    assert [status for status, _, _ in answers] == [200] * 8
    assert sorted(str(replayed) for _, replayed, _ in answers) == ["None", *["true"] * 7]
    (made,) = {json.dumps(answer) for _, _, answer in answers}
    turned = dict(reversed(body.items()))
    assert await keyed(gateway, BUDGETS, turned, "one") == (200, "true", json.loads(made))
    [(number,)] = await gateway.sql("SELECT count(*) FROM budget WHERE tenant_id = :t", t=tenant)
    audited = await gateway.sql(
        "SELECT 1 FROM audit_log WHERE tenant_id = :t AND event = 'headgate.budget.created'", t=tenant
    )
    assert (number, len(audited)) == (1, 1)
    status, replayed, other = await keyed(gateway, BUDGETS, body, "two")
    assert (status, replayed, other["id"] != json.loads(made)["id"]) == (200, None, True)


async def test_another_budget_under_a_used_key_is_refused_and_a_refused_one_uses_no_key(gateway):
    tenant, _ = await gateway.new_tenant("mismatches")
    body = {"project_id": tenant, "period": "month", "limit_micro_units": 30}
    assert (await keyed(gateway, BUDGETS, {**body, "project_id": "proj_none"}, "k"))[0] == 404
    assert (await keyed(gateway, BUDGETS, body, "k"))[:2] == (200, None)
    for wrong in ({**body, "limit_micro_units": 31}, {**body, "hard": False}):
        status, _, answer = await keyed(gateway, BUDGETS, wrong, "k")
        assert (status, answer["error"]["code"]) == (422, "idempotency_mismatch")
    for key in ("batch:1:1", "\u00e9", "x" * 256):
        assert (await keyed(gateway, BUDGETS, body, key))[0] == 400
    [(number,)] = await gateway.sql("SELECT count(*) FROM budget WHERE tenant_id = :t", t=tenant)
    assert number == 1


async def test_repeats_of_an_adjustment_under_one_key_raise_a_limit_once(gateway):
    tenant, _ = await gateway.new_tenant("raised")
    made = await budget(gateway, tenant, 30)
    now = int(time.time())
    path, body = f"{BUDGETS}/{made['id']}/adjustments", {"micro_units": 5, "from": now - 1, "to": now + 3600}
    answers = await asyncio.gather(*(keyed(gateway, path, body, "raise") for _ in range(4)))
    assert len({json.dumps(answer) for _, _, answer in answers}) == 1
    _, shown = await call(gateway, "GET", f"{BUDGETS}/{made['id']}")
    assert (len(shown["adjustments"]), shown["current"]["limit_micro_units"]) == (1, 35)
    elsewhere = await budget(gateway, tenant, 30)
    status, _, answer = await keyed(gateway, f"{BUDGETS}/{elsewhere['id']}/adjustments", body, "raise")
    assert (status, answer["error"]["code"]) == (422, "idempotency_mismatch")


async def test_the_command_of_a_budget_is_safe_to_repeat_under_a_key(gateway):
    tenant, _ = await gateway.new_tenant("typed")
    command = ("budgets", "add", tenant, "--limit", "25.00", "--period", "day", "--idempotency-key", "may")
    assert [(await headgate(gateway, *command))[0] for _ in range(2)] == [0, 0]
    [(number,)] = await gateway.sql("SELECT count(*) FROM budget WHERE tenant_id = :t", t=tenant)
    assert number == 1
