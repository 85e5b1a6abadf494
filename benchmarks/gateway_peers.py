"""The processes that `gateway_load.py` measures beside each other: Headgate as `headgate up` starts it on a worker that costs next to
nothing, and a bare proxy on aiohttp before a model's server on aiohttp. A process takes its role from its first argument.

The worker speaks the frames and computes nothing: a step is one frame with one token for each running sequence, and an
engine's record follows each end. The bare server writes an event for each running stream in each of its steps. Neither
has a pace: a step follows when everybody has read the one before, so nobody measures a queue.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import os
import signal
import sys
import uuid
from pathlib import Path
from typing import Any

import aiohttp
import mock_server
import redis.asyncio
import uvloop
from aiohttp import web

from gateway.cli.model_workers import WorkerSlot
from gateway.cli.supervisor import Spec
from workers.protocol import registry
from workers.protocol.connection import HEARTBEAT_S, Connection
from workers.protocol.counts import (
    MAX_RECORDS_IN_FRAME,
    EngineAck,
    EngineRecord,
    EngineRecords,
    PromptCounts,
    TokenUsage,
)
from workers.protocol.messages import (
    GATHERED_TOKENS,
    PROTOCOL_VERSION,
    Cancel,
    Finished,
    GenerateRequest,
    Hello,
    Message,
    StepFrame,
    TokenDelta,
)
from workers.protocol.reports import WorkerStatus

ROOT = "mock-root"
WORDS = b"lorem ipsum dolor sit amet consectetur adipiscing elit "
WORKER, SERVER, PROXY = "worker", "server", "proxy"
UPSTREAM = "UPSTREAM"
"""The variable with the address of the server behind the bare proxy, or with the port that a server is to have."""


# --- Headgate ---


class CheapWorkers(mock_server.MockWorkers):
    def spec(self, slot: WorkerSlot) -> Spec:
        return dataclasses.replace(super().spec(slot), command=[sys.executable, __file__, WORKER])


class UpWithCheapWorkers(mock_server.UpWithMock):
    workers_kind = CheapWorkers


class CheapWorker:
    """The worker's side of all links."""

    def __init__(self, address: Path, redis_url: str) -> None:
        self._address = address
        self._redis_url = redis_url
        self._process = str(uuid.uuid4())
        self._running: dict[str, tuple[Connection, asyncio.StreamWriter, GenerateRequest, int]] = {}
        self._gathered: dict[str, int] = {}
        """The number of tokens that wait to be sent with others, by request id."""
        self._records: list[EngineRecord] = []
        self._unanswered = False
        self._links: set[Connection] = set()
        self._arrived = asyncio.Event()
        self._seq = itertools.count(1)

    async def run(self, stop: asyncio.Event) -> None:
        self._address.unlink(missing_ok=True)
        server = await asyncio.start_unix_server(self._serve, self._address)
        tasks = [asyncio.create_task(work()) for work in (self._register, self._beat, self._steps)]
        await stop.wait()
        for task in tasks:
            task.cancel()
        server.close()

    async def _register(self) -> None:
        client = redis.asyncio.Redis.from_url(self._redis_url)
        mine = registry.Registration(
            "worker-0", self._process, f"unix:{self._address}", mock_server.MODEL, ROOT, os.getpid()
        )
        while True:
            await client.sadd(registry.WORKERS, mine.worker)
            await client.set(registry.worker_key(mine.worker), registry.encode(mine), ex=registry.REGISTRATION_TTL_S)
            await asyncio.sleep(registry.REGISTRATION_REFRESH_S)

    async def _beat(self) -> None:
        while True:
            for link in self._links:
                link.send(WorkerStatus(running=len(self._running), prefill_rate=1e5, decode_rate=1e4))
            await asyncio.sleep(HEARTBEAT_S)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        link = Connection(reader, writer)
        self._links.add(link)
        hello = Hello(
            PROTOCOL_VERSION,
            self._process,
            model=mock_server.MODEL,
            root=ROOT,
            block_size=16,
            num_blocks=10_000,
            max_model_len=2048,
            max_running=1024,
        )
        link.send(hello)
        link.send(WorkerStatus(prefill_rate=1e5, decode_rate=1e4))
        async for messages in link:
            for message in messages:
                self._on(link, writer, message)
        self._links.discard(link)

    def _on(self, link: Connection, writer: asyncio.StreamWriter, message: Message) -> None:
        match message:
            case GenerateRequest():
                self._running[message.request_id] = (link, writer, message, 0)
                self._arrived.set()
            case Cancel():
                self._running.pop(message.request_id, None)
                self._gathered.pop(message.request_id, None)
            case EngineAck():
                self._unanswered = False

    async def _steps(self) -> None:
        for step in itertools.count():
            if not self._running:
                self._arrived.clear()
                await self._arrived.wait()
            links: dict[Connection, tuple[asyncio.StreamWriter, list[TokenDelta]]] = {}
            ended: list[tuple[Connection, Finished]] = []
            for name, (link, writer, request, number) in list(self._running.items()):
                is_last = number + 1 >= request.max_tokens
                num_gathered = self._gathered.pop(name, 0)
                if request.gather and number and not is_last and num_gathered < GATHERED_TOKENS - 1:
                    self._gathered[name] = num_gathered + 1
                    self._running[name] = (link, writer, request, number + 1)
                    continue
                first = number - num_gathered
                delta = TokenDelta(
                    name,
                    request.attempt,
                    0,
                    first,
                    tuple(WORDS[i % len(WORDS)] for i in range(first, number + 1)),
                    finish="length" if is_last else None,
                    prompt=None if number else PromptCounts(uncached=len(request.prompt)),
                )
                links.setdefault(link, (writer, []))[1].append(delta)
                if is_last:
                    del self._running[name]
                    ended.append((link, self._finished(request)))
                else:
                    self._running[name] = (link, writer, request, number + 1)
            for link, (_, deltas) in links.items():
                link.send(StepFrame(step, tuple(deltas)))
            for link, finished in ended:
                link.send(finished)
            self._ship(list(links))
            for writer, _ in links.values():
                await writer.drain()
            await asyncio.sleep(0)

    def _finished(self, request: GenerateRequest) -> Finished:
        usage = TokenUsage(uncached=len(request.prompt), output=request.max_tokens)
        record = EngineRecord(
            next(self._seq), request.request_id, request.attempt, request.tenant, ROOT, usage, reason="length"
        )
        self._records.append(record)
        return Finished(request.request_id, request.attempt, usage, "length")

    def _ship(self, links: list[Connection]) -> None:
        """Sends the records of ended requests, those that came until the last ones were answered, as a worker does."""
        if links and self._records and not self._unanswered:
            self._unanswered = True
            records, self._records = self._records[:MAX_RECORDS_IN_FRAME], self._records[MAX_RECORDS_IN_FRAME:]
            links[0].send(EngineRecords("worker-0", tuple(records)))


