"""TLS of a gateway process: its certificates, and the base URL's listener when it has one."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

from aiohttp import web
from prometheus_client import Metric
from prometheus_client.metrics_core import CounterMetricFamily
from prometheus_client.registry import Collector
from yarl import URL

from gateway.base.settings import GatewaySettings, SettingsError
from gateway.http.http_limits import GatewayProtocol, GatewayRunner, GatewayServer
from gateway.listening.sockets import BACKLOG, descriptors
from workers.process.tls.certificates import Certificate, CertificateError, dialling_context, https_context
from workers.process.tls.listener import Hands, TlsListener
from workers.process.tls.metrics import CertificateMetrics


class TlsFailures(Collector):
    """Counts handshakes that failed. A stranger causes them at will, so there is no line in the log for each."""

    def __init__(self) -> None:
        self._num = 0

    def count(self) -> None:
        self._num += 1

    def collect(self) -> Iterator[Metric]:
        yield CounterMetricFamily(
            "headgate_tls_handshakes_failed",
            "Connections to the base URL that ended without a handshake: their clients do not trust the certificate, speak"
            " plain HTTP, or did not go on.",
            value=self._num,
        )


@dataclass(frozen=True, slots=True)
class Certificates:
    """The certificates of a gateway process. Each is None if none is set."""

    listener: Certificate | None = None
    links: Certificate | None = None
    failures: TlsFailures = field(default_factory=TlsFailures)

    @classmethod
    def of(cls, settings: GatewaySettings) -> Certificates:
        """Reads them. Raises `SettingsError`."""
        listener, links = settings.tls_files, settings.link_files
        try:
            return cls(
                None if listener is None else Certificate(listener, https_context),
                None if links is None else Certificate(links, dialling_context),
            )
        except CertificateError as error:
            raise SettingsError(str(error)) from None

    @property
    def by_use(self) -> Mapping[str, Certificate]:
        found = {"listener": self.listener, "links": self.links}
        return {use: one for use, one in found.items() if one is not None}

    async def look(self) -> None:
        """Reads the files again that have changed."""
        for one in self.by_use.values():
            await asyncio.to_thread(one.look)

    def metrics(self) -> list[Collector]:
        of_listener = [] if self.listener is None else [self.failures]
        return [CertificateMetrics(self.by_use), *of_listener] if self.by_use else []


CERTIFICATES = web.AppKey("certificates", Certificates)


def sites(runner: GatewayRunner, opened: socket.socket, certificates: Certificates) -> list[web.BaseSite]:
    """Returns the sites of the base URL's socket. They stop together."""
    if certificates.listener is not None:
        return [TlsSite(runner, [opened], certificates.listener, certificates.failures)]
    return [web.SockSite(runner, one, backlog=BACKLOG) for one in descriptors(opened)]


class TlsSite(web.BaseSite):
    """A listener for TLS. A connection counts from its first byte on, and has as long for its handshake as for a head."""

    __slots__ = ("_certificate", "_failures", "_listener", "_sockets")

    def __init__(
        self, runner: GatewayRunner, sockets: Sequence[socket.socket], certificate: Certificate, failures: TlsFailures
    ) -> None:
        super().__init__(runner)
        self._sockets = sockets
        self._certificate = certificate
        self._failures = failures
        self._listener: TlsListener | None = None

    @property
    def name(self) -> str:
        host, port = self._sockets[0].getsockname()[:2]
        return str(URL.build(scheme="https", host=host, port=port))

    async def start(self) -> None:
        await super().start()
        server = cast(GatewayServer, self._runner.server)
        hands = Hands(server.shaking, self._has_failed)
        limits = server.limits
        self._listener = TlsListener(
            self._sockets, self._certificate.context, hands, limits.headers_s, limits.write_timeout_s
        )

    async def stop(self) -> None:
        if self._listener is not None:
            self._listener.close()
        await super().stop()

    def _has_failed(self, protocol: asyncio.Protocol, address: str, why: str) -> None:
        cast(GatewayProtocol, protocol).never_made()
        self._failures.count()
