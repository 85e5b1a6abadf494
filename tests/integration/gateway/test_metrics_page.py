"""What a gateway's page of metrics says after requests, and what hostile ones cannot do to it."""

from __future__ import annotations

import re
from pathlib import Path

from fakes import ScriptedRunner, ScriptedWorker
from gateways import MODEL, RunningGateway, running_gateway, until
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from gateway.telemetry.exposition import gathered
from gateway.telemetry.metrics import METRICS
from workers.process.metrics_text import OPENMETRICS


def page(gateway: RunningGateway) -> str:
    return gateway.app[METRICS].page(OPENMETRICS).body.decode()


def value(gateway: RunningGateway, name: str, **labels: str) -> float:
    """The sum over all series of that name with these labels."""
    samples = [s for f in text_string_to_metric_families(page(gateway)) for s in f.samples if s.name == name]
    assert samples, name
    return sum(s.value for s in samples if labels.items() <= s.labels.items())


async def chat(gateway: RunningGateway, **options: object) -> None:
    async with gateway.client() as client:
        messages = [{"role": "user", "content": "hello"}]
        await client.chat.completions.create(model=MODEL, messages=messages, **{"max_tokens": 300, **options})


async def test_a_request_is_counted_by_everybody_that_has_to_do_with_it(gateway):
    await chat(gateway, seed=5)
    await gateway.balanced()
    assert value(gateway, "headgate_admission_total", decision="admitted") == 1
    assert value(gateway, "headgate_admission_wait_seconds_count", tier="interactive") == 1
    assert value(gateway, "headgate_limiter_script_seconds_count", script="reserve") >= 1
    assert value(gateway, "headgate_limiter_script_seconds_count", script="settle") == 1
    assert value(gateway, "headgate_journal_commit_seconds_count") == 1
    assert value(gateway, "headgate_journal_unshipped_records") == 0
    assert value(gateway, "headgate_journal_ship_lag_seconds") == 0
    assert value(gateway, "headgate_inflight_requests") == 0
    tenant = gateway.keys.tenant_id
    ((posted, charge),) = await gateway.sql(
        "SELECT sum(cache_read + cache_write + uncached + output), sum(charge) FROM ledger_entry WHERE kind = 'settle'"
    )
    assert value(gateway, "headgate_tokens_total", tenant=tenant, model=MODEL) == posted
    assert value(gateway, "headgate_charge_micro_units_total", tenant=tenant) == charge


async def test_leases_of_a_long_stream_are_counted(gateway):
    await chat(gateway, max_tokens=400, extra_body={"ignore_eos": True})
    assert value(gateway, "headgate_lease_renewals_total", result="granted") >= 2
    assert value(gateway, "headgate_lease_renewals_total", result="unavailable") == 0
    assert value(gateway, "headgate_budget_stops_total") == 0


async def test_workers_and_checks_are_shown_and_a_lost_worker_too(bare_gateway, tmp_path, redis_url):
    async with ScriptedWorker(tmp_path / "w0.sock", redis_url=redis_url):
        await bare_gateway.workers(1)
        assert value(bare_gateway, "headgate_ready_workers", model=MODEL) == 1
        assert value(bare_gateway, "headgate_worker_state", state="ready") == 1
        assert value(bare_gateway, "headgate_check_state") == 0
    await bare_gateway.workers(0)
    assert value(bare_gateway, "headgate_ready_workers", model=MODEL) == 0
    await until(lambda: value(bare_gateway, "headgate_worker_links_lost_total") >= 1)
    assert value(bare_gateway, "headgate_check_state", check=f"model:{MODEL}") == 2


async def test_a_worker_with_another_tokenizer_is_not_ready(bare_gateway, tmp_path, redis_url):
    async with ScriptedWorker(tmp_path / "w0.sock", redis_url=redis_url, runner=ScriptedRunner(vocabulary="of others")):
        await bare_gateway.workers(1)
        assert value(bare_gateway, "headgate_ready_workers", model=MODEL) == 0
        assert value(bare_gateway, "headgate_worker_state", state="other_tokenizer") == 1
        assert value(bare_gateway, "headgate_worker_state") == 1
        assert value(bare_gateway, "headgate_check_state", check=f"model:{MODEL}") == 2
        async with (
            bare_gateway.session(bare_gateway.keys.admin_key) as session,
            session.get("/admin/v1/workers") as answer,
        ):
            assert [one["state"] for one in (await answer.json())["data"]] == ["other_tokenizer"]


