"""A batch line's Idempotency-Key at the real gateway: one run, one charge, one stored answer, whatever breaks between."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import pytest
from fakes import ScriptedWorker
from gateways import MODEL, PEPPER, RunningGateway, running_gateway
from msgspec.structs import replace
from sqlalchemy import text

from accounting.access.credentials import batch_credential
from accounting.batches import batch_lines, batch_runs, batches, claims, files
from accounting.batches.batch_runs import Chunk
from accounting.batches.order import Placed, pack
from accounting.database.db import Database
from accounting.requests import idempotency_store
from accounting.values.types import Opened
from gateway.base.app_keys import DATABASE
from gateway.journal import journal_records
from gateway.journal.journal import open_journal
from workers.protocol.journal import Kind
from workers.protocol.segments import recover

PATH = "/v1/chat/completions"


class Line:
    """One started line of a running batch."""

    def __init__(self, gateway: RunningGateway, batch_id: str) -> None:
        self.gateway = gateway
        self.batch_id = batch_id
        self.key = idempotency_store.line_key(batch_id, 1)

    async def send(self, content: str = "hello", **changes) -> tuple[int, dict, Mapping[str, str]]:
        headers = {"idempotency-key": changes.pop("key", self.key)}
        body = {"model": MODEL, "messages": [{"role": "user", "content": content}], "max_tokens": 20} | changes
        credential = batch_credential(PEPPER, self.batch_id)
        async with (
            self.gateway.session(credential) as session,
            session.post(PATH, json=body, headers=headers) as answer,
        ):
            return answer.status, await answer.json(), answer.headers.copy()

    async def reply_rows(self) -> list:
        return await self.gateway.sql("SELECT state FROM idempotent_reply")

    async def entries(self) -> list[tuple]:
        await self.gateway.settled()
        rows = await self.gateway.sql("SELECT kind, outcome, write_off, batch_id, line_no FROM ledger_entry")
        return [tuple(row) for row in rows if row.kind in ("settle", "void")]


async def started_line(gateway: RunningGateway) -> Line:
    database: Database = gateway.app[DATABASE]
    tenant_id = gateway.keys.tenant_id
    async with database.write() as conn:
        now = await claims.now_ms(conn)
        (key,) = (await conn.execute(text("SELECT id FROM api_key WHERE kind = 'live'"))).scalars()
        file = await files.create(
            conn, tenant_id, purpose="batch", name="f", num_bytes=1, sha256="", storage_key="k", now=now // 1000
        )
        batch = await batches.create(
            conn, tenant_id, key, input_file_id=file.id, endpoint=PATH, completion_window="24h", now=now // 1000
        )
        held = await batch_runs.claim(conn, now, 60_000, 30_000)
        chunk = Chunk(1, 1, pack([Placed(1, 0, 1, b"", 1)]))
        await batch_runs.begin(conn, held, now, model=MODEL, num_total=1, chunks=[chunk], faulty=[], errors=None)
        claimed = await claims.claim(conn, tenant_id, "me", now, 60_000)
        await batch_lines.start_lines(conn, claimed, [(1, "a")], now, 60_000)
    return Line(gateway, batch.id)


@pytest.fixture
async def worker(tmp_path: Path, redis_url: str) -> AsyncIterator[ScriptedWorker]:
    async with ScriptedWorker(tmp_path / "w0.sock", redis_url=redis_url) as worker:
        yield worker


@pytest.fixture
async def line(worker: ScriptedWorker, tmp_path: Path, redis_url: str) -> AsyncIterator[Line]:
    async with running_gateway(tmp_path / "home", redis_url) as gateway:
        await gateway.workers(1)
        yield await started_line(gateway)


async def test_the_second_time_is_a_free_replay(line):
    first = await line.send()
    assert first[0] == 200
    assert "idempotent-replayed" not in first[2]
    second = await line.send()
    assert second[:2] == first[:2]
    assert second[2]["idempotent-replayed"] == "true"
    assert await line.entries() == [("settle", "ok", "resume", line.batch_id, 1)]


async def test_another_body_under_the_same_key_is_a_mismatch(line):
    await line.send()
    status, body, _ = await line.send("something else")
    assert (status, body["error"]["code"]) == (422, "idempotency_mismatch")


async def test_what_is_refused_is_not_kept(line):
    for _ in range(2):
        status, body, _ = await line.send(max_tokens=-1)
        assert (status, body["error"]["param"]) == (400, "max_tokens")
    assert await line.reply_rows() == []
    status, body, _ = await line.send(stream=True)
    assert (status, body["error"]["param"]) == (400, "stream")
    assert (await line.send())[0] == 200


async def test_keys_of_other_lines_and_batches_are_refused(line):
    for key in (idempotency_store.line_key("batch_" + "0" * 32, 1), "batch:x:1", "mine", line.key + "x"):
        assert (await line.send(key=key))[0] == 400, key
    unstarted = idempotency_store.line_key(line.batch_id, 2)
    status, body, headers = await line.send(key=unstarted)
    assert (status, body["error"]["code"]) == (409, "batch_line_ended")
    assert headers["x-should-retry"] == "false"


async def test_while_it_runs_others_wait_and_a_client_that_leaves_changes_nothing(line, worker):
    worker.runner.hang()
    task = asyncio.create_task(line.send())
    await until_rows(line, 1)
    status, body, headers = await line.send()
    assert (status, body["error"]["code"]) == (409, "idempotency_in_progress")
    assert float(headers["retry-after"]) >= 1
    task.cancel()
    await asyncio.wait([task])
    worker.runner.release()
    await until_rows(line, 1, "stored")
    assert (await line.send())[0] == 200
    assert [entry[:2] for entry in await line.entries()] == [("settle", "ok")]


async def test_a_cancel_while_it_runs_makes_it_free(line, worker):
    worker.runner.hang()
    task = asyncio.create_task(line.send())
    await until_rows(line, 1)
    async with line.gateway.app[DATABASE].write() as conn:
        await batches.stop(conn, line.batch_id, int(time.time()))
        assert await idempotency_store.close_lines(conn, line.batch_id, [1]) == {}
    worker.runner.release()
    status, body, _ = await task
    assert (status, body["error"]["code"]) == (409, "batch_line_ended")
    assert [entry[:3] for entry in await line.entries()] == [("void", "batch_cancelled", "batch_cancelled")]


async def test_a_crash_between_storing_and_settling_is_healed_by_the_replay(tmp_path):
    """The posting in the stored answer is what the journal's successor writes, and no VOID."""

    def opened(request_id: str) -> Opened:
        return Opened(
            request_id=request_id,
            tenant_id="t",
            key_id="k",
            model="m",
            root="r",
            tier="batch",
            price_version="p@1",
            currency="USD",
            opened_at_ms=1,
            prompt_tokens=3,
            reserved=5,
            batch_id="batch_1",
            line_no=1,
        )

    journal = await open_journal(tmp_path, 0)
    await journal.open(opened("req_stored"))
    await journal.open(opened("req_lost"))
    await journal.close()
    paid = replace(opened("req_stored").void("ok", "resume", 2), kind="settle")

    async def stored(request_ids):
        assert set(request_ids) == {"req_stored", "req_lost"}
        return {"req_stored": paid}

    again = await open_journal(tmp_path, 0, stored=stored)
    await again.close()
    postings = [
        journal_records.posting(record.payload)
        for record in recover(tmp_path).records
        if record.kind in (Kind.SETTLE, Kind.VOID)
    ]
    endings = {posting.request_id: (posting.kind, posting.outcome) for posting in postings}
    assert endings == {"req_stored": ("settle", "ok"), "req_lost": ("void", "gateway_crash")}


async def test_a_key_left_running_by_a_dead_process_may_run_again(worker, tmp_path, redis_url):
    async with running_gateway(tmp_path / "home", redis_url) as gateway:
        line = await started_line(gateway)
        async with gateway.app[DATABASE].write() as conn:
            await idempotency_store.take(
                conn,
                gateway.keys.tenant_id,
                line.key,
                fingerprint=b"",
                request_id="req_dead",
                slot=0,
                now=int(time.time()),
                line=(line.batch_id, 1),
            )
        await gateway.workers(1)
        assert (await line.send())[0] != 200
    async with running_gateway(tmp_path / "home", redis_url) as gateway:
        await gateway.workers(1)
        line.gateway = gateway
        assert (await line.send())[0] == 200


async def until_rows(line: Line, count: int, state: str = "running") -> None:
    for _ in range(500):
        if [row.state for row in await line.reply_rows()] == [state] * count:
            return
        await asyncio.sleep(0.01)
    raise AssertionError(await line.reply_rows())
