"""`python -m workers.engine` as a process: start, serve, metrics, drain, and the starts it refuses."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
import types
import urllib.request

import pytest
import redis.asyncio
from byte_model import tokenizer_spec
from fakes import generate_request
from gateway_link import GatewayLink
from prometheus_client.parser import text_string_to_metric_families

from workers.engine import __main__ as worker_main
from workers.engine.journal.journal import EngineJournal
from workers.engine.values.errors import CannotStartYet, StartError
from workers.process import file_systems
from workers.process.rounds import repeat
from workers.process.vocabulary_digest import vocabulary_digest
from workers.protocol import registry
from workers.protocol.messages import Finished, Hello, SamplingParams

pytestmark = pytest.mark.rest


async def start(tmp_path, pass_fds=(), **environ):
    clean = {k: v for k, v in os.environ.items() if not k.startswith("HEADGATE_")}
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "workers.engine",
        env=clean | {"HEADGATE_HOME": str(tmp_path), "HEADGATE_THREADS": "1", **environ},
        stderr=asyncio.subprocess.PIPE,
        pass_fds=pass_fds,
    )


def free_port():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def fetch(port, path, accept="", method="GET"):
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", headers={"Accept": accept}, method=method)
    with urllib.request.urlopen(request, timeout=5) as reply:
        return reply.status, reply.headers["Content-Type"], reply.read().decode()


async def test_a_real_worker_serves_shows_metrics_drains_and_leaves_an_empty_house(tmp_path):
    from tiny_models import TinyModel

    model = TinyModel.make("llama", tmp_path / "tiny")
    (model.directory / "tokenizer.json").write_text(json.dumps(tokenizer_spec()))
    port = free_port()
    address = f"unix:{tmp_path}/w.sock"
    heartbeat_fd, has_beaten = os.eventfd(0), asyncio.Event()
    asyncio.get_running_loop().add_reader(heartbeat_fd, has_beaten.set)
    process = await start(
        tmp_path,
        pass_fds=[heartbeat_fd],
        HEADGATE_HEARTBEAT_FD=str(heartbeat_fd),
        HEADGATE_MODEL=str(model.directory),
        HEADGATE_WORKER_ADDRESS=address,
        HEADGATE_OPS_BIND=f"127.0.0.1:{port}",
        HEADGATE_ENGINE_NUM_BLOCKS="64",
    )
    try:
        told = {}
        while "worker_ready" not in told:
            line = await asyncio.wait_for(process.stderr.readline(), 50)
            assert line, "the worker ended before it was ready"
            told[json.loads(line)["event"]] = json.loads(line)
        # No full collection goes through what was imported.
        assert told["collector_set"]["num_frozen"] > 100_000
        await asyncio.wait_for(has_beaten.wait(), 30)
        asyncio.get_running_loop().remove_reader(heartbeat_fd)
        os.close(heartbeat_fd)
        gateway = await GatewayLink.dial(address)
        hello = await gateway.of(Hello)
        assert (hello.model, hello.num_blocks) == ("tiny", 64)
        assert hello.vocabulary == vocabulary_digest(tokenizer_spec())
        sampling = SamplingParams(1, 0.0, ignore_eos=True)
        request = generate_request("r", range(3, 20), 40, sampling=sampling, root=hello.root)
        gateway.send(request)
        await gateway.of(Finished, limit_s=60)
        assert (await asyncio.to_thread(fetch, port, "/readyz"))[0] == 200
        _, kind, page = await asyncio.to_thread(fetch, port, "/metrics", "text/plain")
        assert kind.startswith("text/plain")
        families = {f.name: f for f in text_string_to_metric_families(page)}
        (generated,) = families["vllm:generation_tokens"].samples
        assert (generated.labels, generated.value) == ({"model_name": "tiny", "engine": "0"}, 40)
        gateway.send(generate_request("s", range(3, 20), 30, sampling=sampling, root=hello.root))
        await gateway.until(lambda _: gateway.tokens("s"))
        process.send_signal(signal.SIGTERM)
        await gateway.of(Finished, request_id="s", limit_s=60)
        assert await asyncio.wait_for(process.wait(), 20) == 0
        assert len(gateway.tokens("s")) == 30
        await gateway.close()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    journal = EngineJournal(tmp_path / "state/worker-0/journal", "worker-0", "p", hello.root)
    assert [r.request_id for r in journal.unacked] == ["r", "s"]
    journal.close()


@pytest.mark.parametrize(
    ("environ", "sentence"),
    [
        ({}, "headgate worker: The environment variable HEADGATE_MODEL is not set. Set it to a model's directory"),
        ({"HEADGATE_MODEL": "/nowhere/at/all"}, "/nowhere/at/all"),
        ({"HEADGATE_MODEL": "/x", "HEADGATE_ENGINE_TYPO": "1"}, "HEADGATE_ENGINE_TYPO"),
        ({"HEADGATE_MODEL": "/x", "HEADGATE_ENGINE_BLOCK_SIZE": "many"}, "HEADGATE_ENGINE_BLOCK_SIZE"),
    ],
)
async def test_a_start_that_cannot_be_is_one_sentence_and_a_status(tmp_path, environ, sentence):
    process = await start(tmp_path, **environ)
    _, errors = await asyncio.wait_for(process.communicate(), 50)
    assert process.returncode == 78
    assert sentence in errors.decode()
    assert "Traceback" not in errors.decode()
    assert len(errors.decode().splitlines()) == 1


def test_a_journal_on_a_network_file_system_is_refused(tmp_path, monkeypatch):
    mounts = tmp_path / "mounts"
    mounts.write_text(f"server:/x {tmp_path} nfs4 rw 0 0\n")
    monkeypatch.setattr(file_systems, "MOUNTS", mounts)
    told = types.SimpleNamespace(journal_dir=tmp_path / "state/worker-0/journal")
    with pytest.raises(StartError, match="is on nfs4, a network file system"):
        worker_main.run(told, None)


async def test_a_worker_whose_slot_another_host_has_is_one_sentence_and_78(tmp_path, redis_url):
    from tiny_models import TinyModel

    model = TinyModel.make("llama", tmp_path / "tiny")
    (model.directory / "tokenizer.json").write_text(json.dumps(tokenizer_spec()))
    client = redis.asyncio.Redis.from_url(redis_url)
    other = registry.Registration("worker-0", "another", "tcp:10.0.0.9:7000", "tiny", "root", 1)

    async def refresh():
        await client.set(registry.worker_key("worker-0"), registry.encode(other), ex=registry.REGISTRATION_TTL_S)

    refreshing = asyncio.create_task(repeat(0.2, refresh))
    process = await start(
        tmp_path,
        HEADGATE_MODEL=str(model.directory),
        HEADGATE_WORKER_ADDRESS=f"unix:{tmp_path}/w.sock",
        HEADGATE_REDIS_URL=redis_url,
    )
    _, errors = await asyncio.wait_for(process.communicate(), 50)
    refreshing.cancel()
    await asyncio.gather(refreshing, return_exceptions=True)
    await client.aclose()
    assert process.returncode == 78
    assert (
        errors.decode().splitlines()[-1]
        == "headgate worker: Slot 0 is in use: a worker of another host or home runs in it."
    )


@pytest.mark.parametrize(("error", "status"), [(CannotStartYet, 1), (StartError, 78)])
def test_a_supervisor_tries_again_after_a_start_that_may_succeed_later(monkeypatch, capsys, error, status):
    """It does so after status 1 and never after 78: the disk of a journal may be mounted late."""

    def refused():
        raise error("The journal directory /mnt/j cannot be used: Read-only file system.")

    monkeypatch.setattr(worker_main.settings, "load", refused)
    assert worker_main.main() == status
    assert (
        capsys.readouterr().err
        == "headgate worker: The journal directory /mnt/j cannot be used: Read-only file system.\n"
    )
