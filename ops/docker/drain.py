"""Tells the process of this container to drain: `drain.py gateway` or `drain.py worker`. Kubernetes calls it before SIGTERM.

It returns at once. Unready from now on, the process finishes what runs; SIGTERM waits for that, and then it exits.
"""

from __future__ import annotations

import http.client
import os
import socket
import sys
from pathlib import Path

WORKER_PORT = 9400


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=5)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(self._path)


def connection(process: str) -> http.client.HTTPConnection:
    if process == "worker":
        return http.client.HTTPConnection("127.0.0.1", WORKER_PORT, timeout=5)
    run = Path(os.environ["HEADGATE_HOME"]) / "run"
    return _UnixConnection(str(run / f"gateway-{os.environ.get('HEADGATE_SLOT', '0')}.sock"))


if __name__ == "__main__":
    link = connection(sys.argv[1])
    link.request("POST", "/drain")
    sys.exit(0 if link.getresponse().status < 300 else 1)
