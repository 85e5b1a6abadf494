"""Batches as a client meets them: the real gateway, the real jobs process, the openai client's own calls."""

from __future__ import annotations

import asyncio
import io
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path

import openai
import pytest
from click.testing import CliRunner
from fakes import VECTOR_SIZE, ScriptedRunner, ScriptedWorker
from gateways import MODEL, RunningGateway, running_gateway
from load import stretched
from redis_db import emptied_broker

from accounting.batches import batches
from gateway.cli.api import ApiFailed, TenantApi
from gateway.cli.batch_commands import retried
from gateway.cli.main import main
from workers.engine.values.abilities import Abilities

pytestmark = pytest.mark.rest

ENDPOINT = "/v1/chat/completions"
ENDED = ("completed", "failed", "expired", "cancelled")


@pytest.fixture
async def worker(tmp_path: Path, redis_url: str) -> AsyncIterator[ScriptedWorker]:
    """Its model generates, and gives vectors."""
    runner = ScriptedRunner(abilities=Abilities(("generate", "embed"), VECTOR_SIZE, reuses_kv=True))
    async with ScriptedWorker(tmp_path / "w0.sock", redis_url=redis_url, runner=runner) as worker:
        yield worker


@pytest.fixture
def broker_url(redis_socket: Path) -> str:
    return emptied_broker(redis_socket)


@pytest.fixture
async def gateway(worker, tmp_path: Path, redis_url: str, broker_url: str) -> AsyncIterator[RunningGateway]:
    async with running_gateway(tmp_path / "home", redis_url, broker_url=broker_url) as gateway:
        await gateway.workers(1)
        yield gateway


@pytest.fixture
async def client(gateway: RunningGateway) -> AsyncIterator[openai.AsyncOpenAI]:
    async with gateway.client() as client:
        yield client


def line(number: int, **body) -> dict:
    body = {"model": MODEL, "messages": [{"role": "user", "content": f"say {number}"}], "max_tokens": 4} | body
    return {"custom_id": f"line-{number}", "method": "POST", "url": ENDPOINT, "body": body}


async def upload(client: openai.AsyncOpenAI, lines: list) -> str:
    content = b"".join((item if isinstance(item, bytes) else json.dumps(item).encode()) + b"\n" for item in lines)
    return (await client.files.create(file=("in.jsonl", io.BytesIO(content)), purpose="batch")).id


async def create(client: openai.AsyncOpenAI, lines: list, **options):
    options = {"endpoint": ENDPOINT, "completion_window": "24h"} | options
    return await client.batches.create(input_file_id=await upload(client, lines), **options)


async def ended(client: openai.AsyncOpenAI, batch_id: str, limit_s: float = 120.0):
    deadline = time.monotonic() + stretched(limit_s)
    while (batch := await client.batches.retrieve(batch_id)).status not in ENDED:
        assert time.monotonic() < deadline, batch
        await asyncio.sleep(0.1)
    return batch


async def results(client: openai.AsyncOpenAI, file_id: str | None) -> list[dict]:
    if file_id is None:
        return []
    return [json.loads(text) for text in (await client.files.content(file_id)).text.splitlines()]


