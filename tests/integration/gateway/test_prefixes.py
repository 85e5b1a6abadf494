"""Prompts that the operator publishes: filled by the operator's own prefill, hit by every tenant, private to nobody."""

from __future__ import annotations

import asyncio

import pytest
from fakes import ScriptedWorker
from gateways import MODEL, until

PATH = "/admin/v1/prefixes"
SYSTEM = "You are the help desk of a canal company. " * 4
MESSAGES = [{"role": "system", "content": SYSTEM}]


async def call(gateway, method, path=PATH, body=None, key=None):
    async with gateway.session(key or gateway.keys.admin_key) as session:
        answer = await session.request(method, path, json=body)
        return answer.status, await answer.json()


async def publish(gateway, **fields):
    """Registers a prefix and waits until each linked worker has pinned it."""
    status, made = await call(gateway, "POST", body={"model": MODEL, **fields})
    assert status == 200, made
    return await pinned(gateway, made["id"])


async def pinned(gateway, prefix_id, num_workers=1):
    for _ in range(500):
        _, found = await call(gateway, "GET", f"{PATH}/{prefix_id}")
        if found["state"] == "pinned" and len(found["workers"]) == num_workers:
            return found
        await asyncio.sleep(0.02)
    raise AssertionError(found)


async def cached(gateway, key, question="where?", system=SYSTEM, **extra):
    async with gateway.client(key) as client:
        reply = await client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "system", "content": system}, {"role": "user", "content": question}],
            max_tokens=2,
            extra_body=extra,
        )
    return reply.usage.prompt_tokens_details.cached_tokens


async def test_every_tenant_finds_a_published_prompt_and_nothing_else_of_another(gateway, worker):
    made = await publish(gateway, name="desk", messages=MESSAGES)
    assert (made["object"], made["name"], made["expires_at"]) == ("prefix", "desk", None)
    (on_worker,) = made["workers"]
    block = worker.runner.block_size
    shared = made["num_tokens"] // block * block
    assert on_worker["num_tokens"] == shared > len(SYSTEM) // block * block - block

    _, one = await gateway.new_tenant("one")
    _, two = await gateway.new_tenant("two")
    question = "which gate feeds the lower field, and since when? " * 3
    assert await cached(gateway, one, question) == shared
    assert await cached(gateway, one, question) > shared  # its own question, behind the wall
    assert await cached(gateway, two, question) == shared  # not the other's
    assert await cached(gateway, two, question, cache_salt="s") == shared
    await gateway.balanced()


async def test_a_fill_is_the_operators_own_request_in_the_ledger(gateway):
    made = await publish(gateway, messages=MESSAGES)
    await gateway.balanced()
    rows = await gateway.sql("SELECT tenant_id, outcome, cache_read + cache_write + uncached, output FROM ledger_entry")
    assert [tuple(row) for row in rows] == [("operator", "ok", made["num_tokens"], 0)]


async def test_what_was_never_published_stays_behind_the_wall(gateway):
    await publish(gateway, messages=MESSAGES)
    _, one = await gateway.new_tenant("one")
    _, two = await gateway.new_tenant("two")
    other = SYSTEM.replace("canal", "rocket")
    assert await cached(gateway, one, system=other) < len(SYSTEM) // 2
    assert await cached(gateway, two, system=other) < len(SYSTEM) // 2
    assert await cached(gateway, one, system=other) > len(SYSTEM) // 2


async def test_a_longer_published_prompt_begins_with_a_shorter_one(gateway, worker):
    longer = SYSTEM + "Answer in one sentence, and name the gate. " * 2
    short = await publish(gateway, name="short", text=SYSTEM)
    long = await publish(gateway, name="long", text=longer)
    block = worker.runner.block_size
    assert short["num_tokens"] < long["num_tokens"]
    assert worker.engine.cache.num_pinned == long["num_tokens"] // block  # stored once

    async with gateway.client() as client:
        reply = await client.completions.create(model=MODEL, prompt=longer + "Why?", max_tokens=1)
    assert reply.usage.prompt_tokens_details.cached_tokens == long["num_tokens"] // block * block


