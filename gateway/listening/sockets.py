"""The sockets of a gateway process, the base URL's and the operator's, and how many connections wait there. This module
knows no HTTP.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator

from prometheus_client import Metric
from prometheus_client.metrics_core import GaugeMetricFamily
from prometheus_client.registry import Collector

from gateway.base.settings import GatewaySettings, SettingsError

BACKLOG = 1024
"""The number of connections that the kernel keeps until they are accepted."""
NUM_DESCRIPTORS = 8
"""The number of descriptors on which the base URL's socket is listened on. uvloop accepts one connection on each in a
turn of the loop, so that with a single one a burst of connections of one client keeps all others waiting: 200 take 201
turns, and 26 with eight. Each costs 4 µs of CPU for every connection, because all of them look for it.
"""
TCP_LISTEN = 10
TCP_INFO: int | None = getattr(socket, "TCP_INFO", None)
"""The option that tells a connection's state. Linux has it; of a socket that listens it tells the queue."""
OPS_HOST = "127.0.0.1"
OPS_FIRST_PORT = 9300
"""The port of slot 0; the other slots have the ports after it."""


def base_socket(settings: GatewaySettings) -> socket.socket:
    """Opens the socket of the base URL. Raises `SettingsError`."""
    if settings.listen_fd is not None:
        return inherited(settings.listen_fd, "HEADGATE_LISTEN_FD")
    return _bound(settings.bind)


def ops_socket(settings: GatewaySettings) -> socket.socket:
    """Opens the operator's socket. If no address is set, another port is taken where the usual one is in use. Raises
    `SettingsError`.
    """
    if settings.ops_fd is not None:
        return inherited(settings.ops_fd, "HEADGATE_OPS_FD")
    if settings.ops_bind:
        return _bound(settings.ops_bind)
    try:
        return socket.create_server((OPS_HOST, OPS_FIRST_PORT + settings.slot), backlog=BACKLOG)
    except (OSError, OverflowError):
        return socket.create_server((OPS_HOST, 0), backlog=BACKLOG)


def inherited(fd: int, name: str) -> socket.socket:
    """Returns the socket of an inherited descriptor; `name` is the setting that has it. Raises `SettingsError`."""
    try:
        return socket.socket(fileno=os.dup(fd))
    except OSError as error:
        raise SettingsError(f"{name} is not an open socket: {error.strerror}.") from None


def descriptors(opened: socket.socket) -> list[socket.socket]:
    """Returns the socket and duplicates of it. All of them have to be closed before the process stops listening."""
    return [opened, *(opened.dup() for _ in range(NUM_DESCRIPTORS - 1))]


def num_waiting(opened: socket.socket) -> int:
    """Returns the number of connections that wait until they are accepted, or 0 if the system does not tell."""
    if TCP_INFO is None:
        return 0
    try:
        info = opened.getsockopt(socket.IPPROTO_TCP, TCP_INFO, 28)
        state, waiting = struct.unpack("B23xI", info)  # the fields tcpi_state and tcpi_unacked
    except (OSError, struct.error):  # a unix socket, or one that is closed
        return 0
    return int(waiting) if state == TCP_LISTEN else 0


class ListenerMetrics(Collector):
    def __init__(self, opened: socket.socket) -> None:
        self._opened = opened

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily(
            "headgate_connections_waiting",
            "Connections that wait until a gateway accepts them. Gateways that share a socket show the same number.",
            value=num_waiting(self._opened),
        )


def _bound(bind: str) -> socket.socket:
    host, _, port = bind.rpartition(":")
    host = host.strip("[]")
    try:
        return socket.create_server(
            (host, int(port)), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=BACKLOG
        )
    except OSError as error:
        raise SettingsError(f"Headgate cannot listen on {bind}: {error.strerror}.") from None