async def test_a_hundred_lines_with_ten_invalid_ones_give_one_result_each(gateway, client, jobs_process):
    """Half of the bad lines are bad in the file, half in their body."""
    lines: list = [line(i) for i in range(100)]
    for i in range(3, 100, 20):
        lines[i] = line(i, max_tokens=-1)
    lines[8] = b"{not json"
    lines[28] = line(28) | {"method": "GET"}
    lines[48] = line(48) | {"url": "/v1/embeddings"}
    lines[68] = line(68, model="another")
    lines[88] = line(88) | {"custom_id": "line-87"}
    batch = await create(client, lines, extra_body={"headgate": {"invalid_lines": "skip"}}, metadata={"a": "b"})
    assert batch.status == "validating"
    batch = await ended(client, batch.id)
    assert batch.status == "completed", batch
    output = await results(client, batch.output_file_id)
    errors = await results(client, batch.error_file_id)
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (100, 90, 10)
    whole = await client.get(f"/batches/{batch.id}/results", cast_to=str)
    assert by_id([json.loads(text) for text in whole.splitlines()]) == by_id(output + errors)
    assert (len(output), len(errors)) == (90, 10)
    ids = [result["custom_id"] for result in output + errors if result["custom_id"] is not None]
    assert len(ids) == len(set(ids)) == 98, "two lines have no id of their own"
    assert [r["error"]["code"] for r in errors] == [
        "invalid_value",
        "invalid_json_line",
        "invalid_value",
        "invalid_method",
        "invalid_value",
        "mismatched_url",
        "invalid_value",
        "model_not_found",
        "invalid_value",
        "duplicate_custom_id",
    ]
    assert [r["response"] and r["response"]["status_code"] for r in errors] == [400, None] * 5
    assert [e.line for e in batch.errors.data] == [9, 29, 49, 69, 89]
    usage = batch.usage
    bodies = [result["response"]["body"] for result in output]
    assert usage.total_tokens == sum(body["usage"]["total_tokens"] for body in bodies)
    assert all(r["response"]["request_id"] == r["response"]["body"]["headgate"]["request_id"] for r in output)
    await gateway.settled()
    rows = await gateway.sql(
        "SELECT batch_id, line_no, tier, kind, cache_read + cache_write + uncached + output AS tokens, charge"
        " FROM ledger_entry WHERE kind = 'settle'"
    )
    assert sorted(row.line_no for row in rows) == sorted(set(range(1, 101)) - {4, 24, 44, 64, 84, 9, 29, 49, 69, 89})
    assert {(row.batch_id, row.tier) for row in rows} == {(batch.id, "batch")}
    assert sum(row.tokens for row in rows) == usage.total_tokens
    shown = (await client.batches.retrieve(batch.id)).model_extra["headgate"]
    assert shown["charge_micro_units"] == sum(row.charge for row in rows)
    assert not await gateway.sql("SELECT 1 FROM idempotent_reply")
    listed = [b.id async for b in client.batches.list(limit=1)]
    assert listed == [batch.id]
    assert batch.metadata == {"a": "b"}


def by_id(lines: list[dict]) -> list[dict]:
    return sorted(lines, key=lambda one: one["id"])


async def test_results_that_are_followed_while_a_batch_runs_are_those_of_its_files(gateway, client, jobs_process):
    """Three clients follow it at once, and two of them leave again and again."""
    lines = [line(i) if i % 9 else line(i, max_tokens=-1) for i in range(150)]

    async def follow(batch_id: str, leaves_after: int) -> list[dict]:
        found: list[dict] = []
        async with gateway.session() as session, asyncio.timeout(120):
            while True:
                params = {"wait": "10"} | ({"after": found[-1]["id"]} if found else {})
                async with session.get(f"/v1/batches/{batch_id}/results", params=params) as answer:
                    assert answer.status == 200
                    num = 0
                    async for raw in answer.content:
                        found.append(json.loads(raw))
                        if (num := num + 1) == leaves_after:
                            break
                    else:
                        if answer.headers["x-headgate-batch-status"] in ENDED:
                            return found

    batch = await create(client, lines)
    followed = await asyncio.gather(*(follow(batch.id, leaves_after) for leaves_after in (0, 1, 7)))
    batch = await ended(client, batch.id)
    assert batch.status == "completed"
    written = await results(client, batch.output_file_id) + await results(client, batch.error_file_id)
    assert len(written) == 150
    assert followed[0] == followed[1] == followed[2]
    assert by_id(followed[0]) == by_id(written)


async def headgate(gateway: RunningGateway, *arguments: str) -> tuple[int, str, str]:
    """(status, output, errors) of a command of the tenant, in a thread beside the gateway's loop."""
    env = {"HEADGATE_URL": gateway.url, "HEADGATE_API_KEY": gateway.keys.api_key}
    command = ["--home", str(gateway.settings.home), "batches", *arguments]
    done = await asyncio.to_thread(CliRunner().invoke, main, command, env=env)
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exc_info
    return done.exit_code, done.stdout, done.stderr


