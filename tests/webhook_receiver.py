"""The other end: a receiver that checks signatures as Standard Webhooks says, and receivers that mean no good."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hmac
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

import msgspec
from aiohttp import web

TOLERANCE_S = 300


class Forged(Exception):
    """Not from who it says, or not from now, or not for the first time."""


@dataclass
class Verifier:
    """Does what docs/webhooks.md tells receivers to do."""

    secret: str
    seen: set[str] = field(default_factory=set)

    def check(self, headers: Mapping[str, str], body: bytes, now: float | None = None) -> None:
        at = int(headers["webhook-timestamp"])
        if abs((time.time() if now is None else now) - at) > TOLERANCE_S:
            raise Forged("time")
        key = base64.b64decode(self.secret.removeprefix("whsec_"))
        signed = f"{headers['webhook-id']}.{at}.".encode() + body
        wanted = "v1," + base64.b64encode(hmac.new(key, signed, sha256).digest()).decode()
        if not any(hmac.compare_digest(wanted, s) for s in headers["webhook-signature"].split()):
            raise Forged("signature")
        if headers["webhook-id"] in self.seen:
            raise Forged("repeated")
        self.seen.add(headers["webhook-id"])


@dataclass
class Receiver:
    """Keeps what came; `statuses` are answered first, then 204."""

    statuses: list[int] = field(default_factory=list)
    delay_s: float = 0.0
    url: str = ""
    came: list[tuple[dict[str, str], bytes]] = field(default_factory=list)
    at_once: int = 0
    most_at_once: int = 0
    paths: Counter = field(default_factory=Counter)

    async def take(self, request: web.Request) -> web.Response:
        self.at_once += 1
        self.most_at_once = max(self.at_once, self.most_at_once)
        try:
            headers = {name.lower(): value for name, value in request.headers.items()}
            self.came.append((headers, await request.read()))
            self.paths[request.path] += 1
            await asyncio.sleep(self.delay_s)
        finally:
            self.at_once -= 1
        status = self.statuses.pop(0) if self.statuses else 204
        return web.Response(status=status, headers={"location": "/elsewhere"})

    def events(self) -> list[dict[str, Any]]:
        return [msgspec.json.decode(body) for _, body in self.came]


@contextlib.asynccontextmanager
async def receiving(receiver: Receiver) -> AsyncIterator[Receiver]:
    app = web.Application()
    app.router.add_post("/{tail:.*}", receiver.take)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    receiver.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}/hook"
    try:
        yield receiver
    finally:
        await runner.cleanup()


ENDLESS_BODY, ENDLESS_HEADERS, SILENT, DRIP, ENDLESS_1XX = ("body", "headers", "silent", "drip", "1xx")


@dataclass
class Hostile:
    kind: str
    url: str = ""
    num_asked: int = 0
    num_sent: int = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_asked += 1
        with contextlib.closing(writer), contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            if self.kind == SILENT:
                await reader.read()  # until the other side gives up
            elif self.kind == DRIP:
                await self._send(writer, b"HTTP/1.1 200 OK\r\nx: ")
                await self._endless(writer, b"a", 0.02)
            elif self.kind == ENDLESS_BODY:
                await self._send(writer, b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n")
                await self._endless(writer, b"x" * 65536)
            elif self.kind == ENDLESS_1XX:
                await self._endless(writer, b"HTTP/1.1 103 Early Hints\r\n\r\n", 0.001)
            else:
                await self._send(writer, b"HTTP/1.1 200 OK\r\n")
                await self._endless(writer, b"x-" + b"a" * 4000 + b": b\r\n")

    async def _endless(self, writer: asyncio.StreamWriter, piece: bytes, pause_s: float = 0) -> None:
        while True:
            await self._send(writer, piece)
            await asyncio.sleep(pause_s)

    async def _send(self, writer: asyncio.StreamWriter, piece: bytes) -> None:
        writer.write(piece)
        await writer.drain()
        self.num_sent += len(piece)


@contextlib.asynccontextmanager
async def hostile(kind: str) -> AsyncIterator[Hostile]:
    made = Hostile(kind)
    serving: list[asyncio.Task[None]] = []

    def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        serving.append(asyncio.create_task(made.serve(reader, writer)))

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    made.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
    try:
        yield made
    finally:
        server.close()
        for task in serving:
            task.cancel()
        await asyncio.gather(*serving, return_exceptions=True)
