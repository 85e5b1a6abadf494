"""`/metrics` of the jobs process, on its own address or on a socket that was passed to it."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from socketserver import ThreadingMixIn
from threading import Thread
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True

    def inherit(self, fd: int) -> None:
        """Uses an inherited socket instead of binding one. The socket stays open when this process ends."""
        self.socket.close()
        self.socket = socket.socket(fileno=os.dup(fd))
        self.server_name, self.server_port = self.socket.getsockname()[:2]
        self.setup_environ()


class _Handler(WSGIRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Writes no log line, as scrapes are frequent."""


@contextmanager
def listening(address: str, fd: int | None, registry: CollectorRegistry) -> Iterator[None]:
    """Serves metrics within the block. `address` is host:port. If it is empty and there is no `fd`, nothing listens.
    Raises OSError if the address is taken."""
    if fd is None and not address:
        yield
        return
    server = _bound(address, fd)
    server.set_app(make_wsgi_app(registry))
    thread = Thread(target=server.serve_forever, name="metrics", daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _bound(address: str, fd: int | None) -> _Server:
    host, _, port = (address or ":0").rpartition(":")
    server = _Server((host.strip("[]"), int(port)), _Handler, bind_and_activate=False)
    if fd is not None:
        server.inherit(fd)
        return server
    try:
        server.server_bind()
        server.server_activate()
    except OSError:
        server.server_close()
        raise
    return server
