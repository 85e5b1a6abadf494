"""kill -9 in the middle of streams: nothing hangs, nothing is lost, nothing is charged twice."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable

import openai
import pytest
from load import stretched

NUM_STREAMS = 16


async def stream(client, model: str, number: int, started: asyncio.Event) -> tuple[str, str]:
    """How it ended, and its text."""
    seen, text = 0, ""
    try:
        events = await client.completions.create(
            model=model,
            prompt=[400 + number] * 20,
            max_tokens=800,
            temperature=0,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        async for chunk in events:
            seen += len(chunk.choices)
            text += "".join(choice.text for choice in chunk.choices)
            if seen > 3:
                started.set()
    except (openai.APIError, OSError) as error:
        return type(error).__name__, text
    except Exception as error:  # noqa: BLE001 - a cut socket surfaces as the HTTP library's own errors
        return type(error).__name__, text
    return "finished", text


async def kill_during_streams(server, kind: str, number: int = 0) -> list[tuple[str, str]]:
    return await streams(server, lambda: os.kill(server.ready["pids"][kind][number], signal.SIGKILL))


async def streams(server, happens: Callable[[], object] = lambda: None) -> list[tuple[str, str]]:
    """The endings of as many streams, in whose middle something `happens`."""
    async with server.async_client(max_retries=0) as client:
        started = [asyncio.Event() for _ in range(NUM_STREAMS)]
        tasks = [asyncio.create_task(stream(client, server.model, n, started[n])) for n in range(NUM_STREAMS)]
        async with asyncio.timeout(60):
            await asyncio.gather(*(event.wait() for event in started))
        happens()
        async with asyncio.timeout(120):
            return await asyncio.gather(*tasks)


def wait_until_restarted(server, kind: str, old: list[int]) -> None:
    deadline = time.monotonic() + stretched(60)
    while time.monotonic() < deadline:
        if server.ready["pids"][kind] != old:
            break
        time.sleep(0.1)
    assert server.ready["pids"][kind] != old, "the ready file names the new process"
    while time.monotonic() < deadline:
        try:
            if server.client(max_retries=0).completions.create(model=server.model, prompt="x", max_tokens=1):
                return
        except openai.APIError:
            time.sleep(0.2)
    pytest.fail("no request succeeded after the restart")


@pytest.mark.timeout(180)
def test_a_killed_gateway_loses_and_doubles_nothing(start_server):
    server = start_server()
    old = server.ready["pids"]["gateway"]
    endings = asyncio.run(kill_during_streams(server, "gateway"))
    assert all(how != "finished" for how, _ in endings)
    wait_until_restarted(server, "gateway", old)

    server.witnessed()
    report = server.verify_books(30)
    assert report["ok"]
    assert report["unreplayed"] == []
    records, witnessed = server.sql(
        "SELECT COUNT(*), SUM(cache_read + cache_write + uncached + output) FROM engine_record"
    )[0]
    assert records >= NUM_STREAMS + 1
    (posted,) = server.sql("SELECT SUM(cache_read + cache_write + uncached + output) FROM ledger_entry")[0]
    assert posted == witnessed, "every engine token is the tenant's or a write-off"
    doubled = server.sql(
        "SELECT request_id FROM ledger_entry WHERE kind IN ('settle', 'void') GROUP BY request_id HAVING COUNT(*) > 1"
    )
    assert doubled == []


@pytest.mark.timeout(300)
def test_streams_of_a_killed_worker_go_on_on_the_other_one_and_are_paid_once(start_server):
    server = start_server("--workers", "2")
    old = server.ready["pids"]["worker"]
    killed = asyncio.run(kill_during_streams(server, "worker"))
    assert {how for how, _ in killed} == {"finished"}
    wait_until_restarted(server, "worker", old)
    whole = asyncio.run(streams(server))
    assert [text for _, text in killed] == [text for _, text in whole]
    server.witnessed()
    assert server.verify_books(30)["ok"]
    (resumed,) = server.sql("SELECT COUNT(*) FROM engine_record WHERE attempt = 1")[0]
    assert 0 < resumed < NUM_STREAMS, "both workers got work, and one of them was killed"
    settled = server.sql(
        "SELECT output, COUNT(*) FROM ledger_entry WHERE kind = 'settle' AND output > 1 GROUP BY output"
    )
    assert settled == [(800, 2 * NUM_STREAMS)]


@pytest.mark.timeout(180)
@pytest.mark.parametrize("kind", ["redis", "jobs"])
def test_other_children_are_restarted_and_the_books_stay_clean(start_server, kind):
    server = start_server()
    pids = server.ready["pids"][kind]
    os.kill(pids if isinstance(pids, int) else pids[0], signal.SIGKILL)
    wait_until_restarted(server, kind, pids)
    assert server.verify_books(30)["ok"]
