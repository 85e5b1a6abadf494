"""What a request holds goes when it ends, and its record with its row of the request log two seconds later at the
latest: not with the next full collection, which stops every stream.
"""

from __future__ import annotations

import asyncio
import gc

import pytest
import redis.asyncio
from gateways import MODEL, until

from gateway.generation.stream import GENERATION
from gateway.routing.links.fleet import LOOK_EVERY_S
from gateway.telemetry.record import RequestRecord

pytestmark = pytest.mark.rest

NUM = 30
BODIES = {
    "whole": {"model": MODEL, "prompt": "Water the fields.", "max_tokens": 4},
    "stream": {"model": MODEL, "prompt": "Water the fields.", "max_tokens": 4, "stream": True},
    "refused": {"model": MODEL, "prompt": "Water the fields.", "max_tokens": -4},
}


def num_records() -> int:
    # Not `isinstance`, which asks what others have imported: some of that warns when it is asked.
    return sum(type(thing) is RequestRecord for thing in gc.get_objects())


@pytest.mark.parametrize("kind", BODIES)
async def test_an_ended_request_is_freed_without_the_collector(gateway, kind):
    async with gateway.session() as session:
        gc.collect()
        gc.disable()
        try:
            before = num_records()
            for _ in range(NUM):
                async with session.post("/v1/completions", json=BODIES[kind]) as answer:
                    assert answer.status == (400 if kind == "refused" else 200)
                    await answer.read()
            await until(lambda: num_records() - before < NUM // 3)
        finally:
            gc.enable()


async def test_p3_workers_are_found_without_looking_through_all_keys(gateway, redis_url):
    """P3: 300 s of ended requests lie in Redis, and looking at each of them twice a second took 8 % of a core."""
    async with redis.asyncio.Redis.from_url(redis_url) as client:
        await client.mset({f"of an ended request {number}": "" for number in range(5_000)})
        before = await num_scans(client)
        await asyncio.sleep(4 * LOOK_EVERY_S)
        assert await num_scans(client) == before
    assert len(gateway.app[GENERATION].fleet.links) == 1


async def num_scans(client: redis.asyncio.Redis) -> int:
    stats = await client.info("commandstats")
    return sum(stats.get(f"cmdstat_{name}", {"calls": 0})["calls"] for name in ("scan", "keys"))
