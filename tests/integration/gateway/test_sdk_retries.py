"""The openai client repeats by itself what it got no byte of: such a request is paid once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from fakes import ScriptedWorker
from gateways import MODEL, RunningGateway, until

from gateway.base.app_keys import DETACHED
from gateway.idempotency.retries import RETRIES

MESSAGES: list[Any] = [{"role": "user", "content": "hello"}]


class Proxy:
    """Passes bytes on; the first `num_cut` connections are cut when `may_cut` returns, before any byte came back."""

    def __init__(self, port: int, num_cut: int, may_cut: Callable[[], Awaitable[None]]) -> None:
        self.num_left = num_cut
        self._may_cut = may_cut
        self.num_begun = self.num_ended = 0
        self.port = 0
        self._to = port

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_begun += 1
        there, back = await asyncio.open_connection("127.0.0.1", self._to)
        pumps = [asyncio.create_task(_pump(reader, back))]
        try:
            if self.num_left:
                self.num_left -= 1
                await self._may_cut()
                return
            pumps.append(asyncio.create_task(_pump(there, writer)))
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            back.transport.abort()
            writer.transport.abort()
            self.num_ended += 1


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()


@asynccontextmanager
async def cutting_proxy(gateway: RunningGateway, worker: ScriptedWorker, num_cut: int) -> AsyncIterator[Proxy]:
    async def while_it_computes() -> None:
        before = worker.num_tokens_sent
        await until(lambda: worker.num_tokens_sent >= before + 3)

    proxy = Proxy(gateway.port, num_cut, while_it_computes)
    server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
    proxy.port = server.sockets[0].getsockname()[1]
    try:
        yield proxy
    finally:
        server.close()
        await until(lambda: proxy.num_ended == proxy.num_begun)


@pytest.fixture
async def slow_worker(tmp_path: Path, redis_url: str) -> AsyncIterator[ScriptedWorker]:
    async with ScriptedWorker(
        tmp_path / "w0.sock", redis_url=redis_url, tokens_per_s=60, journal_dir=tmp_path / "w0"
    ) as worker:
        yield worker


async def moved(gateway: RunningGateway) -> None:
    """Everything is told, shipped and moved."""
    await gateway.app[DETACHED].join(10)
    await gateway.settled()
    await gateway.app[RETRIES].move()


async def kinds(gateway: RunningGateway) -> list[str]:
    rows = await gateway.sql("SELECT kind FROM ledger_entry ORDER BY request_id, kind")
    return [row.kind for row in rows if row.kind != "late_abort"]


async def billed(gateway: RunningGateway) -> tuple[int, int]:
    """(requests, tokens)"""
    (row,) = await gateway.sql(
        "SELECT SUM(num_requests) AS num, SUM(cache_read + cache_write + uncached + output) AS tokens FROM rollup_day"
    )
    return int(row.num), int(row.tokens)


def client_of(gateway: RunningGateway, port: int, max_retries: int = 2) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url=f"http://127.0.0.1:{port}/v1", api_key=gateway.keys.api_key, max_retries=max_retries, timeout=30
    )


@pytest.mark.parametrize("num_cut", [1, 2])
async def test_a_connection_cut_before_the_first_byte_is_billed_once(
    bare_gateway: RunningGateway, slow_worker: ScriptedWorker, num_cut: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 0.05)
    gateway = bare_gateway
    await gateway.workers(1)
    async with cutting_proxy(gateway, slow_worker, num_cut) as proxy:
        async with client_of(gateway, proxy.port) as client:
            answer = await client.chat.completions.create(
                model=MODEL, messages=MESSAGES, max_tokens=20, extra_body={"ignore_eos": True}
            )
        assert proxy.num_left == 0
    await moved(gateway)
    assert answer.usage is not None
    assert await billed(gateway) == (1, answer.usage.total_tokens)
    assert sorted(await kinds(gateway)) == sorted(["settle", "reversal", "sdk_retry"] * num_cut + ["settle"])
    await gateway.balanced()


async def test_a_stream_of_which_something_was_heard_is_paid_for(
    bare_gateway: RunningGateway, slow_worker: ScriptedWorker
) -> None:
    gateway = bare_gateway
    await gateway.workers(1)
    async with client_of(gateway, gateway.port) as client:
        for headers in ({}, {"x-stainless-retry-count": "1"}):
            stream = await client.chat.completions.create(
                model=MODEL,
                messages=MESSAGES,
                max_tokens=20,
                stream=True,
                extra_headers=headers,
                extra_body={"ignore_eos": True},
            )
            async for _ in stream:
                if not headers:
                    break
            await stream.close()
            await gateway.app[DETACHED].join(10)
    await moved(gateway)
    assert (await billed(gateway))[0] == 2
    assert await kinds(gateway) == ["settle", "settle"]


async def test_a_repeat_by_hand_is_a_request_of_its_own(
    bare_gateway: RunningGateway, slow_worker: ScriptedWorker
) -> None:
    """Without the SDK's word that it repeats, both are paid for."""
    gateway = bare_gateway
    await gateway.workers(1)
    async with cutting_proxy(gateway, slow_worker, 1) as proxy, client_of(gateway, proxy.port, max_retries=0) as client:
        for _ in range(2):
            try:
                await client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=20)
            except openai.APIConnectionError:
                await gateway.app[DETACHED].join(10)
    await moved(gateway)
    assert (await billed(gateway))[0] == 2
    assert len(await gateway.sql("SELECT 1 FROM unheard_attempt WHERE replaced_by IS NULL")) == 1