async def test_a_batch_is_watched_read_and_retried_in_the_terminal(gateway, client, jobs_process, worker, tmp_path):
    file, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    file.write_text("".join(json.dumps(line(i, **({"max_tokens": -1} if i == 3 else {}))) + "\n" for i in range(20)))
    status, shown, said = await headgate(gateway, "submit", str(file), "--watch")
    assert (status, "completed" in shown, "1 of 20" in said or "20 of 20 lines" in said) == (0, True, True), said
    batch_id = shown.split("id", 1)[1].split()[0]
    status, told, _ = await headgate(gateway, "results", batch_id, "--output", str(output), "--follow", "--json")
    assert (json.loads(told)["num_lines"], json.loads(told)["status"]) == (20, "completed")
    status, told, _ = await headgate(gateway, "results", batch_id)
    assert told == output.read_text()
    status, _, said = await headgate(gateway, "retry", batch_id)
    assert (status, "1 line is not retried: invalid_value (status 400)" in said) == (1, True)
    worker.runner.hang()
    status, second, _ = await headgate(gateway, "submit", str(file))
    deadline = time.monotonic() + stretched(60)
    while (await client.batches.retrieve(second.strip())).request_counts.failed == 0:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.1)
    await headgate(gateway, "cancel", second.strip())
    status, shown, said = await headgate(gateway, "watch", second.strip(), "--json")
    assert (status, json.loads(shown)["status"]) == (1, "cancelled")
    worker.runner.release()
    status, shown, said = await headgate(gateway, "retry", second.strip(), "--watch")
    assert (status, "19 lines are run again" in said, "1 line is not retried" in said) == (0, True, True), said
    again = await client.batches.retrieve(shown.split("id", 1)[1].split()[0])
    assert (again.request_counts.completed, again.metadata) == (19, {"retry_of": second.strip()})
    status, shown, said = await headgate(gateway, "retry", second.strip())
    assert (status, shown.strip()) == (0, again.id)
    assert f"19 lines are run again by {again.id} already: no batch was made. --again makes another one." in said
    status, shown, _ = await headgate(gateway, "retry", second.strip(), "--again", "--json")
    third = json.loads(shown)
    assert (status, third["is_new"], third["num_retried"]) == (0, True, 19)
    assert third["batch"]["id"] not in (again.id, second.strip())
    status, shown, _ = await headgate(gateway, "retry", second.strip(), "--json")
    assert json.loads(shown)["batch"]["id"] == third["batch"]["id"]
    assert not json.loads(shown)["is_new"]


async def test_commands_that_retry_a_batch_at_the_same_time_make_one(
    gateway, client, jobs_process, worker, tmp_path, monkeypatch
):
    monkeypatch.setenv("HEADGATE_URL", gateway.url)
    monkeypatch.setenv("HEADGATE_API_KEY", gateway.keys.api_key)
    worker.runner.hang()
    full = {f"entry {n}": "x" for n in range(16)}
    few, many = [(await create(client, [line(0)], metadata=metadata)).id for metadata in ({}, full)]
    deadline = time.monotonic() + 60
    for batch_id in (few, many):
        while (await client.batches.retrieve(batch_id)).status == "validating":
            assert time.monotonic() < deadline
            await asyncio.sleep(0.1)
        await client.batches.cancel(batch_id)
    for batch_id in (few, many):  # not released yet, so that no line is answered before the cancel reaches it
        assert (await ended(client, batch_id)).error_file_id is not None
    worker.runner.release()
    api = TenantApi(tmp_path)
    found = await asyncio.gather(*(retried(api, few, again=False) for _ in range(3)))
    assert sorted(is_new for _, _, is_new in found) == [False, False, True]
    assert len({batch["id"] for _, batch, _ in found}) == 1
    _, first, is_new = await retried(api, many, again=False)
    assert (is_new, first["metadata"]) == (True, full)  # which has no place for the name of the other batch
    with pytest.raises(ApiFailed, match="A batch was made of these lines within the last day"):
        await retried(api, many, again=False)
    _, second, is_new = await retried(api, many, again=True)
    assert is_new
    assert second["id"] != first["id"]


