"""Batches through the real jobs process: Celery, prefork children, SQL, and a gateway over HTTP."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import socket
import time
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import pytest_asyncio
from sqlalchemy import select, text, update
from sqlalchemy.exc import OperationalError

from accounting.access import api_keys
from accounting.batches import batch_lines, batch_runs, batches, claims, files
from accounting.batches.batch_figures import batch_figures
from accounting.database.db import Database
from accounting.tables.batch_models import Batch, BatchLine
from accounting.values.tenant_types import KeyChanges
from workers.jobs.base.settings import JobsSettings
from workers.jobs.base.tally import Tally
from workers.jobs.base.time_limit import TimeLimit
from workers.jobs.base.tracing import provider
from workers.jobs.batches.tasks import Look, Turns


def custom_ids(results) -> list[str]:
    return [result["custom_id"] for result in results]


pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture
def started(jobs):
    if jobs.process.poll() is not None:
        jobs.start()
    return jobs


async def test_each_input_line_has_one_result_in_input_order(home, gateway, started):
    texts = [f"bad {i}" if i % 10 == 3 else f"say {i}" for i in range(40)]
    batch = await home.wait(await home.submit(texts))
    assert batch.state == "completed", started.log()
    output, errors = await home.results(batch)
    assert custom_ids(output) == [f"line-{i}" for i in range(40) if i % 10 != 3]
    assert custom_ids(errors) == [f"line-{i}" for i in range(40) if i % 10 == 3]
    assert output[0]["response"]["body"]["choices"][0]["message"]["content"] == "0"
    assert output[0]["response"]["status_code"] == 200
    assert output[0]["error"] is None
    assert errors[0]["response"]["status_code"] == 400
    assert errors[0]["error"] == {"code": "invalid_value", "message": "invalid_value."}
    assert (batch.num_total, batch.num_completed, batch.num_failed) == (40, 36, 4)
    assert batch.usage.cache_read == 36 * 16
    assert set(gateway.num_runs.values()) == {1}
    assert gateway.kinds == {"batch"}
    assert batch.at["in_progress_at"] <= batch.at["finalizing_at"] <= batch.at["completed_at"]


async def test_back_pressure_is_no_failure_and_failures_are_tried_three_times(home, gateway, started):
    batch = await home.wait(await home.submit(["busy a", "flaky b", "broken c", "say d"]))
    output, errors = await home.results(batch)
    assert custom_ids(output) == ["line-0", "line-1", "line-3"]
    assert custom_ids(errors) == ["line-2"]
    assert errors[0]["error"]["code"] == "internal_error"
    assert errors[0]["response"]["status_code"] == 500
    assert gateway.tries[3] == 3
    (counts,) = (home.path / "run").glob("jobs-*.counts")
    counted = Tally(counts).read()
    assert (counted["busy"] >= 1, counted["failed"] >= 3, counted["fence_reject"]) == (True, True, 0)


async def test_the_figures_of_metrics_are_those_of_the_batches(home, gateway, started):
    before = await figures(home)
    gateway.delay_s = 0.1
    batch_id = await home.submit([f"say {i}" for i in range(50)] + ["bad x"])
    await home.until(lambda: len(gateway.num_runs) >= 5)
    during = await figures(home)
    assert during.batches["in_progress"] == before.batches["in_progress"] + 1
    assert sum(during.chunks.values()) > 0
    assert during.lines["queued"] + during.lines["claimed"] > 0
    assert 0 <= during.oldest_queued_s < 600
    gateway.delay_s = 0.0
    await home.wait(batch_id)
    after = await figures(home)
    assert after.batches["completed"] == before.batches["completed"] + 1
    assert after.lines["completed"] - before.lines["completed"] == 50
    assert after.lines["failed"] - before.lines["failed"] == 1
    assert (sum(after.chunks.values()), after.lines["queued"], after.oldest_queued_s) == (0, 0, 0)


@pytest.mark.rest
async def test_children_come_with_work_end_after_it_and_come_again(home, gateway, jobs):
    jobs.stop()
    jobs.start()
    for _ in range(2):
        gateway.delay_s = 0.5
        batch_ids = [await home.submit([f"say {i}" for i in range(70)]) for _ in range(2)]
        await home.until(lambda: len(jobs.children()) == 2)
        gateway.delay_s = 0.0
        for batch_id in batch_ids:
            assert (await home.wait(batch_id)).num_completed == 70
        await home.until(lambda: not jobs.children())


async def figures(home):
    async with home.database.read() as conn:
        return await batch_figures(conn, await claims.now_ms(conn))


@pytest.mark.rest
async def test_a_killed_child_loses_and_doubles_no_line(home, gateway, started):
    gateway.delay_s = 0.15
    batch_id = await home.submit([f"say {i}" for i in range(60)])
    for num_done in (5, 20, 35):
        await home.until(lambda n=num_done: len(gateway.num_runs) >= n)
        for pid in started.children():
            os.kill(pid, signal.SIGKILL)
    batch = await home.wait(batch_id)
    assert batch.state == "completed", started.log()
    output, errors = await home.results(batch)
    assert custom_ids(output) == [f"line-{i}" for i in range(60)]
    assert not errors
    assert set(gateway.num_runs.values()) == {1}, "every line is charged once"


@pytest.mark.rest
async def test_a_killed_jobs_process_is_taken_over(home, gateway, started):
    gateway.delay_s = 0.15
    batch_id = await home.submit([f"say {i}" for i in range(40)])
    await home.until(lambda: len(gateway.num_runs) >= 5)
    worker, children = started.worker(), started.children()
    for pid in (started.process.pid, worker, *children):
        os.kill(pid, signal.SIGKILL)
    started.process.wait()
    started.start()
    batch = await home.wait(batch_id)
    output, _ = await home.results(batch)
    assert custom_ids(output) == [f"line-{i}" for i in range(40)]
    assert set(gateway.num_runs.values()) == {1}


async def test_an_emptied_broker_costs_one_sweep(home, gateway, started, broker_client):
    gateway.delay_s = 0.1
    batch_id = await home.submit([f"say {i}" for i in range(40)])
    await home.until(lambda: len(gateway.num_runs) >= 3)
    for _ in range(3):
        broker_client.flushall()
    batch = await home.wait(batch_id)
    assert batch.num_completed == 40


async def test_doubled_and_forged_rings_change_nothing(home, gateway, started, broker_client):
    from celery import Celery

    with Celery(broker=started.env["HEADGATE_BROKER_URL"], set_as_current=False) as app:
        batch_id = await home.submit([f"say {i}" for i in range(30)])
        for _ in range(10):
            app.send_task(batches.DOORBELL, queue=batches.QUEUE)
            app.send_task(batches.DOORBELL, args=["batch_forged"], queue=batches.QUEUE)
            app.send_task("os.system", args=["false"], queue=batches.QUEUE)
        batch = await home.wait(batch_id)
    assert batch.num_completed == 30
    assert set(gateway.num_runs.values()) == {1}


async def test_cancel_delivers_what_is_done_and_frees_the_rest(home, gateway, started):
    gateway.delay_s = 0.15
    batch_id = await home.submit([f"say {i}" for i in range(400)])
    await home.until(lambda: len(gateway.num_runs) >= 10)
    async with home.database.write() as conn:
        await batches.cancel(conn, home.tenant_id, batch_id, 1, actor="key_test")
    batch = await home.wait(batch_id)
    assert batch.state == "cancelled"
    output, errors = await home.results(batch)
    assert len(output) + len(errors) == 400 == batch.num_total
    assert len(output) == sum(gateway.num_runs.values()), "charged if and only if delivered"
    assert {e["error"]["code"] for e in errors} == {"batch_cancelled"}
    assert len({*custom_ids(output), *custom_ids(errors)}) == 400
    assert all(e["response"] is None for e in errors)


@pytest.mark.rest
async def test_sigterm_finishes_what_is_under_way_and_gives_the_rest_back(home, gateway, started):
    gateway.delay_s = 0.3
    batch_id = await home.submit([f"say {i}" for i in range(60)])
    await home.until(lambda: len(gateway.num_runs) >= 4)
    seconds = await asyncio.to_thread(started.stop)
    assert seconds < 10
    num_done = (await home.get(batch_id)).num_completed
    assert num_done == sum(gateway.num_runs.values()), "what was answered was written"
    assert 0 < num_done < 60
    async with home.database.read() as conn:
        states = (await conn.execute(text("SELECT DISTINCT state FROM batch_chunk"))).scalars().all()
    assert "claimed" not in states, "claims are released, not left to run out"
    started.start()
    batch = await home.wait(batch_id)
    assert batch.num_completed == 60
    assert set(gateway.num_runs.values()) == {1}


async def test_an_expired_batch_keeps_what_finished(home, gateway, started):
    gateway.delay_s = 0.2
    batch_id = await home.submit([f"say {i}" for i in range(80)])
    await home.until(lambda: len(gateway.num_runs) >= 8)
    async with home.database.write() as conn:
        await conn.execute(text("UPDATE batch SET expires_at = 1 WHERE id = :id"), {"id": batch_id})
    batch = await home.wait(batch_id)
    assert batch.state == "expired"
    output, errors = await home.results(batch)
    assert len(output) == sum(gateway.num_runs.values())
    assert len(output) + len(errors) == 80
    assert {e["error"]["code"] for e in errors} == {"batch_expired"}


@pytest.mark.rest
async def test_a_worker_that_hears_nothing_is_replaced(home, gateway, started):
    deaf = started.worker()
    os.kill(deaf, signal.SIGSTOP)
    batch = await home.wait(await home.submit(["say a"]), limit_s=50)
    assert batch.num_completed == 1
    assert started.worker() != deaf


@pytest_asyncio.fixture(loop_scope="module")
async def look(home, gateway, jobs):
    """One ring's worth of work in this process, while no jobs process is there to take it."""
    await asyncio.to_thread(jobs.stop)
    settings = JobsSettings(
        home=home.path,
        url=gateway.url,
        broker_url="redis://",
        jobs_process="me",
        jobs_pulse=home.path / "jobs.pulse",
        test_time_scale=0.01,
    )
    traces = provider()
    yield lambda: Look(settings, lambda: False, traces.get_tracer("test"), Turns(), TimeLimit()).run()
    traces.shutdown()


