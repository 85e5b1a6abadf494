"""The sockets of a gateway process: the base URL's and the operator's. This module knows no HTTP."""

from __future__ import annotations

import os
import socket

from gateway.base.settings import GatewaySettings, SettingsError

BACKLOG = 1024
"""The number of connections that the kernel keeps until they are accepted."""
OPS_HOST = "127.0.0.1"
OPS_FIRST_PORT = 9300
"""The port of slot 0; the other slots have the ports after it."""


def base_socket(settings: GatewaySettings) -> socket.socket:
    """Opens the socket of the base URL. Raises `SettingsError`."""
    if settings.listen_fd is not None:
        return _inherited(settings.listen_fd, "HEADGATE_LISTEN_FD")
    return _bound(settings.bind)


def ops_socket(settings: GatewaySettings) -> socket.socket:
    """Opens the operator's socket. If no address is set, another port is taken where the usual one is in use. Raises
    `SettingsError`.
    """
    if settings.ops_fd is not None:
        return _inherited(settings.ops_fd, "HEADGATE_OPS_FD")
    if settings.ops_bind:
        return _bound(settings.ops_bind)
    try:
        return socket.create_server((OPS_HOST, OPS_FIRST_PORT + settings.slot), backlog=BACKLOG)
    except (OSError, OverflowError):
        return socket.create_server((OPS_HOST, 0), backlog=BACKLOG)


def _inherited(fd: int, name: str) -> socket.socket:
    try:
        return socket.socket(fileno=os.dup(fd))
    except OSError as error:
        raise SettingsError(f"{name} is not an open socket: {error.strerror}.") from None


def _bound(bind: str) -> socket.socket:
    host, _, port = bind.rpartition(":")
    host = host.strip("[]")
    try:
        return socket.create_server(
            (host, int(port)), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=BACKLOG
        )
    except OSError as error:
        raise SettingsError(f"Headgate cannot listen on {bind}: {error.strerror}.") from None
