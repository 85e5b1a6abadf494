"""The listener for links of gateways: a unix socket, or TCP, which speaks TLS where the worker has a certificate."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections import Counter
from collections.abc import Awaitable, Callable

from workers.process.tls.certificates import Certificate
from workers.process.tls.listener import Hands, TlsListener
from workers.protocol import addresses
from workers.protocol.connection import HANDSHAKE_S

logger = logging.getLogger(__name__)

BACKLOG = 100
MAX_HANDSHAKES = 64
"""The most handshakes at a time. Anybody who reaches the port can begin one, and gateways are few."""
MAX_HANDSHAKES_PER_ADDRESS = 8
"""The most of them from one address, so that one stranger does not keep gateways of other addresses out."""
LOG_EVERY_S = 60.0

Listener = asyncio.Server | TlsListener
ServeLink = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def listen(address: str, certificate: Certificate | None, serve: ServeLink) -> Listener:
    """Listens on `unix:/path` or `tcp:host:port`, and calls `serve` for each link. Raises `OSError`."""
    where = addresses.host_port(address)
    if where is None:
        path = address.removeprefix("unix:")
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)  # left by a killed process; the slot's lock says that it is gone
        server = await asyncio.start_unix_server(serve, path)
        os.chmod(path, 0o600)
        return server
    if certificate is None:
        return await asyncio.start_server(serve, *where)
    return await _listen_by_tls(*where, certificate, serve)


async def _listen_by_tls(host: str, port: int, certificate: Certificate, serve: ServeLink) -> TlsListener:
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    opened: list[socket.socket] = []
    try:
        for family, where in dict.fromkeys((one[0], one[4]) for one in found):
            opened.append(socket.create_server(where, family=family, backlog=BACKLOG))
    except OSError:
        for one in opened:
            one.close()
        raise
    strangers = Strangers()

    def begin(address: str) -> asyncio.Protocol | None:
        if listener.num_handshakes >= MAX_HANDSHAKES:
            return None
        if listener.num_handshakes_of(address) >= MAX_HANDSHAKES_PER_ADDRESS:
            return None
        return asyncio.StreamReaderProtocol(asyncio.StreamReader(), serve)

    def failed(_: asyncio.Protocol, address: str, why: str) -> None:
        strangers.refused(address, why)

    listener = TlsListener(opened, certificate.context, Hands(begin, failed), HANDSHAKE_S)
    return listener


class Strangers:
    """The log of those who dial and are not let in. Anybody can be one, so it has each reason once a minute."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._logged_at: dict[str, float] = {}
        self._num_untold = Counter[str]()

    def refused(self, address: str, why: str) -> None:
        now = self._clock()
        self._num_untold[why] += 1
        if now - self._logged_at.get(why, -LOG_EVERY_S) < LOG_EVERY_S:
            return
        self._logged_at[why] = now
        said = {"event": "link_refused", "address": address, "why": why, "times": self._num_untold.pop(why)}
        logger.warning("a link is refused", extra=said)
