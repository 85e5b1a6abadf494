"""Attacks by how many, how often and in which way, each on a gateway of its own (security.md section 8)."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest
from gateways import MODEL, PEPPER, RunningGateway

from accounting.access import api_keys
from accounting.tenants import tenants
from accounting.values.types import Limits
from gateway.base.app_keys import DATABASE

CHAT = "/v1/chat/completions"


def chat(**more: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": "hello there"}], "max_tokens": 30} | more


async def test_attack_D04_leaving_just_before_the_usage_saves_nothing(gateway: RunningGateway) -> None:
    wanted = chat(stream=True, stream_options={"include_usage": True}, seed=7)
    async with gateway.session() as session:
        async with session.post(CHAT, json=wanted) as answer:
            told = [line async for line in answer.content if b'"usage":{' in line]
        async with session.post(CHAT, json=wanted) as answer:
            async for line in answer.content:
                if b'"finish_reason":"' in line:
                    break
            answer.close()
    await gateway.balanced()
    rows = await gateway.sql(
        "SELECT cache_read + cache_write + uncached, output FROM ledger_entry WHERE kind = 'settle'"
    )
    usage = json.loads(told[-1].removeprefix(b"data: "))["usage"]
    assert [tuple(row) for row in rows] == [(usage["prompt_tokens"], usage["completion_tokens"])] * 2


@pytest.mark.parametrize("more", [{}, {"n": 3}, {"tools": [{"type": "function", "function": {"name": "f"}}]}])
async def test_attack_D05_no_way_to_take_an_answer_is_cheaper(gateway: RunningGateway, more: dict[str, Any]) -> None:
    ways = [{}, {"stream": True}, {"stream": True, "stream_options": {"include_usage": True}}]
    async with gateway.session() as session:
        for way in ways:
            async with session.post(CHAT, json=chat(seed=7, **more, **way)) as answer:
                assert answer.status == 200
                await answer.read()
    await gateway.balanced()
    rows = await gateway.sql(
        "SELECT cache_read + cache_write + uncached, output FROM ledger_entry WHERE kind = 'settle'"
    )
    assert len(rows) == len(ways)
    assert len({tuple(row) for row in rows}) == 1
    assert rows[0].output > 0


async def test_attack_D06_a_hundred_keys_of_one_tenant_have_its_limit_together(gateway: RunningGateway) -> None:
    most, now = 5, int(time.time())
    tenant, _ = await gateway.new_tenant("many keys")
    async with gateway.app[DATABASE].write() as conn:
        await tenants.set_limits(conn, tenant, Limits(requests_per_minute=most), now=now)
        made = [await api_keys.create(conn, PEPPER, tenant_id=tenant, now=now) for _ in range(100)]

    async def ask(key: str) -> int:
        async with gateway.session(key) as session, session.post(CHAT, json=chat(max_tokens=1)) as answer:
            return answer.status

    statuses = await asyncio.gather(*(ask(one.value) for one in made))
    assert 1 <= statuses.count(200) <= most
    assert set(statuses) == {200, 429}


HOSTILE = ("' OR 1=1 --", "%", "*", "_", "-1", "1e9", "0x10", "99999999999999999999", "desc;drop table file", "\0", "é")


@pytest.mark.parametrize("path", ["/v1/files", "/v1/batches", "/v1/requests", "/v1/models", "/v1/messages/batches"])
@pytest.mark.parametrize("name", ["limit", "order", "after", "after_id"])
async def test_attack_E03_what_lists_are_asked_with_is_taken_or_refused(
    gateway: RunningGateway, path: str, name: str
) -> None:
    _, stranger = await gateway.new_tenant("stranger")
    async with gateway.session(stranger) as session:
        async with session.get(path) as answer:
            plain = (await answer.json())["data"]
        for value in HOSTILE:
            async with session.get(path, params={name: value}) as answer:
                assert answer.status in (200, 400, 404), (value, await answer.text())
                if answer.status == 200:  # the parameter or its value means nothing here
                    assert (await answer.json())["data"] == plain


@pytest.mark.parametrize(
    "name",
    [
        "../../etc/passwd",
        "/etc/passwd",
        "http://127.0.0.1/x",
        "org/repository",
        "file:///dev/zero",
        MODEL + "/..",
        "\0",
        "*",
    ],
)
async def test_attack_E08_a_model_that_looks_like_a_place_is_no_model(gateway: RunningGateway, name: str) -> None:
    bodies = {
        CHAT: chat(model=name),
        "/v1/completions": {"model": name, "prompt": "x"},
        "/v1/embeddings": {"model": name, "input": "x"},
        "/v1/responses": {"model": name, "input": "x"},
        "/tokenize": {"model": name, "prompt": "x"},
    }
    async with gateway.session() as session:
        for path, body in bodies.items():
            async with session.post(path, json=body) as answer:
                assert (answer.status, (await answer.json())["error"]["code"]) == (404, "model_not_found"), path
