"""An estimate of a batch says what the batch then costs, holds nothing and runs nothing."""

from __future__ import annotations

import asyncio
import io
import json
import time
from pathlib import Path
from typing import Any

import pytest
from fakes import ScriptedWorker
from gateways import MODEL, RunningGateway, running_gateway
from sqlalchemy import insert, text

from accounting.batches import batches
from accounting.batches.order import predicted_tokens, prefix_bytes
from accounting.lifecycle.bootstrap import EXAMPLE_RATES
from accounting.tables.batch_models import BatchChunk
from accounting.tenants import tenants
from accounting.values.tenant_types import ModelLimits
from accounting.values.types import Limits
from gateway.base.app_keys import DATABASE

CHAT = "/v1/chat/completions"
LONG = "The quick brown fox jumps over the lazy dog. " * 4


def line(number: int, **body: Any) -> dict[str, Any]:
    whole = {"model": MODEL, "messages": [{"role": "user", "content": f"say {number}"}], "max_tokens": 8}
    return {"custom_id": f"line-{number}", "method": "POST", "url": CHAT, "body": whole | body}


async def upload(gateway: RunningGateway, lines: list[Any], api_key: str | None = None) -> str:
    content = b"".join((one if isinstance(one, bytes) else json.dumps(one).encode()) + b"\n" for one in lines)
    async with gateway.client(api_key) as client:
        return (await client.files.create(file=("in.jsonl", io.BytesIO(content)), purpose="batch")).id


async def ask(
    gateway: RunningGateway, file_id: str, api_key: str | None = None, **more: Any
) -> tuple[int, dict[str, Any]]:
    body = {"input_file_id": file_id, "endpoint": CHAT, "completion_window": "24h"} | more
    async with gateway.session(api_key) as session, session.post("/v1/batches/estimate", json=body) as answer:
        return answer.status, await answer.json()


async def estimated(gateway: RunningGateway, lines: list[Any], **more: Any) -> dict[str, Any]:
    status, found = await ask(gateway, await upload(gateway, lines), **more)
    assert status == 200, found
    return found


async def quoted(gateway: RunningGateway, body: dict[str, Any]) -> dict[str, Any]:
    asked = {"endpoint": CHAT, "body": body}
    async with gateway.session() as session, session.post("/v1/quotes", json=asked) as answer:
        return await answer.json()


