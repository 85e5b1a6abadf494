"""B1: a Redis whose turn it is not for a while, as beside hundreds of requests on two cores, is not taken for gone; one
that hangs is, whatever the timeout."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
import redis.asyncio
from aiohttp import web
from redis.exceptions import ReadOnlyError

from gateway.base.app_keys import REDIS, SETTINGS
from gateway.base.redis_link import BREAKER_FAILURES, LimiterUnavailable
from gateway.base.settings import GatewaySettings
from gateway.limiter.limits import limiter_link
from gateway.resources import shared_memory


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


async def become(own_redis, *primary: str) -> None:
    async with redis.asyncio.Redis.from_url(own_redis.url) as other:
        await other.execute_command("REPLICAOF", *primary)


async def test_a_connection_to_a_primary_that_became_a_replica_is_left(own_redis) -> None:
    """After a failover the link stayed on the demoted server until the gateway was started again."""
    link = limiter_link(own_redis.url)
    before = await link.command("CLIENT", "ID")
    await become(own_redis, "127.0.0.1", "1")
    with pytest.raises(LimiterUnavailable):
        await link.command("SET", "a", "1")
    await become(own_redis, "NO", "ONE")
    assert await link.command("SET", "a", "1") == b"OK"
    assert await link.command("CLIENT", "ID") != before
    await link.close()


@pytest.mark.parametrize("is_piped", [False, True])
async def test_the_common_client_leaves_a_primary_that_became_a_replica(own_redis, is_piped: bool) -> None:
    app = web.Application()
    app[SETTINGS] = SimpleNamespace(redis_url=own_redis.url)
    async for _ in shared_memory(app):
        client = app[REDIS]
        before = await client.client_id()
        await become(own_redis, "127.0.0.1", "1")
        with pytest.raises(ReadOnlyError):
            await (client.pipeline(transaction=False).set("a", 1).execute() if is_piped else client.set("a", 1))
        await become(own_redis, "NO", "ONE")
        assert await client.client_id() != before


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
