"""The addresses that one `headgate up` listens on. This module does not know which process serves them."""

from __future__ import annotations

import socket
from pathlib import Path

from gateway.base.home import HomeError
from gateway.listening.sockets import BACKLOG


def listen(host: str, port: int) -> socket.socket:
    """Binds the base URL's socket once; every gateway inherits it. Raises `HomeError`."""
    sock = None
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.listen(BACKLOG)
    except OSError as error:
        if sock is not None:
            sock.close()
        raise HomeError(
            f"The address {host}:{port} cannot be used ({error.strerror or error}): choose another with --host and --port."
        ) from None
    sock.setblocking(False)
    return sock


def listen_locally(path: Path) -> socket.socket:
    """Binds a unix socket for this user's own programs; one that a killed process left is replaced. Raises `HomeError`."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        path.unlink(missing_ok=True)
        sock.bind(str(path))
        path.chmod(0o600)
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        raise HomeError(f"The socket {path} cannot be made: {error.strerror}.") from None
    sock.setblocking(False)
    return sock


def listen_from(host: str, first_port: int, count: int) -> list[socket.socket]:
    """Opens `count` sockets from `first_port` on; another `up` may have taken the first ports. They listen from now on,
    so that no other process takes one before its owner has started. Raises `HomeError`.
    """
    found: list[socket.socket] = []
    for port in range(first_port, first_port + 1000):
        try:
            found.append(listen(host, port))
        except HomeError:
            continue
        if len(found) == count:
            return found
    raise HomeError(f"No port from {first_port} on is free for metrics.")
