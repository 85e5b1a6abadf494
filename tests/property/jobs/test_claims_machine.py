"""Claims, fences, lines and keys against a model: three chunks of two lines, claimers that die, sleep and wake again, a
gateway that answers late. Whatever the order, a line ends once, is charged at most once, and charged means delivered.
"""

from __future__ import annotations

import asyncio
import os
import uuid
from collections import Counter
from pathlib import Path

import pytest
from conftest import postgres_base_url
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from migrated import migrated
from sqlalchemy import text

from accounting.access import api_keys
from accounting.batches import batch_lines, batch_runs, batches, claims, files
from accounting.batches.batch_lines import LineEnd
from accounting.batches.batch_runs import Chunk
from accounting.batches.claims import ChunkClaim, ClaimLost
from accounting.batches.order import Placed, pack, unpack
from accounting.database import migrate
from accounting.database.db import Database
from accounting.requests import batch_results, idempotency_store
from accounting.requests.idempotency_store import KeyClosed, line_key
from accounting.tenants import tenants
from accounting.values.types import Charge, Posting, Usage

CLAIM_MS = 60_000
LINES = range(1, 7)
TABLES = ("idempotent_reply", "batch_line", "batch_chunk", "batch", "tenant_turn", "file", "api_key", "tenant")
line_numbers = st.sampled_from(list(LINES))
# Small values come first when shrinking, and 0 is the newest: most steps are of claimers that still live.
picks = st.one_of(st.just(0), st.integers(0, 5))


def posting(request_id: str, batch_id: str, line_no: int) -> Posting:
    return Posting(
        kind="settle",
        request_id=request_id,
        outcome="ok",
        tenant_id="t",
        key_id="k",
        model="m",
        root="r",
        tier="batch",
        price_version="p@1",
        currency="USD",
        opened_at_ms=1,
        ended_at_ms=2,
        usage=Usage(output=line_no),
        charge=Charge(0, 0, 0, 0, 0),
        batch_id=batch_id,
        line_no=line_no,
    )


