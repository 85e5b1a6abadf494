"""Two worker processes with real weights and one directory: the second reads what the first computed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import sys
import time
import urllib.request

import pytest
from fakes import generate_request
from gateway_link import GatewayLink
from load import stretched
from prometheus_client.parser import text_string_to_metric_families
from tiny_models import TinyModel

from workers.protocol.messages import Finished, Hello, SamplingParams

pytestmark = pytest.mark.rest

SAMPLING = SamplingParams(1, 0.0, ignore_eos=True)
PROMPT = [(7 * i) % 290 + 3 for i in range(140)]


def free_port():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


@contextlib.asynccontextmanager
async def worker(home, model, shared):
    port, address = free_port(), f"unix:{home}/w.sock"
    clean = {k: v for k, v in os.environ.items() if not k.startswith("HEADGATE_")}
    told = {
        "HEADGATE_HOME": str(home),
        "HEADGATE_THREADS": "1",
        "HEADGATE_MODEL": str(model.directory),
        "HEADGATE_WORKER_ADDRESS": address,
        "HEADGATE_OPS_BIND": f"127.0.0.1:{port}",
        "HEADGATE_ENGINE_NUM_BLOCKS": "64",
        "HEADGATE_ENGINE_HOST_CACHE": str(16 << 20),
        "HEADGATE_ENGINE_SHARED_CACHE": str(shared),
    }
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "workers.engine", env=clean | told, stderr=asyncio.subprocess.PIPE
    )
    try:
        event = None
        while event != "worker_ready":
            line = await asyncio.wait_for(process.stderr.readline(), 120)
            assert line, "the worker ended before it was ready"
            event = json.loads(line)["event"]
        gateway = await GatewayLink.dial(address)
        hello = await gateway.of(Hello)
        yield gateway, hello, port
        await gateway.close()
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), 20) == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def ask(gateway, hello, name, tenant):
    gateway.send(generate_request(name, PROMPT, 8, tenant=tenant, sampling=SAMPLING, root=hello.root))
    return await gateway.of(Finished, request_id=name, limit_s=60)


def metric(port, name, **labels):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as reply:
        families = text_string_to_metric_families(reply.read().decode())
        samples = [s for family in families for s in family.samples if s.name == name]
    return sum(s.value for s in samples if labels.items() <= s.labels.items())


def settled(port, name, **labels):
    """Its value, once it is above 0 and stands still for longer than figures are apart."""
    deadline, before = time.monotonic() + stretched(20), 0.0
    while not before or metric(port, name, **labels) != before:
        assert time.monotonic() < deadline
        before = metric(port, name, **labels)
        time.sleep(1.2)
    return before


@pytest.mark.timeout(300)  # two processes, each of which imports torch
async def test_a_second_process_reads_what_the_first_one_left(tmp_path):
    model = TinyModel.make("llama", tmp_path / "tiny")
    homes = [tmp_path / name for name in ("one", "two")]
    for home in homes:
        home.mkdir()
    async with worker(homes[0], model, tmp_path / "shared") as (gateway, hello, port):
        for number in range(3):
            await ask(gateway, hello, f"r{number}", "anna")
        first = gateway.tokens("r0")
        await asyncio.to_thread(settled, port, "headgate_cache_tier_bytes_total", tier="shared", direction="in")
    shutil.copytree(homes[0] / "secrets", homes[1] / "secrets")
    async with worker(homes[1], model, tmp_path / "shared") as (gateway, hello, port):
        stranger = await ask(gateway, hello, "b", "bert")
        again = await ask(gateway, hello, "a", "anna")
        assert stranger.usage.cache_read == 0
        assert again.usage.cache_read == again.cache.cached_tokens == 128
        assert gateway.tokens("a") == first
        hits = await asyncio.to_thread(settled, port, "headgate_cache_tier_hit_tokens_total", tier="shared")
        assert hits == 128
