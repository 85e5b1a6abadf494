"""What a child does next, and a claim on a batch that lasts as long as the work on it. No jobs process runs here."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing
from typing import Any

import msgspec
import pytest
import pytest_asyncio
from lost_replies import lose_the_reply_to_a_files_commit, lost
from money import posting
from sqlalchemy import event, func, insert, select
from sqlalchemy.exc import OperationalError

from accounting.batches import batch_lines, batch_runs, batches, claims, files, registration
from accounting.batches.batch_lines import LineEnd
from accounting.batches.batch_runs import BatchClaim, Chunk
from accounting.batches.claims import ChunkClaim, ClaimLost
from accounting.batches.order import Placed, pack
from accounting.database import sealing
from accounting.lifecycle import tenant_status
from accounting.tables.batch_models import BatchLine, IdempotentReply, TenantTurn
from accounting.values.types import Usage
from workers.jobs.base.settings import JobsSettings
from workers.jobs.base.time_limit import TimeLimit
from workers.jobs.base.tracing import provider
from workers.jobs.batches import finalise
from workers.jobs.batches.finalise import Finaliser
from workers.jobs.batches.line import Answered, Closed, Later, Outcome, Stopped
from workers.jobs.batches.runner import ChunkRunner
from workers.jobs.batches.tasks import Look, Turns
from workers.jobs.batches.validation import Validation

pytestmark = pytest.mark.asyncio(loop_scope="module")

MASTER = b"m" * 32
SCALE = 0.01
CLAIM_MS = int(60_000 * SCALE)


@pytest.fixture
def settings(home) -> JobsSettings:
    return JobsSettings(
        home=home.path, url="http://127.0.0.1:9", broker_url="redis://", jobs_process="me", test_time_scale=SCALE
    )


@pytest_asyncio.fixture(loop_scope="module")
async def alone(home):
    """Nothing waits in the database."""
    async with home.database.write() as conn:
        for table in ("batch_line", "batch_chunk", "batch"):
            await conn.exec_driver_sql(f"DELETE FROM {table}")


async def validated(home, num_chunks: int = 1, num_lines: int = 1) -> str:
    """A batch in progress, with chunks of `num_lines` each."""
    total = num_chunks * num_lines
    batch_id = await home.submit([f"say {number}" for number in range(total)])
    async with home.database.write() as conn:
        now = await claims.now_ms(conn)
        held = await batch_runs.claim(conn, now, 60_000, 30_000)
        assert held.batch_id == batch_id
        size = (await files.of_batch(conn, batch_id)).num_bytes // total
        placed = [Placed(no, (no - 1) * size, size, b"", 1) for no in range(1, total + 1)]
        chunks = [Chunk(num_lines, num_lines, pack(placed[i : i + num_lines])) for i in range(0, total, num_lines)]
        await batch_runs.begin(conn, held, now, model="demo", num_total=total, chunks=chunks, faulty=[], errors=None)
    return batch_id


async def ended(home, settings, num_lines: int) -> tuple[BatchClaim, bytes]:
    """A batch whose lines have all ended, claimed to be finalised, and its tenant's key."""
    batch_id = await validated(home, num_lines)
    async with home.database.write() as conn:
        data_key = await sealing.data_key(conn, MASTER, home.tenant_id, 0)
        for _ in range(num_lines):
            now = await claims.now_ms(conn)
            chunk = await claims.claim(conn, home.tenant_id, "me", now, 60_000)
            number = chunk.seq + 1
            await batch_lines.start_lines(conn, chunk, [(number, f"line-{number}")], now, 60_000)
            end = LineEnd(line_no=number, custom_id=f"line-{number}", state="errored", error={"code": "x"})
            await batch_lines.end_lines(conn, batch_id, [end])
            await claims.finish_chunk(conn, chunk, now)
        held = await batch_runs.claim(conn, await claims.now_ms(conn), CLAIM_MS, 0)
    assert held.work == "complete"
    return held, data_key


