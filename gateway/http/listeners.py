"""The sockets of a gateway process: the base URL's and the operator's. Knows no HTTP."""

from __future__ import annotations

import os
import socket

from gateway.base.settings import GatewaySettings, SettingsError

BACKLOG = 1024
"""Connections that the kernel keeps until they are accepted."""
OPS_HOST = "127.0.0.1"
OPS_FIRST_PORT = 9300
"""Slots count on from here."""


def base_socket(settings: GatewaySettings) -> socket.socket:
    """Raises `SettingsError`."""
    if settings.listen_fd is not None:
        return _inherited(settings.listen_fd, "HEADGATE_LISTEN_FD")
    return _bound(settings.bind, "HEADGATE_BIND")


def ops_socket(settings: GatewaySettings) -> socket.socket:
    """Raises `SettingsError`; without an address of its own another port will do."""
    if settings.ops_fd is not None:
        return _inherited(settings.ops_fd, "HEADGATE_OPS_FD")
    if settings.ops_bind:
        return _bound(settings.ops_bind, "HEADGATE_OPS_BIND")
    try:
        return socket.create_server((OPS_HOST, OPS_FIRST_PORT + settings.slot), backlog=BACKLOG)
    except (OSError, OverflowError):
        return socket.create_server((OPS_HOST, 0), backlog=BACKLOG)


def _inherited(fd: int, name: str) -> socket.socket:
    try:
        return socket.socket(fileno=os.dup(fd))
    except OSError as error:
        raise SettingsError(f"{name} is not an open socket: {error.strerror}.") from None


def _bound(bind: str, name: str) -> socket.socket:
    host, _, port = bind.rpartition(":")
    host = host.strip("[]")
    try:
        return socket.create_server(
            (host, int(port)), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=BACKLOG
        )
    except ValueError:
        raise SettingsError(f"{name} must be host:port, not {bind!r}.") from None
    except OSError as error:
        raise SettingsError(f"Cannot listen on {bind}: {error.strerror}.") from None