async def test_a_line_that_crashed_three_runners_is_quarantined_and_the_others_go_on(home, gateway, look):
    batch_id = await home.submit(["say a", "poison b", "say c"])
    await look()
    for _ in range(3):
        async with home.database.write() as conn:
            now = await claims.now_ms(conn)
            held = await claims.claim(conn, home.tenant_id, "me:", now, 1)
            await batch_lines.start_lines(conn, held, [(2, "line-1")], now, 1)
            assert await claims.expire(conn, now + 10, "me:") == 1
    assert await look() == 1
    await look()
    batch = await home.get(batch_id)
    output, errors = await home.results(batch)
    assert custom_ids(output) == ["line-0", "line-2"]
    assert [(e["custom_id"], e["error"]["code"]) for e in errors] == [("line-1", "line_quarantined")]
    assert 2 not in gateway.tries
    assert Tally(home.path / "jobs.counts").read()["quarantined"] == 1


async def test_claims_of_a_dead_process_are_no_crashes(home, gateway, look):
    batch_id = await home.submit(["say a"])
    await look()
    for _ in range(4):
        async with home.database.write() as conn:
            now = await claims.now_ms(conn)
            held = await claims.claim(conn, home.tenant_id, "another:", now, 1)
            await batch_lines.start_lines(conn, held, [(1, "line-0")], now, 1)
            await claims.expire(conn, now + 10, "me:")
    await look()
    await look()
    assert (await home.get(batch_id)).num_completed == 1