@pytest.fixture
def slow_writing(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """Each line takes a while to write: all together take three times as long as a claim lasts."""
    written: list[float] = []
    write = finalise._Part.write

    def slowly(self: Any, line: bytes) -> None:
        time.sleep(CLAIM_MS / 1000 / 2)
        write(self, line)
        written.append(time.monotonic())

    monkeypatch.setattr(finalise._Part, "write", slowly)
    return written


async def done_by_a_child(settings, monkeypatch, num_looks: int) -> list[type]:
    """The kinds of work of a child's looks, one after the other."""
    done: list[type] = []

    async def do(self: Look, database: Any, held: BatchClaim | ChunkClaim) -> None:
        done.append(type(held))

    monkeypatch.setattr(Look, "_do", do)
    traces, turns = provider(), Turns()
    slow_claims = settings.model_copy(update={"test_time_scale": 1.0})
    for _ in range(num_looks):
        await Look(slow_claims, lambda: False, traces.get_tracer("test"), turns, TimeLimit()).run()
    traces.shutdown()
    return done


async def test_batches_and_chunks_alternate_where_both_wait(home, settings, alone, monkeypatch):
    await validated(home, num_chunks=4)
    for _ in range(4):
        await home.submit(["say a"])
    assert await done_by_a_child(settings, monkeypatch, 8) == [BatchClaim, ChunkClaim] * 4


async def test_a_child_does_what_waits_where_only_one_kind_does(home, settings, alone, monkeypatch):
    for _ in range(3):
        await home.submit(["say a"])
    assert await done_by_a_child(settings, monkeypatch, 4) == [BatchClaim] * 3


async def test_a_finalisation_that_lasts_longer_than_a_claim_keeps_it(home, settings, alone, slow_writing):
    held, data_key = await ended(home, settings, 6)
    working = asyncio.create_task(Finaliser(settings, home.database, home.store, held, data_key, TimeLimit()).run())
    others = []
    while not working.done():
        await asyncio.sleep(0.05)
        if len(slow_writing) < 6:
            async with home.database.write() as conn:
                others.append(await batch_runs.claim(conn, await claims.now_ms(conn), CLAIM_MS, 0))
    await working
    assert others
    assert not any(others)
    batch = await home.get(held.batch_id)
    assert batch.state == "completed"
    assert [one["custom_id"] for one in await home.read(batch.error_file_id)] == [f"line-{n}" for n in range(1, 7)]


class Signs(TimeLimit):
    """A limit that keeps the moments of progress, and kills nobody."""

    def __init__(self) -> None:
        super().__init__()
        self.at = [time.monotonic()]
        self.last_s = 0.0

    def progress(self, next_s: float = 0.0) -> None:
        self.at.append(time.monotonic())
        self.last_s = max(self.last_s, next_s)


async def test_a_long_finalisation_shows_progress_with_each_line(home, settings, alone, slow_writing):
    """Celery ended it after 300 s, and it was begun from the start."""
    held, data_key = await ended(home, settings, 6)
    signs = Signs()
    await Finaliser(settings, home.database, home.store, held, data_key, signs).run()
    gaps = [later - earlier for earlier, later in itertools.pairwise(signs.at)]
    assert max(gaps) < (signs.at[-1] - signs.at[0]) / 2
    assert len(slow_writing) == 6 < len(signs.at)
    assert signs.last_s == finalise.LAST_S


async def test_a_validation_shows_progress_with_each_part(home, settings, alone):
    batch_id = await home.submit([f"say {'a' * 200}"] * 1000)
    async with home.database.write() as conn:
        held = await batch_runs.claim(conn, await claims.now_ms(conn), CLAIM_MS, 0)
        data_key = await sealing.data_key(conn, MASTER, home.tenant_id, 0)
    assert (held.batch_id, held.work) == (batch_id, "validate")
    signs = Signs()
    await Validation(settings, home.database, home.store, held, data_key, signs).run()
    assert len(signs.at) > 3


async def test_a_batch_whose_time_is_over_is_not_validated_any_more(home, settings, alone):
    """One whose validation ended its process each time was validated again for ever."""
    batch_id = await home.submit(["say a"])
    async with home.database.write() as conn:
        data_key = await sealing.data_key(conn, MASTER, home.tenant_id, 0)
        await conn.exec_driver_sql("UPDATE batch SET expires_at = 1")
        held = await batch_runs.claim(conn, await claims.now_ms(conn), CLAIM_MS, 0)
    await Validation(settings, home.database, home.store, held, data_key, TimeLimit()).run()
    batch = await home.get(batch_id)
    assert (batch.state, [error["code"] for error in batch.errors]) == ("failed", ["batch_expired"])


async def test_a_finalisation_that_lost_its_claim_ends_and_leaves_no_file(home, settings, alone, slow_writing):
    held, data_key = await ended(home, settings, 6)
    before = set(home.store._root.rglob("*"))
    working = asyncio.create_task(Finaliser(settings, home.database, home.store, held, data_key, TimeLimit()).run())
    await home.until(lambda: bool(slow_writing))
    async with home.database.write() as conn:
        await conn.exec_driver_sql("UPDATE batch SET fence = fence + 1")
    with pytest.raises(ClaimLost):
        await working
    num_written = len(slow_writing)
    await asyncio.sleep(CLAIM_MS / 1000)
    assert len(slow_writing) == num_written, "nothing is written any more"
    assert {path for path in home.store._root.rglob("*") if path.is_file()} <= before


@pytest.mark.parametrize("is_gone", [False, True])
async def test_a_batch_whose_commit_lost_its_reply_keeps_its_files(home, settings, alone, monkeypatch, is_gone):
    """They were deleted, and the answers are nowhere else then."""
    held, data_key = await ended(home, settings, 2)
    monkeypatch.setattr(registration, "WAITS_S", (0.01, 0.01))
    with monkeypatch.context() as patch:
        lose_the_reply_to_a_files_commit(patch, home.database, is_gone=is_gone)
        with pytest.raises(OperationalError):
            await Finaliser(settings, home.database, home.store, held, data_key, TimeLimit()).run()
    batch = await home.get(held.batch_id)
    assert batch.state == "completed"
    assert [one["custom_id"] for one in await home.read(batch.error_file_id)] == ["line-1", "line-2"]


async def test_a_batch_whose_end_was_rolled_back_leaves_no_file(home, settings, alone, monkeypatch):
    held, data_key = await ended(home, settings, 2)
    before = set(home.store._root.rglob("*"))

    async def failing(*_: Any, **__: Any) -> None:
        raise lost()

    monkeypatch.setattr(batch_runs, "finish", failing)
    with pytest.raises(OperationalError):
        await Finaliser(settings, home.database, home.store, held, data_key, TimeLimit()).run()
    assert {path for path in home.store._root.rglob("*") if path.is_file()} <= before


async def test_a_batch_is_cut_off_without_reading_the_answers(home, settings, alone):
    batch_id = await validated(home, 3)
    async with home.database.write() as conn:
        data_key = await sealing.data_key(conn, MASTER, home.tenant_id, 0)
        chunk = await claims.claim(conn, home.tenant_id, "me", await claims.now_ms(conn), 60_000)
        await batch_lines.start_lines(conn, chunk, [(1, "line-0")], await claims.now_ms(conn), 60_000)
        await batches.stop(conn, batch_id, int(time.time()))
        held = await batch_runs.claim(conn, await claims.now_ms(conn) + 60_000, 60_000, 0)
    assert held.work == "cancel"
    statements: list[str] = []
    engine = home.database._readers.sync_engine

    def see(_conn: Any, _cursor: Any, statement: str, *_: Any) -> None:
        statements.append(statement)

    event.listen(engine, "before_cursor_execute", see)
    try:
        await Finaliser(settings, home.database, home.store, held, data_key, TimeLimit())._cut_off()
    finally:
        event.remove(engine, "before_cursor_execute", see)
    of_lines = [one for one in statements if "FROM batch_line" in one]
    assert of_lines
    assert not any("body" in one for one in of_lines)


async def test_a_stored_answer_is_paid_for_before_its_batch_ends(home, settings, alone):
    """Its gateway was killed between the answer and the ledger. The end of the batch drops both, with what pays."""
    held, data_key = await ended(home, settings, 1)
    owed = posting(
        "req_owed", Usage(0, 0, 5, 2), tenant_id=home.tenant_id, key_id=home.key_id, batch_id=held.batch_id, line_no=1
    )
    reply = {
        "tenant_id": home.tenant_id,
        "key": f"batch:{held.batch_id}:1",
        "fingerprint": b"f",
        "request_id": "req_owed",
        "slot": 0,
        "state": "stored",
        "batch_id": held.batch_id,
        "line_no": 1,
        "status": 200,
        "body": b"sealed",
        "posting": msgspec.msgpack.encode(owed),
        "num_bytes": 6,
        "created_at": 1,
        "expires_at": 1 << 40,
    }
    async with home.database.write() as conn:
        await conn.execute(insert(IdempotentReply).values(reply))
    await Finaliser(settings, home.database, home.store, held, data_key, TimeLimit()).run()
    async with home.database.read() as conn:
        row = (await conn.exec_driver_sql("SELECT kind, charge FROM ledger_entry WHERE request_id = 'req_owed'")).one()
        assert tuple(row) == ("settle", owed.charge.total)
        assert await conn.scalar(select(func.count()).select_from(IdempotentReply)) == 0


class Answers:
    """A sender that answers each line by a function, and keeps which lines were under way at once."""

    def __init__(self, answer: Any) -> None:
        self._answer = answer
        self.sent: list[int] = []
        self.beside: set[frozenset[int]] = set()
        self._under_way: set[int] = set()

    async def send(self, line_no: int, _body: bytes) -> Outcome:
        self.sent.append(line_no)
        self._under_way.add(line_no)
        self.beside.add(frozenset(self._under_way))
        try:
            return await self._answer(line_no, self.sent.count(line_no))
        finally:
            self._under_way.discard(line_no)


@asynccontextmanager
async def runner_of(
    home,
    settings,
    sender: Answers,
    num_lines: int,
    crashed: int | None = None,
    drains: bool = False,
    scale: float = 1.0,
) -> AsyncIterator[ChunkRunner]:
    """The runner of a chunk, of which one line has crashed two runners."""
    batch_id = await validated(home, 1, num_lines)
    async with home.database.write() as conn:
        data_key = await sealing.data_key(conn, MASTER, home.tenant_id, 0)
        held = await claims.claim(conn, home.tenant_id, "me", await claims.now_ms(conn), 60_000)
        if crashed is not None:
            values = {"batch_id": batch_id, "line_no": crashed, "chunk_seq": 0, "custom_id": "x", "crashes": 2}
            await conn.execute(insert(BatchLine).values(values))
        source = await files.of_batch(conn, batch_id)
    reader = home.store.open(source.storage_key, data_key)
    as_it_is = settings.model_copy(update={"test_time_scale": scale})
    with closing(reader):
        yield ChunkRunner(as_it_is, home.database, held, reader, data_key, sender, lambda: drains)


GOOD = Answered(200, "req_1", b"{}", Usage(1, 2, 3, 4))


async def test_a_line_that_runs_alone_waits_as_it_is_told(home, settings, alone):
    """It was sent again at once, with a transaction each time, hundreds of times a second."""

    async def busy(_line_no: int, _try: int) -> Outcome:
        return Later(1.0, busy=False)

    sender = Answers(busy)
    async with runner_of(home, settings, sender, 1, crashed=1) as runner:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.5):
                await runner.run()
    assert 1 <= len(sender.sent) <= 2


