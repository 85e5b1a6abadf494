"""A Redis of one test's own: it will be killed, stopped, emptied, or fill its disk."""

from __future__ import annotations

import signal
import socket
import subprocess
import time
from pathlib import Path

from load import stretched

from gateway.cli.embedded import find_server, server_command


class OwnRedis:
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.socket = directory / "redis.sock"
        self.url = f"unix://{self.socket}?db=0"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self.process = subprocess.Popen(
            server_command(find_server(), self.directory, self.socket), stdout=subprocess.DEVNULL
        )
        deadline = time.monotonic() + stretched(10)
        while time.monotonic() < deadline:
            with socket.socket(socket.AF_UNIX) as sock:
                try:
                    sock.connect(str(self.socket))
                    return
                except OSError:
                    time.sleep(0.01)
        raise TimeoutError

    def kill(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)
        self.process.kill()
        self.process.wait(10)

    def send(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)