async def test_an_error_of_sql_is_no_crash_of_the_lines(home, gateway, look, monkeypatch):
    """Three of them in any part of a run, and its lines were quarantined."""
    batch_id = await home.submit(["say a"])
    await look()
    write = Database.write
    for _ in range(3):
        places = itertools.count(1)

        @asynccontextmanager
        async def failing(self, places=places):
            async with write(self) as conn:
                yield conn
                if self is not home.database and next(places) == 4:  # the lines have been started and sent
                    raise OperationalError("x", {}, OSError("the connection was reset"))

        with monkeypatch.context() as patch:
            patch.setattr("workers.jobs.batches.tasks.Database.write", failing)
            assert await look() == 0
        await asyncio.sleep(0.7)
        async with home.database.write() as conn:
            await claims.expire(conn, await claims.now_ms(conn), f"{socket.gethostname()}:me:")
            assert await conn.scalar(select(BatchLine.crashes).where(BatchLine.batch_id == batch_id)) == 0
    await look()
    await look()
    assert (await home.get(batch_id)).num_completed == 1


async def test_a_spent_budget_pauses_the_batch_and_fails_no_line(home, gateway, look):
    batch_id = await home.submit(["say a", "say b"])
    gateway.refuse_all = (429, "insufficient_quota", {"x-should-retry": "false"})
    await look()
    assert await look() == 0, "nothing to do before the pause is over"
    batch = await home.get(batch_id)
    assert (batch.state, batch.paused_reason, batch.num_failed) == ("in_progress", "insufficient_quota", 0)
    gateway.refuse_all = None
    await asyncio.sleep(0.7)
    assert await look() == 1
    await look()
    batch = await home.get(batch_id)
    assert (batch.state, batch.paused_reason, batch.num_completed) == ("completed", None, 2)


