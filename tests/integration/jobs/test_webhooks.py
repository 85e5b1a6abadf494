"""Webhooks as receivers see them: signed, repeated, given up; F10, and F41's receivers beside honest ones."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import time

import pytest
from load import stretched
from prometheus_client import CollectorRegistry
from sqlalchemy import delete, func, select, update
from webhook_receiver import DRIP, ENDLESS_BODY, ENDLESS_HEADERS, SILENT, Forged, Receiver, Verifier, hostile, receiving

from accounting.database.db import Database
from accounting.events import outbox, webhooks
from accounting.events.egress import Egress, networks
from accounting.events.events import Event
from accounting.tables.outbox_models import Outbox, Webhook
from accounting.tenants import tenants
from workers.jobs.base.settings import JobsSettings
from workers.jobs.webhooks import places
from workers.jobs.webhooks.egress import Poster
from workers.jobs.webhooks.sender import Sender

from .conftest import MASTER

pytestmark = pytest.mark.asyncio(loop_scope="module")
LOOPBACK = "127.0.0.0/8"


@pytest.fixture
def settings(home):
    return JobsSettings(
        home=home.path,
        url="http://127.0.0.1:1",
        broker_url="redis://127.0.0.1:1",
        webhook_allowed_networks=LOOPBACK,
        test_time_scale=0.1,
    )


class Counted(Database):
    """A database that counts its snapshots."""

    num_reads = 0

    @contextlib.asynccontextmanager
    async def read(self):
        self.num_reads += 1
        async with super().read() as conn:
            yield conn


async def test_sql_is_not_read_again_while_no_delivery_waits_and_nobody_commits(settings, home):
    database = Counted(home.url)
    sender = Sender(settings, database)
    async with home.database.write() as conn:
        await conn.execute(delete(Outbox))
    assert [await sender._claim() for _ in range(3)] == [[], [], []]
    assert database.num_reads == 1
    tenant_id, _ = await listen(home, "http://127.0.0.1:9999/")
    await tell(home, tenant_id, "one")
    await asyncio.sleep(0.01)  # it is due in the next millisecond
    claimed = await sender._claim()
    assert [one.event_id for one in claimed] == [f"{tenant_id}/one"]
    before = database.num_reads
    assert [await sender._claim() for _ in range(3)] == [[], [], []]
    assert database.num_reads == before + 3, "a delivery waits, and becomes due without a commit"
    async with home.database.write() as conn:
        await conn.execute(delete(Outbox))
    await database.close()


async def test_an_outage_of_sql_is_logged_once_and_so_is_its_end(settings, home, monkeypatch, caplog):
    """It was logged at each look: 52 times in half a minute."""
    sender = Sender(settings, Database(home.url))
    due = sender._due

    async def lost(*_):
        raise OSError("no route to host")

    for one in (lost, lost, lost, due, due, lost, lost, due):
        monkeypatch.setattr(sender, "_due", one)
        sender._empty_at = None
        await sender._claim()
    assert [record.message for record in caplog.records if "claim" in record.message] == [
        "webhook_claim_failed",
        "webhook_claim_back",
    ] * 2
    await sender._database.close()


async def test_a_round_deletes_all_that_ended_long_ago(settings, home):
    """A thousand a minute were deleted, however many more ended."""
    tenant_id, _ = await listen(home, "http://127.0.0.1:9999/")
    await tell(home, tenant_id, *range(5_000))
    async with home.database.write() as conn:
        await conn.execute(update(Outbox).values(state="delivered", ended_at_ms=1))
    await Sender(settings, home.database)._tidy()
    async with home.database.read() as conn:
        assert await conn.scalar(select(func.count()).select_from(Outbox)) == 0


@contextlib.asynccontextmanager
async def sending(settings, home):
    registry = CollectorRegistry()
    task = asyncio.create_task(Sender(settings, home.database, registry=registry).run())
    try:
        yield registry
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def listen(home, url, tenant_id=None):
    async with home.database.write() as conn:
        if tenant_id is None:
            tenant_id = (await tenants.create(conn, f"hearer {secrets.token_hex(4)}", now=1)).id
        made = await webhooks.create(
            conn, MASTER, Egress(networks(LOOPBACK)), url=url, types=None, tenant_id=tenant_id, now=1, actor="cli"
        )
    return tenant_id, made


async def tell(home, tenant_id, *names):
    async with home.database.write() as conn:
        told = [Event(f"{tenant_id}/{n}", "headgate.usage.v1", tenant_id, 1, {"n": n}) for n in names]
        await outbox.write(conn, told)


def counted(registry) -> dict[str, float]:
    name = "headgate_webhook_deliveries_total"
    outcomes = ("delivered", "failed", "dead")
    return {o: registry.get_sample_value(name, {"outcome": o}) for o in outcomes}


async def rows(home, tenant_id):
    async with home.database.read() as conn:
        query = select(Outbox.__table__).where(Outbox.lane == tenant_id).order_by(Outbox.event_id)
        return (await conn.execute(query)).all()


async def test_an_event_comes_signed_and_its_receiver_can_tell(home, settings):
    async with receiving(Receiver()) as receiver, sending(settings, home):
        tenant_id, made = await listen(home, receiver.url)
        await tell(home, tenant_id, "a")
        await home.until(lambda: receiver.came)
    [(headers, body)] = receiver.came
    assert headers["content-type"].startswith("application/cloudevents+json")
    assert receiver.events()[0]["data"] == {"n": "a"}
    verifier, sent_at = Verifier(made.secret), int(headers["webhook-timestamp"])
    for forged_headers, forged_body, now, why in (
        (headers, body.replace(b'"a"', b'"b"'), None, "signature"),
        (headers | {"webhook-id": "other"}, body, None, "signature"),
        (headers | {"webhook-timestamp": str(sent_at + 60)}, body, None, "signature"),
        (headers, body, sent_at + 301, "time"),
        (headers, body, sent_at - 301, "time"),
    ):
        with pytest.raises(Forged, match=why):
            verifier.check(forged_headers, forged_body, now)
    with pytest.raises(Forged, match="signature"):
        Verifier("whsec_" + "A" * 43 + "=").check(headers, body)
    verifier.check(headers, body)
    with pytest.raises(Forged, match="repeated"):
        verifier.check(headers, body)


async def test_a_failure_comes_again_with_the_same_id_and_a_signature_of_its_own(home, settings, monkeypatch):
    monkeypatch.setattr(JobsSettings, "webhook_s", 5.0)  # only the waits are shortened
    receiver = Receiver(statuses=[500, 302])
    fast = settings.model_copy(update={"test_time_scale": 0.02})
    async with receiving(receiver), sending(fast, home) as registry:
        tenant_id, made = await listen(home, receiver.url)
        await tell(home, tenant_id, "a")
        await home.until(lambda: len(receiver.came) == 3)
        await asyncio.sleep(0.3)
    assert counted(registry) == {"delivered": 1, "failed": 2, "dead": 0}
    assert {headers["webhook-id"] for headers, _ in receiver.came} == {f"{tenant_id}/a"}
    assert dict(receiver.paths) == {"/hook": 3}, "a redirect is a failure and is not followed"
    for headers, body in receiver.came:
        Verifier(made.secret).check(headers, body)
    [row] = await rows(home, tenant_id)
    assert (row.state, row.attempts, row.last_error) == ("delivered", 3, None)


@pytest.mark.rest
async def test_after_the_last_try_it_is_dead_and_the_list_says_so(home, settings):
    fast = settings.model_copy(update={"test_time_scale": 0.0001})
    receiver = Receiver(statuses=[503] * 50)
    # A try may still take its time: only the waits are shortened.
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(JobsSettings, "webhook_s", 5.0)
        async with receiving(receiver), sending(fast, home) as registry:
            tenant_id, made = await listen(home, receiver.url)
            await tell(home, tenant_id, "a")
            await home.until(lambda: len(receiver.came) == 12, 30)
            await asyncio.sleep(0.5)
    assert counted(registry) == {"delivered": 0, "failed": 11, "dead": 1}
    assert len(receiver.came) == 12
    async with home.database.read() as conn:
        counts = (await webhooks.get(conn, made.info.id)).counts
    assert (counts.pending, counts.dead, counts.last_error) == (0, 1, "status 503")


async def test_at_most_two_at_once_for_one_tenant(home, settings):
    receiver = Receiver(delay_s=0.05)
    async with receiving(receiver), sending(settings, home):
        tenant_id, _ = await listen(home, receiver.url)
        await tell(home, tenant_id, *range(12))
        await home.until(lambda: len(receiver.came) == 12)
    assert receiver.most_at_once == 2


async def test_hostile_receivers_delay_nobody_else(home, settings, monkeypatch):
    """Receivers of other tenants hang, drip and pour. A try may take 50 s here, so whoever waited for one of theirs
    would not be in time."""
    monkeypatch.setattr(JobsSettings, "webhook_s", 50.0)
    kinds = (SILENT, DRIP, ENDLESS_HEADERS, ENDLESS_BODY, SILENT, DRIP)
    async with contextlib.AsyncExitStack() as stack:
        hostiles = [await stack.enter_async_context(hostile(kind)) for kind in kinds]
        for one in hostiles:
            tenant_id, _ = await listen(home, one.url)
            await tell(home, tenant_id, *range(10))
        receiver = await stack.enter_async_context(receiving(Receiver()))
        await stack.enter_async_context(sending(settings, home))
        await home.until(lambda: all(one.num_asked for one in hostiles))
        tenant_id, _ = await listen(home, receiver.url)
        await tell(home, tenant_id, *range(10))
        await home.until(lambda: len(receiver.came) == 10, 25)
        silent = [one.num_asked for one in hostiles if one.kind == SILENT]
    assert silent == [2, 2], "their own places are all they hold"


async def test_40_tenants_with_hanging_receivers_delay_nobody_else(home, settings, monkeypatch):
    """They hold more deliveries than begin at once. A try may take 50 s here, so nobody waits for one of theirs."""
    monkeypatch.setattr(JobsSettings, "webhook_s", 50.0)
    async with hostile(SILENT) as hanging, receiving(Receiver()) as receiver:
        for _ in range(40):
            tenant_id, _ = await listen(home, hanging.url)
            await tell(home, tenant_id, *range(4))
        async with sending(settings, home):
            await home.until(lambda: hanging.num_asked >= 64)
            tenant_id, _ = await listen(home, receiver.url)
            await tell(home, tenant_id, *range(6))
            await home.until(lambda: len(receiver.came) == 6, stretched(8))
            assert hanging.num_asked <= 80, "two for each tenant"


async def test_a_tenants_own_receivers_that_hang_shut_out_none_of_the_operators(home, settings, monkeypatch):
    """Where as many hang as may, those that were slow begin no more: the operator's for these tenants were among them."""
    monkeypatch.setattr(JobsSettings, "webhook_s", 50.0)
    monkeypatch.setattr(places, "HELD_BY_SLOW", 4)
    post = Poster.post

    async def post_anywhere(self, *args, only_public):
        return await post(self, *args, only_public=False)

    monkeypatch.setattr(Poster, "post", post_anywhere)
    async with hostile(SILENT) as hanging, receiving(Receiver()) as receiver:
        heard_of = [(await listen(home, hanging.url))[0] for _ in range(3)]
        async with home.database.write() as conn:
            await conn.execute(update(Webhook).where(Webhook.tenant_id.in_(heard_of)).values(is_tenants=True))
        for tenant_id in heard_of:
            await tell(home, tenant_id, *range(4))
        async with sending(settings, home):
            await home.until(lambda: hanging.num_asked == 6)
            await asyncio.sleep(places.SLOW_S)
            await listen(home, receiver.url, heard_of[0])
            await tell(home, heard_of[0], *range(4, 10))
            await home.until(lambda: len(receiver.came) == 6, stretched(8))


