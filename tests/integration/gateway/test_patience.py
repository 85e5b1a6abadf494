"""T2: what a busy machine or a flood of others holds up for a moment refuses nobody's request."""

from __future__ import annotations

import asyncio
import time

import pytest
import redis.asyncio
from gateways import MODEL
from load import stretched
from sqlalchemy import text

from gateway.base.app_keys import DATABASE

PAUSE_MS = 700
COMPLETION = {"model": MODEL, "prompt": "Water the fields.", "max_tokens": 4}
ASKED = {"/v1/completions": COMPLETION, "/v1/quotes": {"endpoint": "/v1/completions", "body": COMPLETION}}


@pytest.mark.parametrize("path", ASKED)
async def test_t2_a_limiter_that_pauses_refuses_no_tests_request(gateway, redis_url, path):
    async with redis.asyncio.Redis.from_url(redis_url) as client, gateway.session() as session:
        await client.execute_command("CLIENT", "PAUSE", PAUSE_MS, "ALL")
        async with session.post(path, json=ASKED[path]) as answer:
            assert answer.status == 200, await answer.text()


async def test_a_new_tenants_first_request_waits_for_no_writer_of_sql(gateway, monkeypatch):
    """A flood of background runs holds SQLite's one writer for longer than the limiter waits for a state."""
    monkeypatch.setattr("gateway.limiter.rebuild.WAIT_S", 1.5)
    async with gateway.session() as session, session.post("/v1/completions", json=COMPLETION) as answer:
        assert answer.status == 200
    tenant_id, key = await gateway.new_tenant("newcomer")
    claimed = "SELECT count(*) FROM limiter_built WHERE tenant_id = :t"
    async with gateway.app[DATABASE].write() as held, gateway.session(key) as session:
        await held.execute(text("UPDATE tenant SET name = name"))
        writer = asyncio.create_task(asyncio.sleep(4))
        async with session.post("/v1/completions", json=COMPLETION) as answer:
            assert answer.status == 200, await answer.text()
        assert not writer.done()
        assert await gateway.sql(claimed, t=tenant_id) == [(0,)]
        writer.cancel()
    until = time.monotonic() + stretched(10)
    while await gateway.sql(claimed, t=tenant_id) != [(1,)]:
        assert time.monotonic() < until
        await asyncio.sleep(0.05)