async def test_the_sums_are_those_of_the_lines_quotes(gateway: RunningGateway, worker: ScriptedWorker) -> None:
    lines = [line(i, max_tokens=3 + i, n=1 + i % 2, messages=[{"role": "user", "content": LONG}]) for i in range(7)]
    found = await estimated(gateway, lines)
    quotes = [await quoted(gateway, one["body"]) for one in lines]
    assert found["num_lines"] == found["num_counted_lines"] == 7, found
    assert not found["is_sampled"] and found["errors"]["data"] == []
    assert found["num_prompt_tokens"] == sum(one["num_prompt_tokens"] for one in quotes)
    assert found["max_output_tokens"] == sum(one["max_output_tokens"] for one in quotes)
    rates = EXAMPLE_RATES["batch"]
    most = sum(
        -(-one["num_prompt_tokens"] * max(rates.cache_read, rates.cache_write, rates.uncached) // 10**6)
        + -(-one["max_output_tokens"] * rates.output // 10**6)
        for one in quotes
    )
    assert found["max_charge_micro_units"] == most
    assert 0 < found["least_charge_micro_units"] < most
    assert (found["outlook"], found["reasons"], found["basis"]) == ("runs", [], None)
    assert (found["likely_charge_micro_units"], found["expected_finish_at"]) == (None, None)
    assert worker.runner.steps == []
    assert await gateway.sql("SELECT 1 FROM batch") == []


async def test_lines_that_cannot_run_are_told_by_their_number(gateway: RunningGateway) -> None:
    lines: list[Any] = [line(i) for i in range(8)]
    lines[1] = b"{not json"
    lines[3] = line(3) | {"custom_id": "line-2"}
    lines[4] = line(4, temperature=9)
    lines[6] = line(6, messages=[{"role": "user", "content": "long " * 2000}])
    found = await estimated(gateway, lines, headgate={"invalid_lines": "skip"})
    assert [(one["line"], one["code"]) for one in found["errors"]["data"]] == [
        (2, "invalid_json_line"),
        (4, "duplicate_custom_id"),
        (5, "invalid_value"),
        (7, "context_length_exceeded"),
    ]
    assert (found["num_lines"], found["num_invalid_lines"], found["num_refused_lines"]) == (8, 2, 2)
    assert found["outlook"] == "runs"
    alone = await estimated(gateway, [lines[0], lines[2], lines[5], lines[7]])
    assert found["max_charge_micro_units"] == alone["max_charge_micro_units"]
    rejected = await estimated(gateway, lines)
    assert (rejected["outlook"], rejected["reasons"][0]["code"]) == ("fails", "invalid_json_line")


async def test_a_sample_stands_for_all_lines_and_says_so(gateway: RunningGateway) -> None:
    lines = [line(i, messages=[{"role": "user", "content": "word " * (i % 10)}]) for i in range(200)]
    whole = await estimated(gateway, lines)
    some = await estimated(gateway, lines, headgate={"max_counted_lines": 40})
    assert (some["num_lines"], some["num_counted_lines"], some["is_sampled"]) == (200, 40, True)
    for name in ("num_prompt_tokens", "max_output_tokens", "max_charge_micro_units"):
        assert some[name] == pytest.approx(whole[name], rel=0.1), name


async def test_budgets_and_waiting_tokens_decide_the_outlook(gateway: RunningGateway) -> None:
    lines = [line(i, max_tokens=100) for i in range(5)]
    found = await estimated(gateway, lines)
    [[tenant_id]] = await gateway.sql("SELECT id FROM tenant WHERE id LIKE 'proj%'")
    limit = (found["least_charge_micro_units"] + found["max_charge_micro_units"]) // 2
    new = {"project_id": tenant_id, "period": "month", "limit_micro_units": limit}
    async with gateway.session(gateway.keys.admin_key) as admin:
        made = await (await admin.post("/admin/v1/budgets", json=new)).json()
        found = await estimated(gateway, lines)
        assert found["outlook"] == "may_pause"
        assert (found["reasons"][0]["budget"], found["reasons"][0]["remaining_micro_units"]) == (made["id"], limit)
        await admin.patch(f"/admin/v1/budgets/{made['id']}", json={"limit_micro_units": 1})
    async with gateway.app[DATABASE].write() as conn:
        await tenants.set_model_limits(conn, tenant_id, ModelLimits(MODEL, Limits(), 10), now=int(time.time()))
    found = await estimated(gateway, lines)
    assert [one["code"] for one in found["reasons"]] == ["insufficient_quota", "backlog_exceeded"]
    assert found["outlook"] == "fails"


async def past_batches_say_what_is_likely(gateway: RunningGateway) -> None:
    lines = [line(i) for i in range(10)]
    file_id = await upload(gateway, lines)
    [[tenant_id, key_id]] = await gateway.sql("SELECT tenant_id, id FROM api_key WHERE tenant_id LIKE 'proj%'")
    now = int(time.time())
    async with gateway.app[DATABASE].write() as conn:
        past = await batches.create(
            conn, tenant_id, key_id, input_file_id=file_id, endpoint=CHAT, completion_window="24h", now=now - 1000
        )
        values = "state='completed', model=:m, num_completed=20, in_progress_at=:a, finalizing_at=:b, completed_at=:b"
        await conn.execute(
            text(f"UPDATE batch SET {values}, cache_read=300, uncached=100, output=60 WHERE id=:i"),
            {"m": MODEL, "a": now - 900, "b": now - 800, "i": past.id},
        )
    status, found = await ask(gateway, file_id)
    assert status == 200
    assert found["basis"] == {"num_batches": 1, "num_lines": 20}
    assert (found["expected_output_tokens"], found["cached_share"]) == (30, pytest.approx(0.75, abs=0.01))
    assert found["least_charge_micro_units"] < found["likely_charge_micro_units"] < found["max_charge_micro_units"]
    tokens = found["num_prompt_tokens"] + 30
    assert found["expected_finish_at"] - now == pytest.approx(tokens / 4.6, abs=3)
    own = sum(predicted_tokens(prefix_bytes(one["body"])) for one in lines)
    for change, turns in (("weight_percent=100", 1), ("weight_percent=300", 3), ("status='suspended'", 0)):
        busy = await others_wait(gateway, 1_000_000)
        async with gateway.app[DATABASE].write() as conn:
            await conn.execute(text(f"UPDATE tenant SET {change} WHERE id=:t"), {"t": busy})
        _, found = await ask(gateway, file_id)
        waits_s = found["expected_finish_at"] - time.time() - tokens / 4.6
        assert waits_s == pytest.approx(turns * own / 4, abs=5), change
        async with gateway.app[DATABASE].write() as conn:
            await conn.execute(text("UPDATE batch_chunk SET predicted_tokens=4"))
    _, found = await ask(gateway, file_id)
    assert found["expected_finish_at"] - time.time() == pytest.approx(tokens / 4.6 + 2, abs=3), (
        "two may run, with 4 each"
    )


async def others_wait(gateway: RunningGateway, num_tokens: int) -> str:
    """Another tenant's batch has so many tokens before it. Returns the tenant."""
    tenant_id, key = await gateway.new_tenant("busy", scopes=("batch", "chat", "files:write"))
    file_id = await upload(gateway, [line(0)], key)
    [[key_id]] = await gateway.sql("SELECT id FROM api_key WHERE tenant_id=:t", t=tenant_id)
    async with gateway.app[DATABASE].write() as conn:
        batch = await batches.create(
            conn, tenant_id, key_id, input_file_id=file_id, endpoint=CHAT, completion_window="24h", now=int(time.time())
        )
        await conn.execute(
            text("UPDATE batch SET state='in_progress', model=:m WHERE id=:i"), {"m": MODEL, "i": batch.id}
        )
        chunk = {"batch_id": batch.id, "seq": 0, "tenant_id": tenant_id, "state": "queued", "fence": 0}
        values = {"not_before_ms": 0, "predicted_tokens": num_tokens, "num_lines": 1, "lines": b""}
        await conn.execute(insert(BatchChunk).values(**chunk, **values))
    return tenant_id


async def test_a_file_of_which_each_line_would_be_refused_fails(gateway: RunningGateway) -> None:
    found = await estimated(gateway, [line(number, temperature=9) for number in range(3)])
    assert (found["num_refused_lines"], found["outlook"]) == (3, "fails")
    assert [reason["code"] for reason in found["reasons"]] == ["all_lines_refused"]
    found = await estimated(gateway, [line(0, temperature=9), line(1)])
    assert (found["num_refused_lines"], found["outlook"], found["reasons"]) == (1, "runs", [])


async def test_another_tenants_file_and_wrong_fields_are_refused(gateway: RunningGateway) -> None:
    file_id = await upload(gateway, [line(0)])
    _, key = await gateway.new_tenant("other", scopes=("batch", "chat"))
    assert (await ask(gateway, file_id, key))[0] == 404
    assert (await ask(gateway, file_id, endpoint="/v1/rerank"))[0] == 400
    assert (await ask(gateway, file_id, completion_window="1h"))[0] == 400
    assert (await ask(gateway, file_id, headgate={"max_counted_lines": 0}))[0] == 400
    found = await estimated(gateway, [])
    assert (found["outlook"], found["errors"]["data"][0]["code"]) == ("fails", "empty_file")


async def test_one_estimate_of_a_tenant_at_a_time_and_the_loop_stays_free(gateway: RunningGateway) -> None:
    lines = [line(i, messages=[{"role": "user", "content": "x" * 400}]) for i in range(3_000)]
    lines += [
        b'{"custom_id": "huge", "body": {"model": "' + b"y" * 6_000_000 + b'"}}',
        line(1, messages=["z" * 3_000_000]),
    ]
    file_id = await upload(gateway, lines)
    held: list[float] = []

    async def watch() -> None:
        while True:
            began = time.thread_time()
            await asyncio.sleep(0.001)
            held.append(time.thread_time() - began)

    watching = asyncio.create_task(watch())
    first, second = await asyncio.gather(ask(gateway, file_id), ask(gateway, file_id))
    watching.cancel()
    assert sorted((first[0], second[0])) == [200, 429]
    found = first[1] if first[0] == 200 else second[1]
    assert (found["num_lines"], found["num_invalid_lines"]) == (3_002, 2)
    assert max(held) < 0.1, max(held)


async def test_past_batches_say_what_is_likely(tmp_path: Path, redis_url: str, database_url: str) -> None:
    async with (
        ScriptedWorker(tmp_path / "w0.sock", redis_url=redis_url),
        running_gateway(tmp_path / "home", redis_url, database_url=database_url) as gateway,
    ):
        await gateway.workers(1)
        await past_batches_say_what_is_likely(gateway)