def completion_line(number: int, prompt, **body) -> dict:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 4} | body
    url = "/v1/completions"
    return {"custom_id": f"line-{number}", "method": "POST", "url": url, "body": body}


async def test_b4_lines_of_v1_completions_run_and_are_charged_once(gateway, client, jobs_process):
    prompts = ["say 0", [1, 2, 3], ["say 2"], "say 3", ["two", "prompts"], ""]
    lines = [completion_line(i, prompt) for i, prompt in enumerate(prompts)]
    lines[3] = completion_line(3, "say 3", n=2, echo=True)
    batch = await create(client, [*lines, line(6)], endpoint="/v1/completions")
    batch = await ended(client, batch.id)
    assert (batch.status, [e.code for e in batch.errors.data]) == ("failed", ["mismatched_url"])
    batch = await create(client, lines, endpoint="/v1/completions")
    assert batch.endpoint == "/v1/completions"
    batch = await ended(client, batch.id)
    assert batch.status == "completed", batch
    output = await results(client, batch.output_file_id)
    errors = await results(client, batch.error_file_id)
    assert [r["custom_id"] for r in output] == [f"line-{i}" for i in range(4)]
    bodies = [r["response"]["body"] for r in output]
    assert {body["object"] for body in bodies} == {"text_completion"}
    assert [len(body["choices"]) for body in bodies] == [1, 1, 1, 2]
    assert all(choice["text"].startswith("say 3") for choice in bodies[3]["choices"])
    assert [r["custom_id"] for r in errors] == ["line-4", "line-5"]
    refused = errors[0]["response"]["body"]["error"]
    assert (refused["param"], "one prompt" in refused["message"]) == ("prompt", True)
    await gateway.settled()
    rows = await gateway.sql(
        "SELECT batch_id, line_no, tier, cache_read + cache_write + uncached + output AS tokens, charge"
        " FROM ledger_entry WHERE kind = 'settle' ORDER BY line_no"
    )
    assert [row.line_no for row in rows] == [1, 2, 3, 4]
    assert {(row.batch_id, row.tier) for row in rows} == {(batch.id, "batch")}
    assert sum(row.tokens for row in rows) == batch.usage.total_tokens
    shown = (await client.batches.retrieve(batch.id)).model_extra["headgate"]
    assert shown["charge_micro_units"] == sum(row.charge for row in rows) > 0


async def test_a_batch_of_embeddings_has_one_charge_for_the_inputs_of_a_line(gateway, client, jobs_process):
    def of(number: int, given) -> dict:
        body = {"model": MODEL, "input": given}
        return {"custom_id": f"line-{number}", "method": "POST", "url": "/v1/embeddings", "body": body}

    lines = [of(0, "one"), of(1, ["two", "three"]), of(2, ""), of(3, [[1, 2], [3]])]
    batch = await ended(client, (await create(client, lines, endpoint="/v1/embeddings")).id)
    assert batch.status == "completed", batch
    output = {one["custom_id"]: one["response"]["body"] for one in await results(client, batch.output_file_id)}
    (failed,) = await results(client, batch.error_file_id)
    assert failed["custom_id"] == "line-2"
    assert {name: [one["embedding"][0] for one in body["data"]] for name, body in output.items()} == {
        "line-0": [3],
        "line-1": [3, 5],
        "line-3": [2, 1],
    }
    await gateway.settled()
    rows = await gateway.sql(
        "SELECT line_no, tier, cache_read + cache_write + uncached AS tokens, output FROM ledger_entry"
        " WHERE kind = 'settle' ORDER BY line_no"
    )
    assert [tuple(row) for row in rows] == [(1, "batch", 3, 0), (2, "batch", 8, 0), (4, "batch", 3, 0)]
    assert batch.usage.total_tokens == 14