async def test_no_line_starts_beside_one_that_runs_alone(home, settings, alone):
    """Lines that were told to wait came back beside it."""

    async def answer(line_no: int, try_no: int) -> Outcome:
        if line_no == 1 and try_no == 1:
            return Later(0.1, busy=False)
        await asyncio.sleep(0.4 if line_no == 2 else 0)
        return GOOD

    sender = Answers(answer)
    async with runner_of(home, settings, sender, 2, crashed=2) as runner:
        assert await runner.run() == "done"
    assert sorted(sender.sent) == [1, 1, 2]
    assert frozenset({1, 2}) not in sender.beside


async def test_a_gateway_that_has_not_heard_yet_that_a_key_works_fails_no_line(home, settings, alone):
    began = time.monotonic()

    async def answer(_line_no: int, _try: int) -> Outcome:
        knows = time.monotonic() - began > 4 * scale  # its third try would be sooner
        return GOOD if knows else Stopped(None)

    sender, scale = Answers(answer), 0.1
    async with runner_of(home, settings, sender, 2, scale=scale) as runner:
        began = time.monotonic()
        assert await runner.run() == "done"
    async with home.database.read() as conn:
        assert set((await conn.scalars(select(BatchLine.state))).all()) == {"succeeded"}


async def test_a_batch_that_pauses_while_its_lines_run_is_not_claimed_again_at_once(home, settings, alone):
    async def answer(_line_no: int, _try: int) -> Outcome:
        async with home.database.write() as conn:
            await tenant_status.suspend(conn, home.tenant_id, True, now=1)
        return Closed()  # the runner looks at once how the batch stands

    try:
        async with runner_of(home, settings, Answers(answer), 2) as runner:
            assert await runner.run() == "paused"
            async with home.database.write() as conn:
                now = await claims.now_ms(conn)
                assert await claims.waiting(conn, now + 50_000) == []
                assert await claims.waiting(conn, now + 60_000)
    finally:
        async with home.database.write() as conn:
            await tenant_status.suspend(conn, home.tenant_id, False, now=1)


