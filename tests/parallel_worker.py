"""A real worker process with ranks beside it: started, read by its log, asked for tokens."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time

from fakes import generate_request
from gateway_link import GatewayLink
from load import stretched
from tiny_models import GREEDY

from workers.protocol.messages import Hello


class Worker:
    def __init__(self, process, directory):
        self.process = process
        self.directory = directory
        self.rank_pid = 0
        self.lines = []

    @classmethod
    async def start(cls, directory, model, **environ):
        clean = {k: v for k, v in os.environ.items() if not k.startswith("HEADGATE_")}
        told = {
            "HEADGATE_HOME": str(directory),
            "HEADGATE_THREADS": "2",
            "HEADGATE_OPS_BIND": "127.0.0.1:0",
            "HEADGATE_MODEL": str(model.directory),
            "HEADGATE_WORKER_ADDRESS": f"unix:{directory}/w.sock",
            "HEADGATE_ENGINE_NUM_BLOCKS": "64",
            "HEADGATE_ENGINE_TENSOR_PARALLEL": "2",
        }
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "workers.engine", env=clean | told | environ, stderr=asyncio.subprocess.PIPE
        )
        return cls(process, directory)

    async def until(self, event):
        """Reads the log up to an event."""
        while True:
            line = await asyncio.wait_for(self.process.stderr.readline(), 40)
            assert line, f"the worker ended: {self.lines}"
            self.lines.append(line.decode())
            record = json.loads(line)
            self.rank_pid = record.get("rank_pid", self.rank_pid)
            if record["event"] == event:
                return

    async def ended(self, limit_s):
        """The exit status and what it said since; fails if that takes longer."""
        _, errors = await asyncio.wait_for(self.process.communicate(), limit_s)
        return self.process.returncode, errors.decode()

    async def kill(self):
        if self.process.returncode is None:
            self.process.kill()
            await self.process.wait()
        if self.rank_pid and is_alive(self.rank_pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.rank_pid, signal.SIGKILL)


def is_alive(pid):
    """A zombie, of a parent that was killed, is not."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def gone(pid, limit_s):
    deadline = time.monotonic() + stretched(limit_s)
    while is_alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not is_alive(pid)


async def running(worker, num_tokens=60):
    """A gateway with a request in the middle of its stream."""
    await worker.until("worker_ready")
    gateway = await GatewayLink.dial(f"unix:{worker.directory}/w.sock")
    hello = await gateway.of(Hello)
    request = generate_request("r", range(3, 20), num_tokens, sampling=GREEDY, root=hello.root)
    gateway.send(request)
    await gateway.until(lambda _: gateway.tokens("r"))
    return gateway