class ClaimsMachine(RuleBasedStateMachine):
    url = ""

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.database = self.run(self.open())
        self.held: list[ChunkClaim] = []
        """Every claim ever given, the lost ones included: their holders do not know yet."""
        self.running: list[tuple[int, str]] = []
        """(line, request) at the gateway."""
        self.started: list[int] = []
        self.replied: set[int] = set()
        self.charged: Counter[int] = Counter()
        self.ended: dict[int, str] = {}
        self.now = 10**12
        self.num_requests = self.num_steps = 0
        self.has_free_chunk = True
        self.is_cancelled = self.is_over = False
        self.run(self.begin())

    def run(self, work):
        return self.runner.run(work)

    async def open(self) -> Database:
        return Database(self.url, pool_size=2)

    async def begin(self) -> None:
        async with self.database.write() as conn:
            for table in TABLES:
                await conn.execute(
                    text(f"DELETE FROM {table} WHERE 1 = 1" + (" AND id <> 'operator'" if table == "tenant" else ""))
                )
            tenant = await tenants.create(conn, "t", now=1)
            self.tenant_id = tenant.id
            key = await api_keys.create(conn, b"p" * 32, tenant_id=tenant.id, now=1)
            file = await files.create(
                conn,
                tenant.id,
                purpose="batch",
                name="f",
                num_bytes=1,
                sha256="",
                storage_key=uuid.uuid4().hex,
                now=10**10,
            )
            batch = await batches.create(
                conn,
                tenant.id,
                key.info.id,
                input_file_id=file.id,
                endpoint="/v1/chat/completions",
                completion_window="24h",
                now=10**10,
            )
            self.batch_id = batch.id
            held = await batch_runs.claim(conn, self.now, CLAIM_MS, 30_000)
            chunks = [
                Chunk(100, 2, pack([Placed(no, 0, 1, b"", 50) for no in (first, first + 1)])) for first in (1, 3, 5)
            ]
            await batch_runs.begin(conn, held, self.now, model="m", num_total=6, chunks=chunks, faulty=[], errors=None)

    # Claimers

    @precondition(lambda self: not self.is_cancelled and self.has_free_chunk)
    @rule(num_started=st.integers(0, 2))
    def claim(self, num_started: int) -> None:
        async def work():
            async with self.database.write() as conn:
                return await claims.claim(conn, self.tenant_id, "here:1", self.now, CLAIM_MS)

        found = self.run(work())
        if found is not None:
            assert not self.is_cancelled
            self.held.append(found)
            for which in range(num_started):
                self.start(0, which)

    @precondition(lambda self: self.num_steps % 6 == 0)
    @rule(seconds=st.sampled_from([1, 20, 45, 61]), sweeps=st.booleans())
    def time_passes(self, seconds: int, sweeps: bool) -> None:
        self.now += seconds * 1000

        async def work():
            async with self.database.write() as conn:
                await claims.expire(conn, self.now, "here:")

        if sweeps:
            self.run(work())

    @precondition(lambda self: self.held)
    @rule(pick=picks, which=st.integers(0, 1))
    def start_line(self, pick: int, which: int) -> None:
        self.start(pick, which)

    def start(self, pick: int, which: int) -> None:
        held = self.held[-1 - pick % len(self.held)]
        line_no = unpack(held.lines)[which].line_no

        async def work():
            async with self.database.write() as conn:
                await batch_lines.start_lines(conn, held, [(line_no, f"c{line_no}")], self.now, CLAIM_MS)

        self.as_holder(held, work())
        self.started.append(line_no)

    @precondition(lambda self: self.held)
    @rule(pick=picks, which=st.integers(0, 1), gives_up=st.booleans())
    def finish_line(self, pick: int, which: int, gives_up: bool) -> None:
        """A late word may come from a holder that lost the chunk long ago."""
        held = self.held[-1 - pick % len(self.held)]
        line_no = unpack(held.lines)[which].line_no
        if line_no in self.replied:
            how = "given up" if gives_up else "answered"
        else:  # the gateway refuses only what it does not run
            is_running = any(no == line_no for no, _ in self.running)
            how = "given up" if is_running or gives_up else "refused"

        async def work():
            async with self.database.write() as conn:
                await claims.renew(conn, held, self.now, CLAIM_MS)
                stored = {}
                if how == "given up":
                    stored = await idempotency_store.close_lines(conn, self.batch_id, [line_no])
                is_ok = how == "answered" or line_no in stored
                end = LineEnd(
                    line_no=line_no,
                    custom_id=f"c{line_no}",
                    state="succeeded" if is_ok else "errored",
                    usage=Usage(output=line_no if is_ok else 0),
                )
                won = await batch_lines.end_lines(conn, self.batch_id, [end])
            for end in won:
                assert line_no not in self.ended, "a line ends once"
                self.ended[line_no] = end.state

        self.as_holder(held, work())

    @precondition(lambda self: self.held and self.num_steps % 3 == 0)
    @rule(pick=picks, gives_back=st.booleans())
    def leave(self, pick: int, gives_back: bool) -> None:
        held = self.held[-1 - pick % len(self.held)]
        numbers = {line.line_no for line in unpack(held.lines)}

        async def work():
            async with self.database.write() as conn:
                if gives_back or not numbers <= self.ended.keys():
                    await claims.release(conn, held)
                else:
                    await claims.finish_chunk(conn, held, self.now)

        self.as_holder(held, work())

    def as_holder(self, held: ChunkClaim, work) -> None:
        newest = max(c.fence for c in self.held if c.seq == held.seq)
        try:
            self.run(work)
        except ClaimLost:
            return
        assert held.fence == newest, "an older claim cannot write"

    # The gateway

    @precondition(lambda self: self.started)
    @rule(pick=picks)
    def request_of_a_started_line_arrives(self, pick: int) -> None:
        self.request_arrives(self.started[-1 - pick % len(self.started)])

    @precondition(lambda self: len(self.started) > 1)
    @rule(line_no=line_numbers)
    def any_request_arrives(self, line_no: int) -> None:
        self.request_arrives(line_no)

    def request_arrives(self, line_no: int) -> None:
        self.num_requests += 1
        request_id = f"req_{self.num_requests}"

        async def work():
            async with self.database.write() as conn:
                return await idempotency_store.take(
                    conn,
                    self.tenant_id,
                    line_key(self.batch_id, line_no),
                    fingerprint=b"f",
                    request_id=request_id,
                    slot=0,
                    now=1,
                    line=(self.batch_id, line_no),
                )

        try:
            known = self.run(work())
        except KeyClosed:
            return
        assert not self.is_cancelled
        assert line_no not in self.ended
        if known is None:
            assert line_no not in self.replied
            self.running.append((line_no, request_id))
        else:
            assert (known.stored is not None) == (line_no in self.replied)

    @precondition(lambda self: self.running)
    @rule(pick=picks, twice=st.booleans())
    def answer_is_stored(self, pick: int, twice: bool) -> None:
        line_no, request_id = self.running.pop(pick % len(self.running))

        async def work():
            async with self.database.write() as conn:
                return await idempotency_store.store(
                    conn,
                    self.tenant_id,
                    line_key(self.batch_id, line_no),
                    request_id=request_id,
                    status=200,
                    body=b"x",
                    postings=[posting(request_id, self.batch_id, line_no)],
                )

        if self.run(work()):
            assert not twice or self.run(work())
            self.replied.add(line_no)
            self.charged[line_no] += 1

    @precondition(lambda self: self.running)
    @rule(pick=picks)
    def answer_is_not_kept(self, pick: int) -> None:
        line_no, request_id = self.running.pop(pick % len(self.running))

        async def work():
            async with self.database.write() as conn:
                await idempotency_store.drop(conn, self.tenant_id, line_key(self.batch_id, line_no), request_id)

        self.run(work())

    @precondition(lambda self: len(self.running) > 1)
    @rule()
    def gateway_crashes(self) -> None:
        async def work():
            async with self.database.write() as conn:
                await idempotency_store.drop_running(conn, 0)

        self.run(work())
        self.running.clear()

    # The batch

    @precondition(lambda self: not self.is_over and self.num_steps > 20)
    @rule()
    def cancel(self) -> None:
        async def work():
            async with self.database.write() as conn:
                await batches.stop(conn, self.batch_id, self.now // 1000)

        self.run(work())
        self.is_cancelled = True

    @precondition(lambda self: self.is_cancelled or len(self.ended) == len(LINES))
    @rule()
    def finalise(self) -> None:
        self.now += 31_000  # whoever still holds a claim after a cancel loses it

        async def work():
            async with self.database.write() as conn:
                held = await batch_runs.claim(conn, self.now, CLAIM_MS, 30_000)
            if held is None:
                return
            if held.work == "cancel":
                await self.cut_off()
            async with self.database.write() as conn:
                await batch_runs.finish(conn, held, self.now, output_file_id=None, error_file_id=None)
            self.is_over = True

        self.run(work())

    async def cut_off(self) -> None:
        async with self.database.write() as conn:
            await batch_runs.close_chunks(conn, self.batch_id)
        async with self.database.read() as conn:
            rows = {row.line_no: row.state for row in await batch_results.line_page(conn, self.batch_id, 0)}
        started = [no for no, state in rows.items() if state == "started"]
        async with self.database.write() as conn:
            stored = await idempotency_store.close_lines(conn, self.batch_id, started)
            for no in started:
                state = "succeeded" if no in stored else "cancelled"
                end = LineEnd(
                    line_no=no, custom_id=f"c{no}", state=state, usage=Usage(output=no if no in stored else 0)
                )
                assert await batch_lines.end_lines(conn, self.batch_id, [end])
                self.ended[no] = state
            fresh = [no for no in LINES if no not in rows]
            ends = [LineEnd(line_no=no, custom_id=f"c{no}", state="cancelled") for no in fresh]
            await batch_lines.add_ended_lines(conn, self.batch_id, ends)
            self.ended.update(dict.fromkeys(fresh, "cancelled"))

    # Laws

    @invariant()
    def rows_and_counters_agree_with_the_model(self) -> None:
        async def look():
            async with self.database.read() as conn:
                rows = await batch_results.line_page(conn, self.batch_id, 0)
                free = await claims.num_claimable(conn, self.now, 1)
                return rows, await batch_runs.get(conn, self.batch_id), free

        self.num_steps += 1
        rows, batch, free = self.run(look())
        self.has_free_chunk = free > 0
        assert {row.line_no: row.state for row in rows if row.state != "started"} == self.ended
        succeeded = {no for no, state in self.ended.items() if state == "succeeded"}
        assert (batch.num_completed, batch.num_failed) == (len(succeeded), len(self.ended) - len(succeeded))
        assert batch.usage.output == sum(succeeded)
        assert sorted(row.ended_no for row in rows if row.ended_no is not None) == list(range(1, len(self.ended) + 1))

    @invariant()
    def a_line_is_charged_once_and_only_if_it_is_or_will_be_delivered(self) -> None:
        assert all(num == 1 for num in self.charged.values())
        undelivered = {no for no in self.charged if self.ended.get(no, "succeeded") != "succeeded"}
        assert not undelivered
        if self.is_over:
            assert set(self.ended) == set(LINES)
            assert set(self.charged) == {no for no, s in self.ended.items() if s == "succeeded"}

    def teardown(self) -> None:
        self.run(self.database.close())
        self.runner.close()


def run_machine(url: str, examples: int, steps: int) -> None:
    ClaimsMachine.url = url
    machine = type("Machine", (ClaimsMachine,), {})
    machine.TestCase.settings = settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        derandomize=bool(os.environ.get("CI")),
        suppress_health_check=list(HealthCheck),
    )
    machine.TestCase().runTest()


@pytest.mark.parametrize("examples", ["4", pytest.param("12", marks=pytest.mark.slow)])
def test_on_sqlite(tmp_path: Path, examples: str) -> None:
    url = f"sqlite+aiosqlite:///{tmp_path / 'jobs.db'}"
    migrated(url)
    run_machine(url, int(os.environ.get("HEADGATE_TEST_EXAMPLES", examples)), 60)


@pytest.mark.rest
def test_on_postgresql() -> None:
    base = postgres_base_url()
    if base is None:
        pytest.skip("no PostgreSQL answers on 127.0.0.1:5432")
    import psycopg

    name = f"hg_jobs_{uuid.uuid4().hex[:12]}"
    with psycopg.connect(base.replace("+psycopg", ""), autocommit=True) as connection:
        connection.execute(f'CREATE DATABASE "{name}"')
        connection.execute(f'ALTER DATABASE "{name}" SET synchronous_commit = off')
        try:
            url = base.rsplit("/", 1)[0] + f"/{name}"
            migrate.upgrade(url)
            run_machine(url, int(os.environ.get("HEADGATE_TEST_EXAMPLES", "4")), 60)
        finally:
            connection.execute(f'DROP DATABASE "{name}" WITH (FORCE)')
