"""One POST to a URL that a customer named, with protection against what such a URL could reach.

The name is looked up once per try, and each address is checked when the socket for it is made, so a second lookup
cannot give another answer. There are no redirects, no proxies and no cookies. Only the status of the answer is read.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from typing import Any
from urllib.parse import urlsplit

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult

from accounting.events.egress import Egress

Lookup = Callable[..., Any]
"""A function with the signature of `socket.getaddrinfo`."""
READ_BYTES = 16 * 1024
"""The body of the answer is not read; up to this many bytes of it may be buffered."""


class NotSpokenTo(OSError):
    """The address is one that this Headgate may not connect to."""


class Poster:
    """Sends POSTs. `threads` run lookups only, one for each POST that may run at once: a name server that never answers
    holds only the thread of its own POST."""

    def __init__(self, egress: Egress, threads: Executor, limit_s: float, lookup: Lookup = socket.getaddrinfo) -> None:
        self._egress = egress
        self._threads = threads
        self._timeout = aiohttp.ClientTimeout(total=limit_s)
        self._lookup = lookup

    async def post(self, url: str, body: bytes, headers: Mapping[str, str], *, only_public: bool = False) -> int:
        """Returns the status. With `only_public` the operator's own networks are closed, too. Raises `NotSpokenTo`,
        aiohttp.ClientError, OSError, TimeoutError, ValueError.
        """
        egress = Egress() if only_public else self._egress
        egress.check(url)
        is_encrypted = urlsplit(url).scheme == "https"
        resolver = _Resolver(self._threads, self._lookup)
        connector = aiohttp.TCPConnector(
            resolver=resolver, socket_factory=_guard(egress, is_encrypted), use_dns_cache=False, force_close=True
        )
        try:
            async with (
                aiohttp.ClientSession(
                    connector=connector,
                    timeout=self._timeout,
                    trust_env=False,
                    auto_decompress=False,
                    cookie_jar=aiohttp.DummyCookieJar(),
                    read_bufsize=READ_BYTES,
                ) as session,
                session.post(url, data=body, headers=headers, allow_redirects=False) as answer,
            ):
                return answer.status
        finally:
            await resolver.finished()


def _guard(egress: Egress, is_encrypted: bool) -> Callable[[Any], socket.socket]:
    def connect_to(info: tuple[int, int, int, str, tuple[Any, ...]]) -> socket.socket:
        family, kind, protocol, _, address = info
        if not egress.permits(address[0], address[1], encrypted=is_encrypted):
            raise NotSpokenTo("An address that is not spoken to.")
        return socket.socket(family, kind, protocol)

    return connect_to


class _Resolver(AbstractResolver):
    def __init__(self, threads: Executor, lookup: Lookup) -> None:
        self._threads = threads
        self._lookup = lookup
        self._asked: list[asyncio.Future[Any]] = []

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        asked = asyncio.get_running_loop().run_in_executor(
            self._threads, self._lookup, host, port, family, socket.SOCK_STREAM
        )
        self._asked.append(asked)
        await asyncio.wait([asked])  # unlike an await, it leaves the lookup to `finished` when the POST is cancelled
        return [
            ResolveResult(
                hostname=host,
                host=address[0],
                port=address[1],
                family=kind,
                proto=protocol,
                flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV,
            )
            for kind, _, protocol, _, address in asked.result()
        ]

    async def finished(self) -> None:
        """Waits until the lookups have ended, as a thread cannot be cancelled and stays occupied until then."""
        # It takes note of each error, also of one that the POST did not wait for: asyncio logs what nobody took.
        await asyncio.gather(*self._asked, return_exceptions=True)

    async def close(self) -> None:
        return