# --- the bare proxy and its server ---


def event(number: int) -> bytes:
    choice = {"index": 0, "delta": {"content": chr(WORDS[number % len(WORDS)])}, "finish_reason": None}
    chunk = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "mock", "choices": [choice]}
    return b"data: %b\n\n" % json.dumps(chunk).encode()


EVENTS = [event(number) for number in range(len(WORDS))]


class Streams:
    """The streams that run, which take one event each in a step."""

    def __init__(self) -> None:
        self._running: dict[web.StreamResponse, tuple[int, int, asyncio.Future[None]]] = {}
        self._arrived = asyncio.Event()

    async def whole(self, response: web.StreamResponse, count: int) -> None:
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._running[response] = (0, count, done)
        self._arrived.set()
        await done

    async def run(self) -> None:
        while True:
            if not self._running:
                self._arrived.clear()
                await self._arrived.wait()
            for response, (number, count, done) in list(self._running.items()):
                await response.write(EVENTS[number % len(EVENTS)])
                if number + 1 >= count:
                    del self._running[response]
                    done.set_result(None)
                else:
                    self._running[response] = (number + 1, count, done)
            await asyncio.sleep(0)


def server() -> web.Application:
    streams = Streams()

    async def complete(request: web.Request) -> web.StreamResponse:
        asked = json.loads(await request.read())
        count = asked.get("max_tokens", 1)
        if asked.get("stream"):
            response = web.StreamResponse(headers={"content-type": "text/event-stream"})
            await response.prepare(request)
            await streams.whole(response, count)
            await response.write(b"data: [DONE]\n\n")
            return response
        message = {"role": "assistant", "content": (WORDS * 20)[:count].decode()}
        return web.json_response(
            {
                "id": "chatcmpl-1",
                "object": "chat.completion",
                "created": 1,
                "model": "mock",
                "choices": [{"index": 0, "message": message, "finish_reason": "length"}],
                "usage": {"prompt_tokens": 60, "completion_tokens": count, "total_tokens": 60 + count},
            }
        )

    async def stepping(app: web.Application) -> Any:
        task = asyncio.create_task(streams.run())
        yield
        task.cancel()

    app = web.Application()
    app.cleanup_ctx.append(stepping)
    app.router.add_post("/v1/chat/completions", complete)
    return app


def proxy() -> web.Application:
    """Hands a body on and pieces of the answer back, as they come; nothing else."""
    upstream = os.environ[UPSTREAM]
    app = web.Application()

    async def session(app: web.Application) -> Any:
        app["session"] = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        yield
        await app["session"].close()

    async def pass_on(request: web.Request) -> web.StreamResponse:
        body = await request.read()
        headers = {"content-type": "application/json"}
        async with request.app["session"].post(f"{upstream}{request.path}", data=body, headers=headers) as answer:
            if "event-stream" not in answer.content_type:
                return web.Response(body=await answer.read(), content_type=answer.content_type, status=answer.status)
            response = web.StreamResponse(status=answer.status, headers={"content-type": answer.content_type})
            await response.prepare(request)
            async for piece in answer.content.iter_any():
                await response.write(piece)
            return response

    app.cleanup_ctx.append(session)
    app.router.add_post("/v1/chat/completions", pass_on)
    return app


async def serve(app: web.Application) -> None:
    """Serves until a signal. The first line of the output is the port."""
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    print(runner.addresses[0][1], flush=True)
    await until_told()
    await runner.cleanup()


async def serve_worker() -> None:
    address = Path(os.environ["HEADGATE_WORKER_ADDRESS"].removeprefix("unix:"))
    worker = CheapWorker(address, os.environ["HEADGATE_REDIS_URL"])
    stop = asyncio.create_task(until_told())
    told = asyncio.Event()
    stop.add_done_callback(lambda _: told.set())
    await worker.run(told)


async def until_told() -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await stop.wait()


def main() -> None:
    role = sys.argv[1] if len(sys.argv) > 1 else ""
    if role == WORKER:
        uvloop.run(serve_worker())
    elif role in (SERVER, PROXY):
        uvloop.run(serve(server() if role == SERVER else proxy()))
    else:
        mock_server.serve(UpWithCheapWorkers, sys.argv[1:])


if __name__ == "__main__":
    main()
