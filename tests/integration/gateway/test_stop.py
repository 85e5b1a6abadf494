from __future__ import annotations

import asyncio

import pytest
from gateways import running_gateway


@pytest.mark.parametrize("delay_s", [0, 0.001, 0.005, 0.02])
async def test_a_gateway_stops_at_whatever_moment_after_its_start(tmp_path, redis_url, delay_s):
    """A cancellation that meets a Redis client while it connects is not lost."""

    async def start_and_stop() -> None:
        async with running_gateway(tmp_path, redis_url):
            await asyncio.sleep(delay_s)

    await asyncio.wait_for(start_and_stop(), 15)