async def test_a_batch_of_responses_is_charged_once_a_line_and_each_is_stored(gateway, client, jobs_process):
    def of(number: int, **more) -> dict:
        body = {"model": MODEL, "input": f"say {number}", "instructions": "Be brief.", "max_output_tokens": 4} | more
        return {"custom_id": f"line-{number}", "method": "POST", "url": "/v1/responses", "body": body}

    before = await client.responses.create(model=MODEL, input="first", max_output_tokens=3)
    refused = [of(3, stream=True), of(4, background=True), of(5, tools=[{"type": "web_search"}])]
    lines = [of(0), of(1, store=False), of(2, previous_response_id=before.id), *refused]
    batch = await ended(client, (await create(client, lines, endpoint="/v1/responses")).id)
    assert batch.status == "completed", batch
    output = {one["custom_id"]: one["response"]["body"] for one in await results(client, batch.output_file_id)}
    errors = {one["custom_id"]: one["response"]["body"]["error"] for one in await results(client, batch.error_file_id)}
    assert sorted(output) == ["line-0", "line-1", "line-2"]
    assert {name: error["param"] for name, error in errors.items()} == {
        "line-3": "stream",
        "line-4": "background",
        "line-5": "tools[0].type",
    }
    assert "batch" in errors["line-4"]["message"]
    assert {body["status"] for body in output.values()} == {"incomplete"}
    for name, is_stored in {"line-0": True, "line-1": False, "line-2": True}.items():
        body = output[name]
        if is_stored:
            found = await client.responses.retrieve(body["id"])
            assert (found.output_text, found.usage.total_tokens) == (
                body["output"][0]["content"][0]["text"],
                body["usage"]["total_tokens"],
            )
        else:
            with pytest.raises(openai.NotFoundError):
                await client.responses.retrieve(body["id"])
    assert output["line-2"]["previous_response_id"] == before.id
    await gateway.settled()
    rows = await gateway.sql(
        "SELECT line_no, request_id, tier, cache_read + cache_write + uncached AS input, output, charge"
        " FROM ledger_entry WHERE kind = 'settle' AND batch_id = :b ORDER BY line_no",
        b=batch.id,
    )
    assert [(row.line_no, row.tier) for row in rows] == [(1, "batch"), (2, "batch"), (3, "batch")]
    for row in rows:
        body = output[f"line-{row.line_no - 1}"]
        assert (row.input, row.output) == (body["usage"]["input_tokens"], body["usage"]["output_tokens"])
        assert body["headgate"]["request_id"] == row.request_id
        assert body["headgate"]["charge_micro_units"] == row.charge > 0
    assert batch.usage.input_tokens == sum(row.input for row in rows)
    assert batch.usage.output_tokens == sum(row.output for row in rows)


@pytest.mark.parametrize("endpoint", ["/v1/rerank", "/v1/quotes"])
async def test_b4_an_endpoint_that_no_batch_has_names_those_there_are(gateway, client, endpoint):
    with pytest.raises(openai.BadRequestError, match=r"/v1/chat/completions, /v1/completions"):
        await create(client, [line(0)], endpoint=endpoint)


async def test_b4_a_batch_of_completions_needs_the_scope_of_its_endpoint(gateway):
    _, key = await gateway.new_tenant("narrow", ["batch", "files:read", "files:write"])
    async with gateway.client(key) as narrow:
        with pytest.raises(openai.PermissionDeniedError):
            await create(narrow, [completion_line(0, "x")], endpoint="/v1/completions")


async def test_a_faulty_file_fails_with_line_numbers_and_runs_nothing(gateway, client, jobs_process, worker):
    batch = await ended(client, (await create(client, [line(0), b"", line(2), b"{"])).id)
    assert batch.status == "failed"
    assert [(e.code, e.line) for e in batch.errors.data] == [("invalid_json_line", 2), ("invalid_json_line", 4)]
    assert (batch.request_counts.total, batch.output_file_id, batch.error_file_id) == (0, None, None)
    empty = await ended(client, (await create(client, [])).id)
    assert [e.code for e in empty.errors.data] == ["empty_file"]
    assert not await gateway.sql("SELECT 1 FROM ledger_entry")
    with pytest.raises(openai.ConflictError):
        await client.batches.cancel(batch.id)


