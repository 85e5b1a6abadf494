"""What the commands for batches do where answers are lost, refused or broken. The server is a list of answers."""

from __future__ import annotations

import io
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web
from aiohttp.test_utils import TestServer

from gateway.cli import batch_calls
from gateway.cli.api import ApiFailed, TenantApi
from gateway.cli.batch_calls import MOST_FAILURES, BatchCalls, Followed

OURS = {"x-request-id": "req_0"}
Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Scripted:
    """A server that gives its answers one after the other."""

    def __init__(self) -> None:
        self.answers: list[Answer] = []
        self.asked: list[tuple[str, str, str]] = []
        """The method, the path with its query and the Idempotency-Key of each request."""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        await request.read()
        self.asked.append((request.method, request.path_qs, request.headers.get("idempotency-key", "")))
        return await self.answers.pop(0)(request)


@pytest_asyncio.fixture
async def server(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Scripted]:
    scripted, app = Scripted(), web.Application()
    app.router.add_route("*", "/{path:.*}", scripted.handle)
    async with TestServer(app) as running:
        monkeypatch.setenv("HEADGATE_URL", str(running.make_url("")).rstrip("/"))
        monkeypatch.setenv("HEADGATE_API_KEY", "hg_live_0")
        yield scripted


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses that were made. None of them takes time."""
    made: list[float] = []

    async def sleep(pause_s: float) -> None:
        made.append(pause_s)

    monkeypatch.setattr(batch_calls, "asyncio", SimpleNamespace(sleep=sleep))
    return made


def said(status: int, text: str, **headers: str) -> Answer:
    async def answer(request: web.Request) -> web.StreamResponse:
        return web.Response(status=status, text=text, headers=OURS | headers)

    return answer


def refused(status: int, **headers: str) -> Answer:
    return said(status, '{"error": {"message": "No.", "code": "no"}}', **headers)


def lines(*numbers: int, status: str = "in_progress", after_them: str = "") -> Answer:
    text = "".join(f'{{"id":"batch_req_0_{number}"}}\n' for number in numbers)
    return said(200, text + after_them, **{batch_calls.STATUS: status})


async def broken(request: web.Request) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.close()
    return web.Response()


def of_a_proxy(status: int) -> Answer:
    async def answer(request: web.Request) -> web.StreamResponse:
        return web.Response(status=status, text="<html>Bad gateway</html>")

    return answer


async def followed(server: Scripted, *answers: Answer, until_end: bool = True) -> tuple[str, Followed]:
    """What was written, and how far the results were followed."""
    server.answers = list(answers)
    written, found = io.BytesIO(), Followed(None)
    async with BatchCalls.of(TenantApi(Path("/nowhere"))) as calls:
        await calls.follow("batch_0", found, written.write, until_end=until_end)
    assert not server.answers
    return written.getvalue().decode(), found


def written(*numbers: int) -> str:
    return "".join(f'{{"id":"batch_req_0_{number}"}}\n' for number in numbers)


async def test_failures_with_answers_between_them_are_not_in_a_row(server: Scripted, pauses: list[float]) -> None:
    """An answer without lines did not count, so that a quiet batch was given up after nine restarts in a day."""
    text, found = await followed(server, *[refused(503), lines()] * (MOST_FAILURES + 2), lines(1, status="completed"))
    assert (text, found.status) == (written(1), "completed")
    with pytest.raises(ApiFailed, match="No"):
        await followed(server, *[refused(503)] * (MOST_FAILURES + 1))


async def test_where_no_place_is_free_results_are_read_without_a_wait(server: Scripted, pauses: list[float]) -> None:
    full = refused(429, **{"retry-after": "2"})
    text, _ = await followed(server, *[full, lines()] * (MOST_FAILURES + 2), full, lines(1, status="completed"))
    assert text == written(1)
    assert [path.rpartition("wait=")[2] for _, path, _ in server.asked][:4] == ["25", "0", "25", "0"]
    assert pauses[:4] == [2, batch_calls.PLAIN_PAUSE_S] * 2
    with pytest.raises(ApiFailed, match="No"):
        await followed(server, *[full] * (MOST_FAILURES + 2))


@pytest.mark.parametrize("status", [502, 503, 504])
async def test_a_proxy_that_reaches_no_gateway_is_waited_for(
    server: Scripted, pauses: list[float], status: int
) -> None:
    text, _ = await followed(server, lines(1), of_a_proxy(status), lines(2, status="completed"))
    assert text == written(1, 2)
    with pytest.raises(ApiFailed, match="is not Headgate"):
        await followed(server, of_a_proxy(404))


@pytest.mark.parametrize("told", ["Wed, 21 Oct 2026 07:28:00 GMT", "soon", "", "nan", "inf", "-1", "1e9"])
async def test_any_retry_after_is_borne(server: Scripted, pauses: list[float], told: str) -> None:
    await followed(server, refused(503, **{"retry-after": told}), lines(status="completed"))
    assert pauses == [batch_calls.MOST_TOLD_S if told == "1e9" else 1]


@pytest.mark.parametrize("rest", ['{"id":"batch_req_0_2"}', '{"id":"batch_re', "<html>\n", "{}\n", "\n", '{"id":"b\n'])
async def test_only_whole_results_are_written(server: Scripted, pauses: list[float], rest: str) -> None:
    """The rest was written to the file, which no later command could go on with."""
    text, _ = await followed(server, lines(1, status="completed", after_them=rest), lines(2, status="completed"))
    assert text == written(1, 2)
    assert server.asked[1][1].endswith("after=batch_req_0_1")


async def created(server: Scripted, *answers: Answer) -> dict[str, Any]:
    server.answers = [said(200, '{"id": "file-1"}'), *answers]
    async with BatchCalls.of(TenantApi(Path("/nowhere"))) as calls:
        return await calls.create(io.BytesIO(b"{}\n"), "in.jsonl", {"endpoint": "/v1/embeddings"})


@pytest.mark.parametrize("lost", [broken, of_a_proxy(502), refused(503), said(200, "{")])
async def test_a_batch_whose_answer_is_lost_is_made_once(server: Scripted, pauses: list[float], lost: Answer) -> None:
    """Its input was deleted, and whoever typed the command again made a second batch."""
    assert await created(server, lost, said(200, '{"id": "batch_0"}')) == {"id": "batch_0"}
    first, second = server.asked[1:]
    assert first == second
    assert (first[:2], len(first[2])) == (("POST", "/v1/batches"), 32)


async def test_the_input_of_a_batch_that_may_have_been_made_is_kept(server: Scripted, pauses: list[float]) -> None:
    with pytest.raises(ApiFailed, match=r"not known whether the batch was made of file-1: see `headgate batches list`"):
        await created(server, broken, broken)
    assert [method for method, _, _ in server.asked] == ["POST"] * 3


async def test_the_input_of_a_refused_batch_is_deleted(server: Scripted, pauses: list[float]) -> None:
    for deleted in (said(200, "{}"), broken):
        with pytest.raises(ApiFailed, match="No"):
            await created(server, refused(400), deleted)
        assert server.asked[-1][:2] == ("DELETE", "/v1/files/file-1")
