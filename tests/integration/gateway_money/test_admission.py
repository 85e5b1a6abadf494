"""Admission with everything real behind it: what it takes, and that it leaves nothing when anything goes wrong."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
from contextlib import asynccontextmanager
from pathlib import Path

import money
import msgspec
import pytest
import redis.asyncio
from prometheus_client import CollectorRegistry
from sqlalchemy import select
from sqlalchemy.exc import OperationalError

from accounting.prices import prices
from accounting.requests import idempotency_store
from accounting.tables.models import LedgerEntry
from accounting.tenants import tenants
from accounting.values.types import Limits, Rates, Usage
from gateway.base.errors import ApiError
from gateway.journal import journal_records
from gateway.journal.reader import Reader
from gateway.metering.admission import AdmissionRequest
from gateway.metering.endings import Settled
from gateway.metering.metering import Metering, metering
from gateway.metering.metering_metrics import MeteringMetrics
from workers.protocol.journal import Kind

NO_LIMITS = Limits()


@asynccontextmanager
async def running(
    database, redis_url: str, directory: Path, timeout_s: float = 2.0, metrics: MeteringMetrics | None = None
):
    async with metering(
        database=database,
        redis_url=redis_url,
        slot=0,
        directory=directory,
        limiter_timeout_s=timeout_s,
        metrics=metrics,
    ) as metered:
        yield metered


@pytest.fixture
async def metered(sqlite_books, redis_url: str, tmp_path: Path):
    async with running(sqlite_books, redis_url, tmp_path / "journal") as metered:
        yield metered


async def nothing_left(metered: Metering) -> None:
    """No permit, no token, no request counted, no OPEN without an end."""
    await metered.admission.drain()
    assert metered.limiter.num_held == 0
    assert metered.limiter.num_owed == 0
    state = await metered.link.command("HMGET", "hg:{t:proj_1}:s", "n", "mu", "run:t", "tok:t")
    assert [int(n or 0) for n in state] == [0, 0, 0, 0]
    for name in await metered.link.command("KEYS", "hg:{t:proj_1}:w:*"):
        assert int(await metered.link.command("HGET", name, "sum")) == 0, name
    assert metered.journal._open == {}


def recorded(metered: Metering) -> list:
    reader = Reader(metered.journal.directory, 0)
    return [
        journal_records.posting(r.payload) for r in reader.read(1 << 60, 100_000) if r.kind in (Kind.SETTLE, Kind.VOID)
    ]


async def posted(books, number: int) -> list:
    """The ledger, once it has that many rows."""
    for _ in range(200):
        async with books.read() as conn:
            rows = (await conn.execute(select(LedgerEntry.__table__))).all()
        if len(rows) >= number:
            break
        await asyncio.sleep(0.05)
    assert len(rows) == number
    return list(rows)


async def test_a_request_is_admitted_runs_and_is_charged_what_the_engine_counted(
    metered: Metering, sqlite_books, ask
) -> None:
    tenant = Limits(60, 10_000, 5)
    admitted = await metered.admission.admit(ask(1, prompt=100, output=300, tenant=tenant), "r")
    assert (admitted.lease_bound, admitted.lease_seq) == (128, 0)
    assert admitted.price_version == "standard@1"
    assert admitted.headers["x-ratelimit-remaining-requests"] == "59"
    assert admitted.headers["x-ratelimit-remaining-tokens"] == str(10_000 - 228)
    assert await admitted.extend(10) is None
    extension = await admitted.extend(64, cached_tokens=80)
    assert extension is not None
    assert (extension.lease_seq, extension.bound, extension.wait_ms) == (1, 256, 0)
    settled = await admitted.settle("ok", Usage(80, 16, 4, 200), True)
    assert settled.charge_micro_units == 80 + 4 * 20 + 200 * 10
    assert (settled.currency, settled.price_version) == ("USD", "standard@1")
    [posting] = recorded(metered)  # durable before settle returned
    assert posting.charge.total == settled.charge_micro_units
    assert posting.charge.total <= posting.reserved
    await metered.admission.drain()
    assert int(await metered.link.command("HGET", "hg:{t:proj_1}:w:t:tokens:1", "sum")) == 220
    [row] = await posted(sqlite_books, 1)
    assert (row.request_id, row.charge, row.output) == ("req_00000001", 2160, 200)


async def test_exactly_one_end_is_accepted(metered: Metering, ask) -> None:
    admitted = await metered.admission.admit(ask(1, tenant=Limits(100, 10_000)), "r")
    await admitted.void("internal")
    with pytest.raises(RuntimeError, match="has ended already"):
        await admitted.settle("ok", Usage(0, 0, 100, 5), True)
    assert [p.kind for p in recorded(metered)] == ["void"]
    # RPM counts failed requests too; all else has gone back.
    assert int(await metered.link.command("HGET", "hg:{t:proj_1}:w:t:tokens:1", "sum")) == 0
    assert int(await metered.link.command("HGET", "hg:{t:proj_1}:w:t:requests:1", "sum")) == 1


async def test_a_refused_request_takes_nothing_and_is_told_why(metered: Metering, ask) -> None:
    with pytest.raises(ApiError) as refused:
        await metered.admission.admit(ask(1, prompt=500, tenant=Limits(tokens_per_minute=400)), "r")
    assert refused.value.status == 429
    assert refused.value.headers["x-should-retry"] == "false"
    await nothing_left(metered)


async def test_a_batch_line_is_not_bound_by_the_limits_of_chats_nor_counts_in_them(
    metered: Metering, ask, sqlite_books
) -> None:
    async with sqlite_books.write() as conn:
        await prices.bootstrap(conn, {"b": {"batch": Rates(1, 1, 1, 1)}}, 2)
    tenant = Limits(1, 300, 1)
    chat = await metered.admission.admit(ask(1, tenant=tenant), "r")
    lines = [await metered.admission.admit(line_of(ask(n, tenant=tenant, model="b"), n), "r") for n in range(2, 5)]
    state = "hg:{t:proj_1}:s"
    assert int(await metered.link.command("HGET", state, "run:t")) == 1
    assert int(await metered.link.command("HGET", state, "run:batch:t")) == 3
    for admitted in (chat, *lines):
        await admitted.void("drain")
    await metered.admission.drain()
    assert await metered.link.command("HGET", state, "run:batch:t") is None


def line_of(ask: AdmissionRequest, line_no: int) -> AdmissionRequest:
    facts = msgspec.structs.replace(ask.facts, tier="batch", batch_id="batch_1", line_no=line_no)
    return msgspec.structs.replace(ask, facts=facts)


async def test_an_unknown_price_is_refused_before_any_work(metered: Metering, ask) -> None:
    with pytest.raises(ApiError) as refused:
        await metered.admission.admit(ask(1, model="unpriced"), "r")
    assert (refused.value.status, refused.value.code) == (403, "price_unknown")
    assert refused.value.headers == {}
    await nothing_left(metered)


async def test_a_cancelled_settle_is_recorded_all_the_same(metered: Metering, ask) -> None:
    admitted = await metered.admission.admit(ask(1), "r")
    settling = asyncio.create_task(admitted.settle("ok", Usage(0, 0, 100, 5), True))
    await asyncio.sleep(0)
    settling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await settling
    await metered.admission.drain()
    assert [p.kind for p in recorded(metered)] == ["settle"]
    assert metered.limiter.num_held == 0


async def test_an_ending_that_nobody_waits_for_is_written_and_given_back(metered: Metering, ask) -> None:
    admitted = await metered.admission.admit(ask(1, tenant=Limits(tokens_per_minute=10_000)), "r")
    ended = admitted.end(admitted.posting("ok", Usage(0, 0, 100, 5), True))
    ended.cancel()
    await metered.admission.drain()
    assert [p.kind for p in recorded(metered)] == ["settle"]
    assert (metered.limiter.num_held, metered.limiter.num_owed, await tokens_used(metered)) == (0, 0, 105)


async def test_what_an_ending_is_noted_with_may_fail(metered: Metering, ask) -> None:
    admitted = await metered.admission.admit(ask(1), "r")

    def fail(_: Settled) -> None:
        raise LookupError("a fault")

    with pytest.raises(LookupError):
        await admitted.end(admitted.posting("ok", Usage(0, 0, 100, 5), True), fail)
    await metered.admission.drain()
    assert [p.kind for p in recorded(metered)] == ["settle"]
    assert (metered.limiter.num_held, metered.limiter.num_owed) == (0, 0)


@pytest.mark.parametrize("loss", [["FLUSHALL"], ["SCRIPT", "FLUSH"], ["CLIENT", "KILL", "TYPE", "normal"]])
async def test_endings_of_one_turn_reach_a_redis_that_has_lost_something(
    sqlite_books, own_redis, tmp_path: Path, ask, loss: list[str]
) -> None:
    async with running(sqlite_books, own_redis.url, tmp_path / "journal") as metered:
        limits = Limits(tokens_per_minute=10_000)
        admitted = [await metered.admission.admit(ask(number, tenant=limits), "r") for number in range(5)]
        async with redis.asyncio.Redis.from_url(own_redis.url) as other:
            await other.execute_command(*loss, *(["SKIPME", "yes"] if loss[0] == "CLIENT" else []))
        await asyncio.gather(*(one.settle("ok", Usage(0, 0, 100, 5), True) for one in admitted))
        await metered.admission.drain()
        for _ in range(60):
            if metered.limiter.num_owed == 0:
                break
            await asyncio.sleep(0.1)
        assert (metered.limiter.num_held, metered.limiter.num_owed) == (0, 0)
        assert int(await metered.link.command("HGET", "hg:{t:proj_1}:s", "n")) == 0
        assert await tokens_used(metered) == 5 * 105


async def test_an_admission_cancelled_at_any_moment_leaves_nothing(metered: Metering, ask) -> None:
    """Cancelled after 0, 1, 2, ... turns of the loop, until it is too late to cancel."""
    for turns in range(400):
        admitting = asyncio.create_task(metered.admission.admit(ask(turns), "r"))
        for _ in range(turns):
            await asyncio.sleep(0)
        if not admitting.cancel():
            admitted = await admitting
            await admitted.void("internal")
            break
        with pytest.raises(asyncio.CancelledError):
            await admitting
        await nothing_left(metered)
    else:
        pytest.fail("no admission ever got through")
    assert turns > 3


@pytest.mark.parametrize("step", ["reserve", "open", "open after writing"])
async def test_an_admission_that_fails_at_any_step_leaves_nothing(
    metered: Metering, ask, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gateway.base.redis_link import LimiterUnavailable
    from gateway.journal.journal import JournalPoisoned

    reserve, write = metered.limiter.reserve, metered.journal.open

    async def lost_reply(*args):
        await reserve(*args)
        metered.limiter.open_reservations.held.clear()
        raise LimiterUnavailable("reply lost")

    async def poisoned(opened):
        if step == "open after writing":
            await write(opened)
        raise JournalPoisoned("disk")

    if step == "reserve":
        monkeypatch.setattr(metered.limiter, "reserve", lost_reply)
    else:
        monkeypatch.setattr(metered.journal, "open", poisoned)
    with pytest.raises(ApiError) as refused:
        await metered.admission.admit(ask(1), "r")
    code = "limiter_unavailable" if step == "reserve" else "metering_unavailable"
    assert (refused.value.status, refused.value.code) == (503, code)
    assert int(refused.value.headers["retry-after"]) >= 1
    await nothing_left(metered)


async def test_an_ending_that_sql_refuses_while_the_journal_is_poisoned_is_counted_apart(
    sqlite_books, redis_url: str, tmp_path: Path, ask
) -> None:
    """It was counted as tokens and money that were charged."""

    def sync(_: int) -> None:
        raise OSError(errno.EIO, "I/O error")

    registry = CollectorRegistry()
    async with running(sqlite_books, redis_url, tmp_path / "journal", metrics=MeteringMetrics(registry)) as metered:
        admitted = await metered.admission.admit(ask(1), "r")
        metered.journal._sync = sync
        posting = admitted.posting("ok", Usage(0, 0, 100, 5), True)
        await metered.admission.endings.record(msgspec.structs.replace(posting, reserved=2**63))  # no BIGINT holds it
        assert registry.get_sample_value("headgate_refused_postings_total") == 1
        page = {sample.name: sample.value for family in registry.collect() for sample in family.samples}
        assert "headgate_charge_micro_units_total" not in page
        await metered.admission.endings.record(posting)
        assert registry.get_sample_value("headgate_refused_postings_total") == 1
        page = {sample.name: sample.value for family in registry.collect() for sample in family.samples}
        assert page["headgate_charge_micro_units_total"] == 450


async def test_a_poisoned_journal_refuses_new_requests_and_settles_running_ones_in_sql(
    sqlite_books, redis_url: str, tmp_path: Path, ask
) -> None:
    broken = False

    def sync(descriptor: int) -> None:
        if broken:
            raise OSError(errno.EIO, "I/O error")
        os.fdatasync(descriptor)

    async with running(sqlite_books, redis_url, tmp_path / "journal") as metered:
        metered.journal._sync = sync
        admitted = await metered.admission.admit(ask(1), "r")
        broken = True
        settled = await admitted.settle("ok", Usage(0, 0, 100, 5), True)
        assert settled.charge_micro_units == 450
        async with sqlite_books.read() as conn:
            [row] = (await conn.execute(select(LedgerEntry.__table__))).all()
        assert row.charge == 450
        with pytest.raises(ApiError) as refused:
            await metered.admission.admit(ask(2), "r")
        assert refused.value.code == "metering_unavailable"
        broken = False
        await metered.journal.revive()
        await (await metered.admission.admit(ask(3), "r")).void("internal")
    async with running(sqlite_books, redis_url, tmp_path / "journal"):
        pass
    async with sqlite_books.read() as conn:
        rows = (await conn.execute(select(LedgerEntry.__table__))).all()
    assert sorted((row.request_id[-1], row.kind) for row in rows) == [("1", "settle"), ("3", "void")]


class Refusing:
    """A journal's disk and a database that refuse as often as asked."""

    def __init__(self, metered: Metering, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_syncs = self.num_transactions = 0
        self._write = metered.admission.endings._database.write
        metered.journal._sync = metered.journal._log._sync = self._sync
        monkeypatch.setattr(metered.admission.endings._database, "write", self.write)

    def _sync(self, descriptor: int) -> None:
        if self.num_syncs:
            self.num_syncs -= 1
            raise OSError(errno.EIO, "I/O error")
        os.fdatasync(descriptor)

    def write(self):
        if self.num_transactions:
            self.num_transactions -= 1
            raise OperationalError("BEGIN", {}, ConnectionError("gone"))
        return self._write()


async def test_an_ending_that_journal_and_sql_refuse_is_written_when_one_of_them_takes_it(
    metered: Metering, sqlite_books, ask, monkeypatch
) -> None:
    """It was dropped, and the limiter kept a charge that no ledger had."""
    refusing = Refusing(metered, monkeypatch)
    admitted = await metered.admission.admit(ask(1, tenant=Limits(tokens_per_minute=10_000)), "r")
    refusing.num_syncs, refusing.num_transactions = 1, 1
    settled = await admitted.settle("ok", Usage(0, 0, 100, 5), True)
    assert settled.charge_micro_units == 450
    [row] = await posted(sqlite_books, 1)
    assert row.charge == 450
    await metered.admission.drain()
    assert int(await metered.link.command("HGET", "hg:{t:proj_1}:w:t:tokens:1", "sum")) == 105


async def tokens_used(metered: Metering) -> int:
    return int(await metered.link.command("HGET", "hg:{t:proj_1}:w:t:tokens:1", "sum"))


async def untaken(metered: Metering, ask, monkeypatch, late_s: float = 0.01) -> Refusing:
    """A request of 105 tokens whose ending was taken by nothing in the time that its client waits."""
    monkeypatch.setattr("gateway.metering.endings.REPEATS_S", (0.0,))
    monkeypatch.setattr("gateway.metering.endings.LATE_EVERY_S", late_s)
    refusing = Refusing(metered, monkeypatch)
    admitted = await metered.admission.admit(ask(1, tenant=Limits(tokens_per_minute=10_000)), "r")
    refusing.num_syncs = refusing.num_transactions = 1 << 30
    with pytest.raises(OperationalError):
        await admitted.settle("ok", Usage(0, 0, 100, 5), True)
    await asyncio.sleep(0.1)
    assert metered.limiter.num_held == 1
    assert await tokens_used(metered) >= 105
    return refusing


async def test_I11_an_ending_that_nothing_took_in_time_is_held_until_a_ledger_has_it_and_free(
    metered: Metering, sqlite_books, ask, monkeypatch
) -> None:
    """Its client saw our error, and was charged later. Its reservation is held until then."""
    refusing = await untaken(metered, ask, monkeypatch)
    refusing.num_syncs = refusing.num_transactions = 0
    await metered.admission.drain()
    [row] = await posted(sqlite_books, 1)
    assert (row.kind, row.outcome, row.charge) == ("void", "internal", 0)
    assert (metered.limiter.num_held, await tokens_used(metered)) == (0, 0)
    assert await metered.journal.revive()
    await metered.journal.end(money.posting("req_00000002"))
    await metered.shipper.caught_up(soon=True)
    assert {row.request_id: row.kind for row in await posted(sqlite_books, 2)}["req_00000001"] == "void"


async def test_I11_a_charge_of_such_an_ending_that_the_ledger_got_first_is_taken_back(
    metered: Metering, sqlite_books, ask, monkeypatch
) -> None:
    """The journal that failed had its SETTLE nevertheless, and was shipped before the next try."""
    refusing = await untaken(metered, ask, monkeypatch, late_s=3.0)
    refusing.num_syncs = refusing.num_transactions = 0
    assert await metered.journal.revive()
    await metered.shipper.caught_up(soon=True)
    [row] = await posted(sqlite_books, 1)
    assert (row.kind, row.charge) == ("settle", 450)
    await metered.admission.drain()
    rows = await posted(sqlite_books, 3)
    assert sorted(row.kind for row in rows) == ["internal", "reversal", "settle"]
    assert sum(row.charge for row in rows) == 0
    assert metered.limiter.num_held == 0


async def test_such_an_ending_whose_answer_is_stored_under_a_key_is_paid(
    metered: Metering, sqlite_books, ask, monkeypatch
) -> None:
    refusing = await untaken(metered, ask, monkeypatch)
    paid = money.posting("req_00000001")
    async with refusing._write() as conn:
        key = ((await tenants.create(conn, "a", now=1)).id, "key")
        await idempotency_store.take(conn, *key, fingerprint=b"f", request_id=paid.request_id, slot=0, now=1)
        await idempotency_store.store(
            conn, *key, request_id=paid.request_id, status=200, body=b"sealed", postings=[paid]
        )
    refusing.num_syncs = refusing.num_transactions = 0
    await metered.admission.drain()
    [row] = await posted(sqlite_books, 1)
    assert (row.kind, row.charge) == ("settle", paid.charge.total)


async def test_an_ending_that_nothing_takes_until_the_gateway_ends_is_left_to_the_next_start(
    sqlite_books, redis_url: str, ask, monkeypatch, tmp_path: Path
) -> None:
    async with running(sqlite_books, redis_url, tmp_path / "journal") as metered:
        refusing = await untaken(metered, ask, monkeypatch)
        await metered.admission.drain()
        assert metered.limiter.num_held == 1
        refusing.num_syncs = refusing.num_transactions = 0
    async with running(sqlite_books, redis_url, tmp_path / "journal") as metered:
        [row] = await posted(sqlite_books, 1)
        assert (metered.limiter.num_held, metered.limiter.num_owed) == (0, 0)
        assert await tokens_used(metered) == (105 if row.kind == "settle" else 0)


async def test_a_request_that_never_reached_redis_owes_it_no_ending(metered: Metering, ask) -> None:
    """Each refusal left one, and they were paid one by one when Redis was back."""
    await (await metered.admission.admit(ask(1000), "r")).void("internal")
    await metered.admission.drain()
    metered.link._closed_until = asyncio.get_running_loop().time() + 60
    for number in range(100):
        with pytest.raises(ApiError):
            await metered.admission.admit(ask(number), "r")
    await metered.admission.drain()
    assert metered.limiter.num_owed == 0
    metered.link._closed_until = 0.0
    await (await metered.admission.admit(ask(1), "r")).void("internal")


async def test_a_request_whose_second_try_is_not_sent_is_ended_for_its_first(
    metered: Metering, ask, monkeypatch
) -> None:

    def goes_away(*_) -> bool:
        metered.link._closed_until = asyncio.get_running_loop().time() + 60
        return False

    await (await metered.admission.admit(ask(1), "r")).void("internal")
    await metered.admission.drain()
    monkeypatch.setattr(metered.limiter.incidents, "is_in_force", goes_away)
    with pytest.raises(ApiError):
        await metered.admission.admit(ask(2), "r")
    await metered.admission.drain()
    assert metered.limiter.num_owed == 1
    monkeypatch.undo()
    metered.link._closed_until = 0.0
    await metered.limiter.pay("req_00000002")
    assert int(await metered.link.command("HGET", "hg:{t:proj_1}:s", "n")) == metered.limiter.num_owed == 0


async def test_without_redis_a_request_gets_503_and_a_running_one_settles(
    sqlite_books, own_redis, tmp_path: Path, ask
) -> None:
    async with running(sqlite_books, own_redis.url, tmp_path / "journal", 0.1) as metered:
        admitted = await metered.admission.admit(ask(1), "r")
        own_redis.send(signal.SIGSTOP)
        with pytest.raises(ApiError) as refused:
            await metered.admission.admit(ask(2), "r")
        assert (refused.value.status, refused.value.code) == (503, "limiter_unavailable")
        assert await admitted.extend(128) is None
        settled = await admitted.settle("ok", Usage(0, 0, 100, 5), True)
        assert settled.charge_micro_units == 450
        own_redis.send(signal.SIGCONT)
        for _ in range(60):
            if metered.limiter.num_owed == 0:
                break
            await asyncio.sleep(0.1)
        state = await metered.link.command("HGET", "hg:{t:proj_1}:s", "n")
        assert int(state) == 0


async def test_a_stream_is_paced_by_its_tokens_per_minute(metered: Metering, ask) -> None:
    admitted = await metered.admission.admit(ask(1, prompt=100, output=300, tenant=Limits(tokens_per_minute=250)), "r")
    assert admitted.lease_bound == 128
    bounds = [128]
    while (extension := await admitted.extend(bounds[-1])) and not extension.wait_ms:
        bounds.append(extension.bound)
    assert bounds == [128, 144, 148, 150]
    assert extension is not None
    assert (extension.bound, extension.wait_ms) == (150, 10_000)
    await admitted.void("client_gone")


async def test_many_requests_at_once_are_all_accounted_for(metered: Metering, sqlite_books, ask) -> None:
    async def one(number: int) -> int:
        admitted = await metered.admission.admit(ask(number, output=50), "r")
        if number % 3 == 0:
            await admitted.void("worker_lost")
            return 0
        settled = await admitted.settle("ok", Usage(16, 64, 20, number % 50), True)
        return settled.charge_micro_units

    charges = await asyncio.gather(*(one(number) for number in range(300)))
    await metered.admission.drain()
    assert metered.limiter.num_held == 0
    rows = await posted(sqlite_books, 300)
    assert sum(row.charge for row in rows) == sum(charges)