async def test_a_deleted_prefix_is_found_by_nobody_and_others_stay_pinned(gateway, worker):
    gone = await publish(gateway, name="gone", text=SYSTEM)
    kept = await publish(gateway, name="kept", text="Other rules hold on Sundays. " * 4)
    status, said = await call(gateway, "DELETE", f"{PATH}/{gone['id']}")
    assert (status, said["deleted"], said["id"]) == (200, True, gone["id"])
    status, _ = await call(gateway, "GET", f"{PATH}/{gone['id']}")
    assert status == 404
    kept_blocks = kept["num_tokens"] // worker.runner.block_size
    await until(lambda: worker.engine.cache.num_pinned == kept_blocks, 10)
    assert (await pinned(gateway, kept["id"]))["state"] == "pinned"
    async with gateway.client() as client:
        reply = await client.completions.create(model=MODEL, prompt=SYSTEM + "Why?", max_tokens=1)
    assert reply.usage.prompt_tokens_details.cached_tokens == 0
    _, listed = await call(gateway, "GET")
    assert [entry["id"] for entry in listed["data"]] == [kept["id"]]


async def test_an_expired_prefix_ends_by_itself(gateway, worker):
    made = await publish(gateway, text=SYSTEM, ttl_s=2)
    assert made["expires_at"] == made["created_at"] + 2
    await until(lambda: worker.engine.cache.num_pinned == 0, 15)
    status, _ = await call(gateway, "GET", f"{PATH}/{made['id']}")
    assert status == 404


async def test_a_worker_that_comes_later_is_filled_too(gateway, tmp_path, redis_url):
    made = await publish(gateway, messages=MESSAGES)
    async with ScriptedWorker(tmp_path / "w1.sock", redis_url=redis_url, slot=1, journal_dir=tmp_path / "w1"):
        await gateway.workers(2)
        found = await pinned(gateway, made["id"], num_workers=2)
        assert {entry["num_tokens"] for entry in found["workers"]} == {made["workers"][0]["num_tokens"]}


async def test_a_prefix_that_does_not_fit_the_pins_says_so(gateway, worker):
    pins = worker.engine.cache.num_blocks // 5 * worker.runner.block_size
    _, made = await call(gateway, "POST", body={"model": MODEL, "text": "x" * (pins + 100)})
    for _ in range(300):
        _, found = await call(gateway, "GET", f"{PATH}/{made['id']}")
        if found["state"] == "failed":
            break
        await asyncio.sleep(0.02)
    assert found["state"] == "failed"
    assert "no room" in found["workers"][0]["reason"]


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"model": MODEL}, "messages"),
        ({"model": MODEL, "text": "x" * 100, "messages": MESSAGES}, "text"),
        ({"model": MODEL, "text": "too short"}, "messages"),
        ({"model": MODEL, "text": "x" * 100, "pinned": False}, "pinned"),
        ({"model": MODEL, "text": "x" * 100, "ttl_s": 0}, "ttl_s"),
        ({"model": MODEL, "token_ids": [5, 10**6] * 20}, "token_ids"),
        ({"model": MODEL, "messages": "hello"}, "messages"),
        ({"model": MODEL, "text": "x" * 5000}, "messages"),
        ({"text": "x" * 100}, "model"),
    ],
)
async def test_what_cannot_be_published_is_refused_with_its_field(shared_gateway, body, param):
    status, answer = await call(shared_gateway, "POST", body=body)
    assert status == 400, answer
    assert answer["error"]["param"] == param


async def test_the_same_tokens_are_published_once(gateway):
    await publish(gateway, text=SYSTEM)
    status, answer = await call(gateway, "POST", body={"model": MODEL, "text": SYSTEM})
    assert status == 409, answer


async def test_a_tenants_key_neither_reads_nor_writes_public_prefixes(gateway):
    for method, path in (("POST", PATH), ("GET", PATH), ("GET", f"{PATH}/prefix_1"), ("DELETE", f"{PATH}/prefix_1")):
        status, answer = await call(gateway, method, path, {}, key=gateway.keys.api_key)
        assert status == 403, answer
