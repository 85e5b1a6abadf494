"""What a request holds goes when it ends, not with the next full collection, which stops every stream."""

from __future__ import annotations

import gc

import pytest
from gateways import MODEL

from gateway.telemetry.record import RequestRecord

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
            assert num_records() - before < NUM // 3
        finally:
            gc.enable()
