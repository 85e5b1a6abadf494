"""T2: a Redis that stands still for a moment, as on a busy machine, refuses no test's request."""

from __future__ import annotations

import pytest
import redis.asyncio
from gateways import MODEL

PAUSE_MS = 700
COMPLETION = {"model": MODEL, "prompt": "Water the fields.", "max_tokens": 4}
ASKED = {"/v1/completions": COMPLETION, "/v1/quotes": {"endpoint": "/v1/completions", "body": COMPLETION}}


@pytest.mark.parametrize("path", ASKED)
async def test_t2_a_limiter_that_pauses_refuses_no_tests_request(gateway, redis_url, path):
    async with redis.asyncio.Redis.from_url(redis_url) as client, gateway.session() as session:
        await client.execute_command("CLIENT", "PAUSE", PAUSE_MS, "ALL")
        async with session.post(path, json=ASKED[path]) as answer:
            assert answer.status == 200, await answer.text()
