"""PostgreSQL and an external Redis by URL: the same code, several gateways and workers on one port."""

from __future__ import annotations

import asyncio
import socket
import subprocess

import pytest

from gateway.cli.embedded import find_server


@pytest.fixture
def external_redis(tmp_path):
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    command = [find_server().path, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    yield f"redis://127.0.0.1:{port}/0"
    process.terminate()
    process.wait(10)


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
@pytest.mark.timeout(120)
def test_two_gateways_and_two_workers_on_postgresql_and_an_external_redis(start_server, database_url, external_redis):
    server = start_server(
        "--gateways",
        "2",
        "--workers",
        "2",
        env={"HEADGATE_DATABASE_URL": database_url, "HEADGATE_REDIS_URL": external_redis},
    )
    assert server.ready["pids"]["redis"] is None
    assert len(server.ready["pids"]["gateway"]) == 2
    assert not (server.home / "headgate.db").exists()

    async def ask(client, number: int):
        return await client.completions.create(
            model=server.model, prompt=f"def f{number}(", max_tokens=12, extra_body={"ignore_eos": True}
        )

    async def everybody():
        replies = []
        for number in range(8):  # a client of its own: a connection of its own, so both gateways get some
            async with server.async_client() as client:
                replies += await asyncio.gather(*(ask(client, 10 * number + n) for n in range(3)))
        return replies

    replies = asyncio.run(everybody())
    assert all(reply.usage.completion_tokens == 12 for reply in replies)
    env = {"HEADGATE_DATABASE_URL": database_url}
    assert server.verify_books(env=env)["ok"]
    served = [server.engine_counters(number)["vllm:generation_tokens_total"] for number in range(2)]
    assert sum(served) == 24 * 12
    assert min(served) > 0, "both workers got work"
