"""A quote says what a request would cost, runs nothing, and binds."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import msgspec
import pytest
from fakes import ScriptedWorker
from gateways import MODEL, RunningGateway, until
from sqlalchemy import text

from accounting.lifecycle.bootstrap import EXAMPLE_RATES
from accounting.prices import prices
from accounting.tenants import tenants
from accounting.values.types import Limits
from gateway.base.app_keys import DATABASE
from gateway.metering import price_cache

CHAT = "/v1/chat/completions"
LONG = "The quick brown fox jumps over the lazy dog, and then it sleeps for a while in the sun. " * 2


def chat(content: str = LONG, **more: Any) -> dict[str, Any]:
    return {
        "model": MODEL,
        "messages": [{"role": "user", "content": content}],
        "max_tokens": 20,
        "ignore_eos": True,
    } | more


async def post(
    gateway: RunningGateway, path: str, body: dict[str, Any], api_key: str | None = None, **headers: str
) -> tuple[int, dict[str, Any]]:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    async with gateway.session(api_key) as session, session.post(path, json=body, headers=named) as answer:
        return answer.status, await answer.json()


async def quote(gateway: RunningGateway, body: dict[str, Any], endpoint: str = CHAT) -> dict[str, Any]:
    status, made = await post(gateway, "/v1/quotes", {"endpoint": endpoint, "body": body})
    assert status == 200, made
    return made


async def charged(gateway: RunningGateway) -> list[tuple[int, str]]:
    await gateway.settled()
    rows = await gateway.sql("SELECT charge, price_version FROM ledger_entry WHERE kind = 'settle' ORDER BY request_id")
    return [(row.charge, row.price_version) for row in rows]


async def test_nothing_runs_and_what_is_cached_is_told(gateway: RunningGateway, worker: ScriptedWorker) -> None:
    before = await quote(gateway, chat())
    assert before["object"] == "quote"
    assert before["num_cached_tokens"] == 0
    assert before["expected_queue_ms"] == 0
    assert worker.runner.steps == []
    await gateway.settled()
    assert await gateway.sql("SELECT 1 FROM ledger_entry") == []
    status, answer = await post(gateway, CHAT, chat())
    assert status == 200
    assert answer["usage"]["prompt_tokens"] == before["num_prompt_tokens"]
    after = await quote(gateway, chat())
    assert after["num_cached_tokens"] >= 100
    assert after["likely_charge_micro_units"] < before["likely_charge_micro_units"]
    assert after["max_charge_micro_units"] == before["max_charge_micro_units"]
    # What was told is what happens.
    await post(gateway, CHAT, chat())
    first, second = await charged(gateway)
    assert first[0] == before["likely_charge_micro_units"] <= before["max_charge_micro_units"]
    assert second[0] == after["likely_charge_micro_units"]


async def test_several_prompts_and_choices_are_added_up(gateway: RunningGateway) -> None:
    body = {"model": MODEL, "prompt": ["one", "three"], "n": 2, "max_tokens": 5, "ignore_eos": True}
    made = await quote(gateway, body, "/v1/completions")
    assert made["max_output_tokens"] == 20
    status, answer = await post(gateway, "/v1/completions", body, x_headgate_quote=made["id"])
    assert status == 200
    assert answer["usage"]["completion_tokens"] == 20
    assert answer["usage"]["prompt_tokens"] == made["num_prompt_tokens"]
    assert sum(charge for charge, _ in await charged(gateway)) <= made["max_charge_micro_units"]


async def test_a_quote_binds_the_price_of_its_moment(gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(price_cache, "MAX_AGE_S", 0.1)
    monkeypatch.setattr(price_cache, "CONFIRMED_S", 0.1)
    made = await quote(gateway, chat())
    async with gateway.app[DATABASE].write() as conn:
        dearer = {
            (MODEL, tier): msgspec.structs.replace(rates, output=rates.output * 1000)
            for tier, rates in EXAMPLE_RATES.items()
        }
        version = await prices.add_version(conn, "standard", dearer, int(time.time() * 1000))
    assert version != made["price_version"]
    await asyncio.sleep(0.2)  # prices are remembered for half of it
    assert (await quote(gateway, chat()))["price_version"] == version
    status, _ = await post(gateway, CHAT, chat(), x_headgate_quote=made["id"])
    assert status == 200
    ((charge, used),) = await charged(gateway)
    assert used == made["price_version"]
    assert charge <= made["max_charge_micro_units"]
    await gateway.balanced()


async def until_taken(gateway: RunningGateway, quote_id: str) -> None:
    """On a slow machine the limiter may be late: a 503 gives the quote back."""
    status = 503
    while status == 503:
        status, _ = await post(gateway, CHAT, chat(), x_headgate_quote=quote_id)
    assert status == 200


async def test_expired_used_foreign_or_of_another_body_it_is_invalid(gateway: RunningGateway) -> None:
    made = await quote(gateway, chat())

    async def refused(body: dict[str, Any], quote_id: str, api_key: str | None = None) -> bool:
        status, answer = await post(gateway, CHAT, body, api_key, x_headgate_quote=quote_id)
        return (status, answer.get("error", {}).get("code")) == (400, "quote_invalid")

    assert await refused(chat(max_tokens=21), made["id"])
    assert await refused(chat(), "quote_unknown")
    _, other = await gateway.new_tenant("other", {"chat"})
    assert await refused(chat(), made["id"], other)
    await until_taken(gateway, made["id"])
    assert await refused(chat(), made["id"]), "used"
    expired = await quote(gateway, chat())
    async with gateway.app[DATABASE].write() as conn:
        await conn.execute(text("UPDATE quote SET expires_at_ms = 1"))
    assert await refused(chat(), expired["id"])


async def test_a_refused_request_gives_its_quote_back(gateway: RunningGateway, worker: ScriptedWorker) -> None:
    made = await quote(gateway, chat())
    worker.runner.fail_next = RuntimeError("broken")
    assert (await post(gateway, CHAT, chat(), x_headgate_quote=made["id"]))[0] == 500
    assert (await post(gateway, CHAT, chat(), x_headgate_quote=made["id"]))[0] == 200


async def test_a_replay_under_a_key_needs_no_second_quote(gateway: RunningGateway) -> None:
    made = await quote(gateway, chat())
    answers = [await post(gateway, CHAT, chat(), x_headgate_quote=made["id"], idempotency_key="k") for _ in range(2)]
    assert answers[0] == answers[1]
    assert answers[0][0] == 200
    assert len(await charged(gateway)) == 1


async def test_it_is_checked_as_the_request_and_counts_as_one(gateway: RunningGateway) -> None:
    for body, status in (
        ({"endpoint": CHAT, "body": chat(max_tokens=-1)}, 400),
        ({"endpoint": "/v1/files", "body": {}}, 400),
        ({"endpoint": CHAT}, 400),
        ({"endpoint": CHAT, "body": chat(model="none")}, 404),
    ):
        assert (await post(gateway, "/v1/quotes", body))[0] == status, body
    tenant_id, api_key = await gateway.new_tenant("small", {"chat"})
    async with gateway.app[DATABASE].write() as conn:
        await tenants.set_limits(conn, tenant_id, Limits(requests_per_minute=2), now=int(time.time()))
    asked = {"endpoint": CHAT, "body": chat()}
    statuses = [(await post(gateway, "/v1/quotes", asked, api_key))[0] for _ in range(3)]
    assert statuses == [200, 200, 429]


async def test_without_an_answer_of_a_worker_there_is_no_quote(
    gateway: RunningGateway, worker: ScriptedWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.routing.links.worker_link.PROBE_S", 0.2)
    worker.runner.hang()
    running = asyncio.create_task(post(gateway, CHAT, chat("hello")))
    await until(lambda: bool(worker.engine.attempts))
    status, answer = await post(gateway, "/v1/quotes", {"endpoint": CHAT, "body": chat()})
    assert (status, answer["error"]["code"]) == (503, "quote_unavailable")
    worker.runner.release()
    assert (await running)[0] == 200