async def test_a_forbidden_place_is_refused_at_the_try_and_tells_nothing(home, settings):
    async with receiving(Receiver()) as receiver:
        tenant_id, _ = await listen(home, receiver.url)
        await tell(home, tenant_id, "a")
        closed = settings.model_copy(update={"webhook_allowed_networks": ()})
        async with sending(closed, home):
            deadline = time.monotonic() + stretched(60)
            while (await rows(home, tenant_id))[0].last_error is None:
                assert time.monotonic() < deadline
                await asyncio.sleep(0.05)
        assert receiver.came == []
    assert (await rows(home, tenant_id))[0].last_error == "refused"


@pytest.fixture
def sending_jobs(stopped_jobs):
    """The whole process, as `headgate up` starts it."""
    if stopped_jobs.process is None or stopped_jobs.process.poll() is not None:
        stopped_jobs.env["HEADGATE_WEBHOOK_ALLOWED_NETWORKS"] = LOOPBACK
        stopped_jobs.env["HEADGATE_TEST_TIME_SCALE"] = "0.2"  # 1 s for a try: a busy machine finds no name in much less
        stopped_jobs.env["PYTHONUNBUFFERED"] = "1"
        stopped_jobs.start()
    return stopped_jobs


async def test_the_jobs_process_sends(home, sending_jobs):
    async with receiving(Receiver()) as receiver:
        tenant_id, made = await listen(home, receiver.url)
        await tell(home, tenant_id, "a")
        await home.until(lambda: receiver.came, 30)
        Verifier(made.secret).check(*receiver.came[0])
        await asyncio.sleep(0.3)
    assert made.secret not in sending_jobs.log()


async def test_o6_a_host_without_an_address_is_one_line_of_json_and_no_traceback(home, sending_jobs):
    """However many events wait for it, and however often they are tried."""
    tenant_id, made = await listen(home, "https://nobody.headgate.invalid/hook")
    await tell(home, tenant_id, *range(8))

    async def tried() -> bool:
        return sum(row.attempts for row in await rows(home, tenant_id)) >= 16

    deadline = time.monotonic() + stretched(60)
    while not await tried():
        assert time.monotonic() < deadline, sending_jobs.log()
        await asyncio.sleep(0.2)
    sending_jobs.stop()
    lines = sending_jobs.log().splitlines()
    assert [line for line in lines if not line.startswith("{")] == []
    entries = [json.loads(line) for line in lines]
    failed = [e for e in entries if e["event"] == "webhook_failed"]
    told = [e for e in failed if e["webhook"] == made.info.id]  # not those of other tests
    assert [e["error"] for e in told] == ["no connection"]
    assert "never retrieved" not in sending_jobs.log()
    assert "Traceback" not in sending_jobs.log()