async def test_create_refuses_what_it_cannot_honour(gateway, client, monkeypatch):
    file_id = await upload(client, [line(0)])
    other_file = await client.files.create(file=("a", io.BytesIO(b"x")), purpose="vision")
    good = {"input_file_id": file_id, "endpoint": ENDPOINT, "completion_window": "24h"}
    for change, status in (
        ({"input_file_id": "file-0"}, 404),
        ({"input_file_id": other_file.id}, 400),
        ({"endpoint": "/v1/moderations"}, 400),
        ({"completion_window": "1h"}, 400),
        ({"metadata": {"k": "v" * 513}}, 400),
        ({"metadata": {str(i): "" for i in range(17)}}, 400),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, 400),
        ({"extra_body": {"headgate": {"invalid_lines": "maybe"}}}, 400),
    ):
        with pytest.raises(openai.APIStatusError) as refused:
            await client.batches.create(**{**good, **change})
        assert refused.value.status_code == status, change
    monkeypatch.setattr(batches, "MAX_OPEN", 0)
    with pytest.raises(openai.RateLimitError, match="open at once") as refused:
        await client.with_options(max_retries=0).batches.create(**good)
    assert refused.value.response.headers["retry-after"] == "60"
    monkeypatch.undo()
    _, key = await gateway.new_tenant("narrow", ["batch"])
    async with gateway.client(key) as narrow:
        with pytest.raises(openai.PermissionDeniedError):
            await narrow.batches.create(**good)
        for call in (narrow.batches.retrieve, narrow.batches.cancel):
            batch = await client.batches.create(**good)
            with pytest.raises(openai.NotFoundError):
                await call(batch.id)
        assert [b async for b in narrow.batches.list()] == []


async def test_a_batch_cancelled_before_it_began_is_cancelled_all_the_same(gateway, client):
    batch = await create(client, [line(0)])
    for _ in range(2):
        batch = await client.batches.cancel(batch.id)
        assert batch.status == "cancelling"


async def test_nobody_but_a_batch_may_use_its_keys(gateway, client):
    with pytest.raises(openai.BadRequestError):
        await client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "x"}],
            extra_headers={"idempotency-key": "batch:batch_0:1"},
        )


async def test_a_deleted_input_is_read_to_the_end_and_then_purged(gateway, client, jobs_process):
    batch = await create(client, [line(i) for i in range(5)])
    await client.files.delete(batch.input_file_id)
    batch = await ended(client, batch.id)
    assert batch.request_counts.completed == 5
    deadline = time.monotonic() + stretched(10)
    while len([p for p in gateway.settings.files_dir.iterdir() if p.is_file()]) > 1:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.1)


async def test_a_revoked_key_stops_its_batch(gateway, client, worker):
    """As a cancel does: nothing of it is left running under a key that is no more."""
    from accounting.access import api_keys
    from gateway.base.app_keys import DATABASE
    from workers.jobs.base import settings as jobs_settings
    from workers.jobs.base.time_limit import TimeLimit
    from workers.jobs.base.tracing import provider
    from workers.jobs.batches.tasks import Look, Turns

    tenant_id, key = await gateway.new_tenant("leaver")
    async with gateway.client(key) as leaver:
        batch_id = (await create(leaver, [line(i) for i in range(3)])).id
    settings = jobs_settings.JobsSettings(
        home=gateway.settings.home, url=gateway.url, broker_url="redis://", test_time_scale=0.01
    )
    look = Look(settings, lambda: False, provider().get_tracer("test"), Turns(), TimeLimit())
    assert await look.run() == 1  # validated
    async with gateway.app[DATABASE].write() as conn:
        (row,) = (await api_keys.list_keys(conn, tenant_id)).items
        await api_keys.revoke(conn, tenant_id, row.id, now=int(time.time()))
    await look.run()
    await look.run()
    (found,) = await gateway.sql("SELECT state, num_completed, num_failed FROM batch WHERE id = :id", id=batch_id)
    assert tuple(found) == ("cancelled", 0, 3)
    assert not await gateway.sql("SELECT 1 FROM ledger_entry WHERE kind = 'settle'")
