"""Gateways and workers are restarted one after the other under load, and no request fails (security.md F8)."""

from __future__ import annotations

import asyncio
import os
import signal
import time

import httpx2 as httpx
import pytest
from load import stretched
from running import Server, Starter

NUM_CLIENTS = 6
TOKENS = 120
ENV = {"HEADGATE_DRAIN_S": "3", "HEADGATE_DRAIN_GRACE_S": "1"}
"""Short, so that the test is. What a drained worker hands over is in tests/integration/gateway/test_resumes.py."""


async def serve(server: Server, until_done: asyncio.Event, stream: bool) -> list[tuple[int, str]]:
    """Asks one prompt after the other, and returns which was asked with what was answered. Raises what a client gets."""
    found: list[tuple[int, str]] = []
    async with server.async_client(max_retries=0) as client:
        while not until_done.is_set():
            number = len(found) % 4
            fields = {"model": server.model, "prompt": [400 + number] * 20, "max_tokens": TOKENS, "temperature": 0}
            answer = await client.completions.create(**fields, stream=stream, extra_body={"ignore_eos": True})
            text = "".join([part.choices[0].text async for part in answer if part.choices]) if stream else ""
            found.append((number, text or answer.choices[0].text))
    return found


async def restarted(server: Server, kind: str, number: int) -> None:
    old = server.ready["pids"][kind][number]
    os.kill(old, signal.SIGTERM)
    deadline = time.monotonic() + stretched(60)
    while server.ready["pids"][kind][number] == old or not all([await has_workers(server, slot) for slot in range(2)]):
        assert time.monotonic() < deadline, f"{kind} {number} was not restarted"
        await asyncio.sleep(0.1)


async def has_workers(server: Server, slot: int) -> bool:
    """Whether this gateway takes requests, and has both workers for them."""
    transport = httpx.AsyncHTTPTransport(uds=str(server.home / "run" / f"gateway-{slot}.sock"))
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
        try:
            probe = await client.get("/readyz")
        except httpx.HTTPError:
            return False
    return probe.status_code == 200 and probe.json()["workers"] == {server.model: 2}


@pytest.mark.timeout(300)
def test_a_rolling_restart_under_load_fails_no_request(start_server: Starter) -> None:
    server = start_server("--workers", "2", "--gateways", "2", env=ENV)

    async def run() -> list[list[tuple[int, str]]]:
        done = asyncio.Event()
        clients = [asyncio.create_task(serve(server, done, bool(number % 2))) for number in range(NUM_CLIENTS)]
        for kind in ("worker", "gateway"):
            for number in range(2):
                await asyncio.sleep(1)
                await restarted(server, kind, number)
        await asyncio.sleep(1)
        done.set()
        return await asyncio.gather(*clients)

    answers = asyncio.run(run())
    texts: dict[int, set[str]] = {}
    for number, text in [pair for one in answers for pair in one]:
        texts.setdefault(number, set()).add(text)
    assert [len(found) for found in texts.values()] == [1] * 4, "each prompt has one answer, whoever gave it"
    num_answers = sum(map(len, answers))
    assert num_answers > 2 * NUM_CLIENTS
    server.witnessed()
    assert server.verify_books(30)["ok"]
    endings = server.sql(
        "SELECT kind, output, COUNT(*) FROM ledger_entry WHERE kind IN ('settle', 'void') GROUP BY 1, 2"
    )
    assert endings == [("settle", TOKENS, num_answers)]
