"""Probes, metrics and drain of a worker: a very small HTTP server on the I/O loop, one request per connection.

It is meant for operators' machines only, so it knows GET and POST on fixed paths and nothing else of HTTP. The service
knows whether the worker is alive, ready or draining.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import os
import socket
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from prometheus_client import CollectorRegistry

from workers.engine.service import Service
from workers.process.metrics_text import expose

logger = logging.getLogger(__name__)

MAX_HEAD_BYTES = 16 * 1024
READ_S = 5.0
DEFAULT_PORT = 9400


@dataclass(frozen=True, slots=True)
class Reply:
    status: HTTPStatus
    body: bytes
    content_type: str = "text/plain; charset=utf-8"


class OpsServer:
    def __init__(self, service: Service, registry: CollectorRegistry) -> None:
        self._service = service
        self._registry = registry

    async def listen(self, bind: str, slot: int) -> asyncio.Server:
        """Listens on `bind`. Raises `OSError` if that address is taken. Without an address it tries the default port of
        the slot, then any other."""
        host, _, port = bind.rpartition(":")
        if bind:
            return await self._start(host=host.strip("[]"), port=int(port))
        try:
            return await self._start(host="127.0.0.1", port=DEFAULT_PORT + slot)
        except OSError:
            return await self._start(host="127.0.0.1", port=0)

    async def inherit(self, fd: int) -> asyncio.Server:
        """Serves on a socket that listens already, and that still listens when this process ends."""
        return await self._start(sock=socket.socket(fileno=os.dup(fd)))

    async def _start(self, **where: Any) -> asyncio.Server:
        server = await asyncio.start_server(self._serve, **where, limit=MAX_HEAD_BYTES)
        address = server.sockets[0].getsockname()
        logger.info("ops listener", extra={"event": "ops_listening", "port": address[1]})
        return server

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(READ_S):
                head = await reader.readuntil(b"\r\n\r\n")
                writer.write(_encode(self._reply(head.decode("latin-1"), _is_local(writer))))
                await writer.drain()
        except (TimeoutError, ConnectionError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # a probe that does not finish its request gets no answer
        finally:
            writer.close()

    def _reply(self, head: str, local: bool) -> Reply:
        request, *lines = head.split("\r\n")
        headers = {k.strip().lower(): v.strip() for k, _, v in (line.partition(":") for line in lines)}
        method, _, rest = request.partition(" ")
        match method, rest.partition(" ")[0].partition("?")[0]:
            case "GET", "/livez":
                return _probe(self._service.alive)
            case "GET", "/readyz" | "/health":
                return _probe(self._service.alive and self._service.ready and not self._service.draining)
            case "GET", "/metrics":
                page = expose(self._registry, headers.get("accept", ""))
                return Reply(HTTPStatus.OK, page.body, page.content_type)
            # A browser sends `Origin` with every POST: a page that the operator visits must not drain a worker.
            case "POST", "/drain" if local and "origin" not in headers:
                self._service.stop_accepting()
                return Reply(HTTPStatus.ACCEPTED, b"draining\n")
            case _:
                return Reply(HTTPStatus.NOT_FOUND, b"not found\n")


def _probe(good: bool) -> Reply:
    status = HTTPStatus.OK if good else HTTPStatus.SERVICE_UNAVAILABLE
    return Reply(status, status.phrase.encode() + b"\n")


def _is_local(writer: asyncio.StreamWriter) -> bool:
    peer = writer.get_extra_info("peername")
    return bool(peer) and ipaddress.ip_address(peer[0]).is_loopback


def _encode(reply: Reply) -> bytes:
    head = (
        f"HTTP/1.1 {reply.status.value} {reply.status.phrase}\r\n"
        f"Content-Type: {reply.content_type}\r\n"
        f"Content-Length: {len(reply.body)}\r\n"
        "Connection: close\r\n\r\n"
    )
    return head.encode() + reply.body
