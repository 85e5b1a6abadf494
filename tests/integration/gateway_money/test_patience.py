"""B1: a Redis whose turn it is not for a while, as beside hundreds of requests on two cores, is not taken for gone; one
that hangs is, whatever the timeout."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest
import redis.asyncio

from gateway.base.redis_link import BREAKER_FAILURES, LimiterUnavailable
from gateway.base.settings import GatewaySettings
from gateway.limiter.limits import limiter_link


async def test_b1_a_redis_that_stands_still_for_half_a_second_refuses_nobody(own_redis) -> None:
    default = GatewaySettings.model_fields["limiter_timeout_s"].default
    link = limiter_link(own_redis.url, timeout_s=default)
    await link.command("PING")
    own_redis.send(signal.SIGSTOP)
    asyncio.get_running_loop().call_later(0.5, own_redis.send, signal.SIGCONT)
    assert await asyncio.gather(*(link.command("PING") for _ in range(10))) == [b"PONG"] * 10
    await link.close()


@pytest.mark.parametrize("timeout_s", [0.1, 0.5])
async def test_b1_one_that_hangs_is_not_waited_for_by_everybody(own_redis, timeout_s) -> None:
    link = limiter_link(own_redis.url, timeout_s=timeout_s)
    await link.command("PING")
    own_redis.send(signal.SIGSTOP)
    for _ in range(BREAKER_FAILURES):
        with pytest.raises(LimiterUnavailable):
            await link.command("PING")
    assert not link.is_open
    own_redis.send(signal.SIGCONT)
    await link.close()


async def test_a_connection_that_redis_closed_while_it_was_idle_is_opened_anew(own_redis) -> None:
    """The next call was sent on it, and counted as a failure of Redis."""
    link = limiter_link(own_redis.url)
    await link.command("PING")
    async with redis.asyncio.Redis.from_url(own_redis.url) as other:
        await other.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
    await asyncio.sleep(0.1)
    assert await link.command("ECHO", b"x" * 1_000_000) == b"x" * 1_000_000
    assert not link._failures
    await link.close()


async def test_what_is_not_redis_is_not_believed(tmp_path: Path) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    server = await asyncio.start_unix_server(answer, tmp_path / "socket")
    link = limiter_link(f"unix://{tmp_path / 'socket'}", timeout_s=0.2)
    with pytest.raises(LimiterUnavailable):
        await link.command("PING")
    await link.close()
    server.close()