async def test_a_disabled_key_pauses_the_batch_and_fails_no_line(home, gateway, look):
    """Its lines became errors for good after three tries, though to disable a key can be undone."""

    async def disable(disabled: bool) -> None:
        async with home.database.write() as conn:
            changes = KeyChanges(disabled=disabled)
            await api_keys.change(conn, home.tenant_id, home.key_id, changes, now=1, actor="cli")

    batch_id = await home.submit(["say a", "say b"])
    await look()
    await disable(True)
    try:
        await look()
        assert await look() == 0, "nothing to do before the pause is over"
        batch = await home.get(batch_id)
        assert (batch.state, batch.paused_reason, batch.num_failed) == ("in_progress", "key_disabled", 0)
    finally:
        await disable(False)
    await asyncio.sleep(0.7)
    await look_until(home, look, batch_id, "completed")
    batch = await home.get(batch_id)
    assert (batch.paused_reason, batch.num_completed) == (None, 2)


async def test_a_crash_while_writing_the_files_leaves_none_and_is_made_good(home, gateway, look, monkeypatch):
    batch_id = await home.submit(["say a", "bad b"])
    await look()
    await look()
    before = {path.name for path in (home.path / "files").rglob("*") if path.is_file()}

    async def crash(*_args, **_more):
        raise OSError("the disk went away")

    with monkeypatch.context() as patched:
        patched.setattr(batch_runs, "finish", crash)
        await look()
    assert {path.name for path in (home.path / "files").rglob("*") if path.is_file()} == before
    assert (await home.get(batch_id)).state == "finalizing"
    await asyncio.sleep(0.7)
    await look()
    batch = await home.get(batch_id)
    output, errors = await home.results(batch)
    assert (custom_ids(output), custom_ids(errors)) == (["line-0"], ["line-1"])


async def look_until(home, look, batch_id: str, state: str) -> None:
    async with asyncio.timeout(60):
        while (await home.get(batch_id)).state != state:
            await look()
            await asyncio.sleep(0.05)


async def lose_input(home, batch_id: str, how: str) -> Path:
    """Takes the bytes of a batch's input away, or damages them. Returns where they were."""
    async with home.database.read() as conn:
        path = home.path / "files" / (await files.of_batch(conn, batch_id)).storage_key
    path.rename(path.with_suffix(".away"))
    if how == "damaged":
        path.write_bytes(path.with_suffix(".away").read_bytes()[:-1] + b"?")
    return path


@pytest.mark.parametrize("how", ["gone", "damaged"])
@pytest.mark.parametrize("looks_before", [0, 1])
async def test_a_batch_whose_input_cannot_be_read_waits_for_it_and_says_so(home, gateway, look, how, looks_before):
    batch_id = await home.submit(["say a", "say b"])
    for _ in range(looks_before):
        await look()
    path = await lose_input(home, batch_id, how)
    await look()
    batch = await home.get(batch_id)
    assert (batch.state, batch.paused_reason) == (("validating", "in_progress")[looks_before], "input_file_unreadable")
    path.with_suffix(".away").rename(path)
    await look_until(home, look, batch_id, "completed")
    batch = await home.get(batch_id)
    assert (batch.num_completed, batch.paused_reason) == (2, None)


@pytest.mark.parametrize("work", ["cancelled", "expired", "failed"])
async def test_a_batch_whose_input_is_gone_ends_when_it_is_cancelled_or_its_time_is_over(home, gateway, look, work):
    batch_id = await home.submit(["say a", "say b"])
    if work != "failed":
        await look()
    await lose_input(home, batch_id, "gone")
    if work == "failed":
        await look()  # the batch pauses, since its input cannot be read
    async with home.database.write() as conn:
        if work == "cancelled":
            await batches.stop(conn, batch_id, int(time.time()))
        else:
            await conn.execute(update(Batch).where(Batch.id == batch_id).values(expires_at=int(time.time()) - 60))
    await look_until(home, look, batch_id, work)
    batch = await home.get(batch_id)
    assert batch.paused_reason is None
    if work == "failed":
        assert [error["code"] for error in batch.errors] == ["input_file_unreadable"]
    else:
        _, errors = await home.results(batch)
        assert [error["error"]["code"] for error in errors] == [f"batch_{work}"] * 2