async def deficit(home) -> int:
    async with home.database.read() as conn:
        return await conn.scalar(select(TenantTurn.deficit_tokens).where(TenantTurn.tenant_id == home.tenant_id))


async def saved_up(home, tokens: int) -> None:
    async with home.database.write() as conn:
        await claims.save_turns(conn, {home.tenant_id: tokens}, {home.tenant_id: 1})


@pytest.mark.parametrize(
    ("second", "left", "num_good"),
    [(GOOD, "done", 2), (Later(60.0, busy=False), "given_back", 1), (Stopped("insufficient_quota"), "paused", 1)],
)
async def test_a_run_costs_its_tenant_what_was_measured(home, settings, alone, second, left, num_good):
    """What was written to the cache counted as nothing, and a run that was cut off as its whole prediction."""
    await saved_up(home, 100)

    async def answer(line_no: int, _try: int) -> Outcome:
        await asyncio.sleep(0.1 * line_no)
        return GOOD if line_no == 1 else second

    async with runner_of(home, settings, Answers(answer), 2, drains=left == "given_back") as runner:
        assert await runner.run() == left
    num_predicted, num_measured = 2, num_good * (2 + 3 + 4)
    assert await deficit(home) == 100 + num_predicted - num_measured


async def test_a_chunk_whose_input_cannot_be_read_costs_its_tenant_nothing(home, settings, alone):
    batch_id = await validated(home)
    async with home.database.read() as conn:
        home.store.delete((await files.of_batch(conn, batch_id)).storage_key)
    await saved_up(home, 100)
    traces = provider()
    assert await Look(settings, lambda: False, traces.get_tracer("test"), Turns(), TimeLimit()).run() == 0
    traces.shutdown()
    assert (await home.get(batch_id)).paused_reason == "input_file_unreadable"
    assert await deficit(home) == 100