async def test_what_a_budget_has_left_is_shown(gateway):
    body = {"project_id": gateway.keys.tenant_id, "period": "day", "limit_micro_units": 10**9}
    async with gateway.session(gateway.keys.admin_key) as admin, admin.post("/admin/v1/budgets", json=body) as made:
        assert made.status == 200, await made.text()
    async with gateway.session() as session:
        for _ in range(2):
            body = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
            async with session.post("/v1/chat/completions", json=body) as answer:
                assert answer.status == 200
    left = value(gateway, "headgate_budget_remaining_ratio", tenant=gateway.keys.tenant_id)
    assert 0.9 < left < 1


async def test_attack_F07_hostile_requests_add_no_series(gateway):
    """Names of models, paths, user agents and request ids of every kind, through the real server."""

    async def send(number: int) -> None:
        headers = {"user-agent": f"agent-{number}", "x-request-id": f"id-{number}", "traceparent": f"no-{number}"}
        content = {"model": f"model-{number}", "messages": [{"role": "user", "content": "x"}]}
        async with session.post("/v1/chat/completions", json=content, headers=headers) as answer:
            assert answer.status == 404
        async with session.get(f"/v1/path-{number}", headers=headers) as answer:
            assert answer.status == 404

    async with gateway.session() as session:
        await send(0)
        before = names(page(gateway))
        for number in range(1, 100):
            await send(number)
    assert names(page(gateway)) == before


def names(text: str) -> set[str]:
    """The series, without their values and exemplars."""
    return {re.sub(r" [^ ]+( #.*)?$", "", line) for line in text.splitlines() if not line.startswith("#")}


async def test_exemplars_survive_the_gathering_of_several_pages(tmp_path: Path, redis_url: str):
    async with (
        ScriptedWorker(tmp_path / "w0.sock", redis_url=redis_url, journal_dir=tmp_path / "w0"),
        running_gateway(tmp_path / "home", redis_url, trace_ratio=1.0) as gateway,
    ):
        await gateway.workers(1)
        await chat(gateway, max_tokens=4)
        whole = gathered([("0", page(gateway)), ("1", None)], OPENMETRICS).body.decode()
    assert re.search(r'gen_ai_server_request_duration_seconds_bucket{.*} 1.0 # {trace_id="[0-9a-f]{32}"}', whole)
    assert 'headgate_gateway_up{gateway="1"} 0.0' in whole


TIMES = ("request_duration_seconds_count", "time_to_first_token_seconds_count", "time_per_output_token_seconds_count")


def times(gateway: RunningGateway) -> list[float]:
    """How many requests were measured as chats: their duration, first token and pace."""
    return [sum_of(gateway, f"gen_ai_server_{name}", gen_ai_operation_name="chat") for name in TIMES]


def sum_of(gateway: RunningGateway, name: str, **labels: str) -> float:
    samples = [s for f in text_string_to_metric_families(page(gateway)) for s in f.samples if s.name == name]
    return sum(s.value for s in samples if labels.items() <= s.labels.items())


async def test_responses_and_messages_are_measured_as_chats_are(gateway):
    asked = {"model": MODEL, "input": "hello", "max_output_tokens": 8}
    messages = [{"role": "user", "content": "hello"}]
    async with gateway.session() as session:
        body = {"model": MODEL, "messages": messages, "max_tokens": 8, "stream": True}
        async with session.post("/v1/messages", json=body) as answer:
            await answer.read()
    await until(lambda: times(gateway) == [1, 1, 1])
    async with gateway.session() as session, session.post("/v1/responses", json={**asked, "stream": True}) as answer:
        await answer.read()
    await until(lambda: times(gateway) == [2, 2, 2])
    async with gateway.session() as session, session.ws_connect("/v1/responses") as socket:
        await socket.send_json({"type": "response.create", **asked})
        while (await socket.receive_json())["type"] not in ("response.completed", "response.incomplete", "error"):
            pass
    await until(lambda: sum_of(gateway, "headgate_requests_total", route="GET /v1/responses") == 1)
    assert times(gateway) == [3, 3, 3], "a message of a WebSocket is a request, its handshake is none"
    assert sum_of(gateway, "headgate_requests_total", route="/v1/responses") == 2


async def test_a_response_in_the_background_has_no_first_token_that_somebody_waits_for(gateway):
    async with gateway.client() as client:
        made = await client.responses.create(model=MODEL, input="hello", max_output_tokens=8, background=True)
        while made.status not in ("completed", "incomplete", "failed"):
            made = await client.responses.retrieve(made.id)
    assert made.status != "failed"
    run = "/v1/responses/{response_id}/run"
    await until(lambda: sum_of(gateway, "headgate_requests_total", route=run, outcome="ok") == 1)
    assert sum_of(gateway, "headgate_requests_total", route="/v1/responses") == 1
    assert times(gateway) == [0, 0, 0]
    assert sum_of(gateway, "headgate_admission_total", decision="admitted") == 1
