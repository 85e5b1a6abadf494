"""Responses in the background: queued, run, streamed again, cancelled, refused, and run anew after a lost gateway."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import pytest_asyncio
from fakes import ScriptedWorker
from gateways import MODEL, PEPPER, RunningGateway, running_gateway, until
from load import stretched
from openai.types.responses import Response
from redis_db import emptied
from sqlalchemy import text
from sqlalchemy.exc import DataError

from accounting.access import api_keys, principals
from accounting.access.credentials import run_credential
from accounting.lifecycle import tenant_status
from accounting.responses import runs
from accounting.values.tenant_types import KeyChanges
from accounting.values.types import Limits
from gateway.base.app_keys import DATABASE, DETACHED, RUNNING
from gateway.intake.intake import INTAKE
from gateway.telemetry.record import RequestRecord
from gateway.writers.responses import ResponseWriter
from workers.jobs.base.settings import JobsSettings
from workers.jobs.responses.restarts import Restarts
from workers.process.logs import HANDLED

pytestmark = pytest.mark.asyncio(loop_scope="module")
ENDED = ("completed", "incomplete", "failed", "cancelled")


@pytest.fixture(autouse=True, scope="module")
def events_are_stored_and_found_soon() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gateway.responses.background.FLUSH_S", 0.1)
        patch.setattr("gateway.routes.background_responses.POLL_S", 0.02)
        patch.setattr("gateway.routes.background_responses.MAX_POLL_S", 0.1)
        yield


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def slow_gateway(redis_socket: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RunningGateway]:
    """With a worker that writes forty tokens in a second."""
    directory = tmp_path_factory.mktemp("gateway")
    redis_url = emptied(redis_socket, 3)
    async with (
        running_gateway(directory / "home", redis_url) as gateway,
        ScriptedWorker(directory / "w0.sock", redis_url=redis_url, tokens_per_s=40, journal_dir=directory / "w0"),
    ):
        await gateway.workers(1)
        yield gateway


async def ended(client: openai.AsyncOpenAI, response: Response) -> Response:
    while response.status not in ENDED:
        await asyncio.sleep(0.05)
        response = await client.responses.retrieve(response.id)
    return response


async def test_it_is_queued_then_done_and_paid(slow_gateway: RunningGateway) -> None:
    async with slow_gateway.client() as client:
        asked: dict[str, Any] = {"model": MODEL, "input": "hello", "max_output_tokens": 8, "temperature": 0}
        made = await client.responses.create(**asked, background=True)
        assert (made.status, made.output, made.usage, made.background) == ("queued", [], None, True)
        done = await ended(client, made)
        plain = await client.responses.create(**asked)
        assert (done.status, done.output_text) == ("incomplete", plain.output_text)
        again = await client.responses.create(
            model=MODEL, input="on", previous_response_id=done.id, max_output_tokens=1
        )
        assert again.previous_response_id == done.id
    await slow_gateway.settled()
    rows = await slow_gateway.sql(
        "SELECT output FROM ledger_entry WHERE request_id = :r", r=done.model_extra["headgate"]["request_id"]
    )
    assert [row.output for row in rows] == [8]
    await slow_gateway.balanced()


async def test_its_stream_is_resumed_behind_any_event(slow_gateway: RunningGateway) -> None:
    async with slow_gateway.client() as client:
        stream = await client.responses.create(
            model=MODEL, input="hello", max_output_tokens=30, background=True, stream=True
        )
        events = []
        async for event in stream:
            events.append(event)
            if event.type == "response.output_text.delta":
                break
        await stream.close()
        assert [event.type for event in events[:3]] == ["response.created", "response.queued", "response.in_progress"]
        response_id, last = events[0].response.id, events[-1].sequence_number
        resumed = await client.responses.retrieve(response_id, stream=True, starting_after=last)
        events += [event async for event in resumed]
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert events[-1].type == "response.incomplete"
        whole = [event async for event in await client.responses.retrieve(response_id, stream=True)]
        assert [event.to_dict() for event in whole] == [event.to_dict() for event in events]
        found = await client.responses.retrieve(response_id)
    deltas = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert deltas == found.output_text == events[-1].response.output_text
    assert found.to_dict() == events[-1].response.to_dict()


async def with_text(client: openai.AsyncOpenAI) -> tuple[Any, Any]:
    """A run in the background that has begun its text, and its stream."""
    made = await client.responses.create(model=MODEL, input="hello", max_output_tokens=1500, background=True)
    stream = await client.responses.retrieve(made.id, stream=True)
    async for event in stream:
        if event.type == "response.output_text.delta":
            break
    return made, stream


async def test_a_cancelled_run_ends_and_bills_what_it_computed(slow_gateway: RunningGateway) -> None:
    async with slow_gateway.client() as client:
        made, stream = await with_text(client)
        cancelled = await client.responses.cancel(made.id)
        assert cancelled.status == "cancelled"
        assert cancelled.usage is not None
        assert 0 < cancelled.usage.output_tokens < 400
        assert cancelled.output_text
        rest = [event.type async for event in stream]
        assert rest[-1] == "response.cancelled"
        assert (await client.responses.cancel(made.id)).to_dict() == cancelled.to_dict()
        plain = await client.responses.create(model=MODEL, input="hello", max_output_tokens=1)
        with pytest.raises(openai.BadRequestError):
            await client.responses.cancel(plain.id)
    await slow_gateway.settled()
    rows = await slow_gateway.sql("SELECT kind, output FROM ledger_entry WHERE output > 0 ORDER BY request_id DESC")
    assert ("settle", cancelled.usage.output_tokens) in [tuple(row) for row in rows]
    await slow_gateway.balanced()


async def test_a_deleted_response_stops(slow_gateway: RunningGateway) -> None:
    async with slow_gateway.client() as client:
        made = await client.responses.create(model=MODEL, input="hello", max_output_tokens=1500, background=True)
        await client.responses.delete(made.id)
        await slow_gateway.app[DETACHED].join(10)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(made.id)
    assert await slow_gateway.sql("SELECT * FROM response_events WHERE response_id = :r", r=made.id) == []
    await slow_gateway.balanced()


async def test_a_response_that_is_deleted_before_its_end_is_stored_is_paid_for(
    slow_gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its run ends before it hears of the deletion. Otherwise short responses, whose events are read meanwhile, would be
    free."""
    monkeypatch.setattr("gateway.responses.background.FLUSH_S", 5.0)
    _, key = await slow_gateway.new_tenant("deletes", ("chat",))
    async with slow_gateway.client(key) as client:
        made = await client.responses.create(model=MODEL, input="hello", max_output_tokens=12, background=True)
        while (await client.responses.retrieve(made.id)).status == "queued":  # noqa: ASYNC110 - the state is the server's
            await asyncio.sleep(0.01)
        await client.responses.delete(made.id)
        await slow_gateway.app[DETACHED].join(10)
    await slow_gateway.settled()
    charged = "SELECT sum(output) FROM ledger_entry WHERE kind = 'settle' AND tenant_id = "
    charged += "(SELECT id FROM tenant WHERE name = 'deletes')"
    assert (await slow_gateway.sql(charged))[0][0] > 0
    await slow_gateway.balanced()


async def test_a_stream_of_a_response_that_is_deleted_ends_with_a_sentence(slow_gateway: RunningGateway) -> None:
    async with slow_gateway.client() as client:
        made, stream = await with_text(client)
        await client.responses.delete(made.id)
        last = [event async for event in stream][-1]
        assert last.type == "error"
        assert "was deleted" in last.message
        await slow_gateway.app[DETACHED].join(10)


async def test_a_stream_whose_events_cannot_be_read_ends_with_a_sentence(
    slow_gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without SQL a whole HTTP answer, head and all, stood in the middle of the stream. Before its first event the answer
    is a 503."""
    events_after = runs.events_after

    async def away(*_: object) -> None:
        raise OSError("the database is away")

    async with slow_gateway.client() as client:
        made, stream = await with_text(client)
        monkeypatch.setattr(runs, "events_after", away)
        last = [event async for event in stream][-1]
        assert (last.type, last.code) == ("error", "database_unavailable")
        with pytest.raises(openai.InternalServerError) as found:
            await client.responses.retrieve(made.id, stream=True)
        assert found.value.status_code == 503
        monkeypatch.setattr(runs, "events_after", events_after)
        await client.responses.delete(made.id)
        await slow_gateway.app[DETACHED].join(10)


async def test_faults_are_told_at_once(slow_gateway: RunningGateway) -> None:
    async with slow_gateway.client() as client:
        for body in ({"temperature": 3}, {"store": False}):
            with pytest.raises(openai.BadRequestError):
                await client.responses.create(model=MODEL, input="x", background=True, **body)
        with pytest.raises(openai.BadRequestError) as found:
            await client.responses.create(
                model=MODEL, input="x", background=True, extra_headers={"Idempotency-Key": "k"}
            )
        assert found.value.param == "background"


async def test_a_tenant_has_so_many_at_once(slow_gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "MAX_RUNNING", 1)
    _, key = await slow_gateway.new_tenant("busy", ("chat",))
    async with slow_gateway.client(key) as client:
        made = await client.responses.create(model=MODEL, input="hello", max_output_tokens=100, background=True)
        with pytest.raises(openai.RateLimitError):
            await client.responses.create(model=MODEL, input="hello", background=True)
        await client.responses.cancel(made.id)


async def test_a_run_that_was_lost_is_run_anew_when_it_is_asked_for(slow_gateway: RunningGateway) -> None:
    """What a gateway leaves that was killed: a row in progress, whose claim has ended, with some of its events."""
    async with slow_gateway.client() as client:
        first = await client.responses.create(model=MODEL, input="first", max_output_tokens=1)
        made = await client.responses.create(
            model=MODEL, input="hello", max_output_tokens=20, background=True, previous_response_id=first.id
        )
        await ended(client, made)
        async with slow_gateway.app[DATABASE].write() as conn:
            await conn.execute(text("UPDATE response SET state = 'in_progress' WHERE id = :r"), {"r": made.id})
        restarts = restarts_of(slow_gateway)
        assert await restarts.look() == 0, "its claim is still alive"
        async with slow_gateway.app[DATABASE].write() as conn:
            await conn.execute(text("UPDATE response SET claimed_until_ms = 0 WHERE id = :r"), {"r": made.id})
        assert await restarts.look() == 1
        assert await restarts.look() <= 1, "asking twice runs it once"
        done = await ended(client, made)
        assert done.status == "incomplete"
        async with client.responses.stream(response_id=made.id) as stream:
            events = [event async for event in stream]
    numbers = [event.sequence_number for event in events]
    assert numbers[2] > 2 and numbers == [0, 1, *range(numbers[2], numbers[2] + len(events) - 2)]
    assert [event.type for event in events].count("response.created") == 2
    assert [event.type for event in events].count("response.output_item.added") == 1, "of the run that ended"
    assert events[-1].response.output_text == done.output_text
    async with slow_gateway.app[DATABASE].read() as conn:
        assert await principals.of_run(conn, made.id, 0) is None, "the credential has ended with the response"
    await until(lambda: slow_gateway.app[INTAKE].num_held == 0)
    await slow_gateway.balanced()


async def left_behind(gateway: RunningGateway, client: openai.AsyncOpenAI, **columns: Any) -> Response:
    """A response as a gateway leaves it that was killed: its run has no end, and its claim has ended."""
    made = await client.responses.create(model=MODEL, input="hello", max_output_tokens=1, background=True)
    await ended(client, made)
    values = {"state": "in_progress", "claimed_until_ms": 0} | columns
    named = ", ".join(f"{name} = :{name}" for name in values)
    async with gateway.app[DATABASE].write() as conn:
        await conn.execute(text(f"UPDATE response SET {named} WHERE id = :r"), values | {"r": made.id})
    return made


def restarts_of(gateway: RunningGateway, url: str | None = None) -> Restarts:
    settings = JobsSettings(home=gateway.settings.home, url=url or gateway.url, broker_url="memory://")
    return Restarts(settings, gateway.app[DATABASE])


async def forbid(gateway: RunningGateway, tenant_id: str, how: str) -> None:
    """Takes away what lets the tenant's key run something. What runs already goes on."""
    now = int(time.time())
    async with gateway.app[DATABASE].write() as conn:
        [key] = (await api_keys.list_keys(conn, tenant_id)).items
        if how == "revoked":
            await api_keys.revoke(conn, tenant_id, key.id, now=now)
        elif how == "suspended":
            await tenant_status.suspend(conn, tenant_id, True, now=now)
        elif how == "archived":
            await tenant_status.archive(conn, tenant_id, now=now)
        else:
            changes = KeyChanges(disabled=True) if how == "disabled" else KeyChanges(scopes=("usage:read",))
            await api_keys.change(conn, tenant_id, key.id, changes, now=now)


@pytest.mark.parametrize("how", ["revoked", "disabled", "without chat", "suspended", "archived"])
async def test_a_lost_response_that_may_not_run_any_more_ends_failed(slow_gateway: RunningGateway, how: str) -> None:
    """A gateway refused to run it, so it was asked for at each look, for 30 days, and took the places of others."""
    tenant_id, key = await slow_gateway.new_tenant("ended", ("chat",))
    async with slow_gateway.client(key) as client:
        made = await left_behind(slow_gateway, client)
    await slow_gateway.settled()
    before = await slow_gateway.sql("SELECT count(*) AS number FROM ledger_entry WHERE tenant_id = :t", t=tenant_id)
    await forbid(slow_gateway, tenant_id, how)
    restarts = restarts_of(slow_gateway)
    assert await restarts.look() == 1
    await slow_gateway.app[DETACHED].join(10)
    rows = await slow_gateway.sql("SELECT state, fence FROM response WHERE id = :r", r=made.id)
    assert [(row.state, row.fence) for row in rows] == [("failed", 2)]
    assert await restarts.look() == 0
    await slow_gateway.settled()
    after = await slow_gateway.sql("SELECT count(*) AS number FROM ledger_entry WHERE tenant_id = :t", t=tenant_id)
    assert after == before
    await slow_gateway.balanced()


@pytest.mark.parametrize("how", ["without chat", "suspended"])
async def test_a_response_that_waits_while_its_tenant_loses_the_right_to_it_fails(
    slow_gateway: RunningGateway, how: str
) -> None:
    """Those of a suspended tenant ran on, for an hour, and were charged."""
    tenant_id, key = await slow_gateway.new_tenant("waits", ("chat",), limits=Limits(concurrency=1))
    async with slow_gateway.client(key) as client:
        for _ in range(2):
            await client.responses.create(model=MODEL, input="hello", max_output_tokens=30, background=True)
    refused = "SELECT id FROM response WHERE tenant_id = :t AND state = 'queued' AND fence = 1"
    async with asyncio.timeout(stretched(10)):
        while not await slow_gateway.sql(refused, t=tenant_id):  # noqa: ASYNC110 - the state is the server's
            await asyncio.sleep(0.02)
    await forbid(slow_gateway, tenant_id, how)
    await slow_gateway.app[DETACHED].join(15)
    rows = await slow_gateway.sql("SELECT state FROM response WHERE tenant_id = :t", t=tenant_id)
    assert sorted(row.state for row in rows) == ["failed", "incomplete"]
    await slow_gateway.balanced()


async def test_a_response_that_no_gateway_takes_holds_up_no_other(
    slow_gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A hundred of them were asked for at each look, and nothing else was."""
    async with slow_gateway.client() as client:
        older, newer = [await left_behind(slow_gateway, client) for _ in range(2)]
        with monkeypatch.context() as patch:
            patch.setattr("workers.jobs.responses.restarts.ASKED_AT_ONCE", 1)
            restarts = restarts_of(slow_gateway, url="http://127.0.0.1:1")
            assert [await restarts.look() for _ in range(4)] == [1, 1, 0, 1]
        asked = [vars(record)["response"] for record in caplog.records if record.message == "response_not_restarted"]
        assert asked == [older.id, newer.id, older.id]
        assert await restarts_of(slow_gateway).look() == 2
        for made in (older, newer):
            assert (await ended(client, made)).status == "incomplete"


async def test_the_credential_of_a_run_does_nothing_else(slow_gateway: RunningGateway) -> None:
    async with slow_gateway.client() as client:
        made = await left_behind(slow_gateway, client)
        path = f"/v1/responses/{made.id}"
        async with slow_gateway.session(run_credential(PEPPER, made.id)) as session:
            for method, where in (("GET", path), ("POST", f"{path}/cancel"), ("POST", "/v1/chat/completions")):
                async with session.request(method, where, json={}) as answer:
                    assert answer.status == 403, where
            async with session.post(f"{path}/run", json={}) as answer:
                assert answer.status == 202
        async with slow_gateway.session() as session, session.post(f"{path}/run", json={}) as answer:
            assert answer.status == 403, "a key of the tenant is no jobs process"
        await ended(client, made)


async def test_a_cancelled_run_whose_end_was_not_written_is_not_run_again(slow_gateway: RunningGateway) -> None:
    """Its gateway went before it wrote the end, and the next one computed it anew, for a second charge."""
    tenant_id, key = await slow_gateway.new_tenant("cancelled", ("chat",))
    count = "SELECT count(*) AS number FROM ledger_entry WHERE tenant_id = :t"
    async with slow_gateway.client(key) as client:
        made = await left_behind(slow_gateway, client, is_stopping=True)
        await slow_gateway.settled()
        before = await slow_gateway.sql(count, t=tenant_id)
        assert await restarts_of(slow_gateway).look() == 1
        assert (await ended(client, made)).status == "cancelled"
        events = [event async for event in await client.responses.retrieve(made.id, stream=True)]
    assert events[-1].type == "response.cancelled"
    assert [event.type for event in events].count("response.output_item.added") == 0
    await slow_gateway.app[DETACHED].join(10)
    await slow_gateway.settled()
    assert await slow_gateway.sql(count, t=tenant_id) == before
    await slow_gateway.balanced()


async def test_a_stream_ends_with_its_key(slow_gateway: RunningGateway) -> None:
    """It read on as long as the response ran, which another key had asked for."""
    tenant_id, key = await slow_gateway.new_tenant("reads", ("chat",))
    now = int(time.time())
    async with slow_gateway.app[DATABASE].write() as conn:
        reader = await api_keys.create(conn, PEPPER, tenant_id=tenant_id, now=now, scopes=["chat"])
    async with slow_gateway.client(key) as client, slow_gateway.client(reader.value) as other:
        made = await client.responses.create(model=MODEL, input="hello", max_output_tokens=1500, background=True)
        stream = await other.responses.retrieve(made.id, stream=True)
        async for event in stream:
            if event.type == "response.output_text.delta":
                break
        async with slow_gateway.app[DATABASE].write() as conn:
            await api_keys.revoke(conn, tenant_id, reader.info.id, now=now, end_streams=True)
        async with asyncio.timeout(stretched(5)):
            last = [event async for event in stream][-1]
        assert (last.type, last.code) == ("error", "invalid_api_key")
        assert (await client.responses.retrieve(made.id)).status == "in_progress"
        await client.responses.cancel(made.id)
    assert reader.info.id not in slow_gateway.app[RUNNING].key_ids


async def test_a_run_that_lost_its_claim_is_free(slow_gateway: RunningGateway) -> None:
    """Another gateway took the response over while this one stood still: it alone is charged."""
    _, key = await slow_gateway.new_tenant("taken over", ("chat",))
    async with slow_gateway.client(key) as client:
        made = await client.responses.create(model=MODEL, input="hello", max_output_tokens=1500, background=True)
        async for event in await client.responses.retrieve(made.id, stream=True):
            if event.type == "response.output_text.delta":
                break
        async with slow_gateway.app[DATABASE].write() as conn:
            await conn.execute(text("UPDATE response SET fence = fence + 1 WHERE id = :r"), {"r": made.id})
        await slow_gateway.app[DETACHED].join(10)
        await client.responses.delete(made.id)
    await slow_gateway.settled()
    charged = "SELECT sum(charge) AS charge FROM ledger_entry WHERE tenant_id = "
    rows = await slow_gateway.sql(charged + "(SELECT id FROM tenant WHERE name = 'taken over')")
    assert not rows[0].charge
    await slow_gateway.balanced()


async def test_a_run_with_a_fault_of_ours_ends_failed(
    slow_gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was run again for ever, whenever its claim had ended."""

    handled = list[object]()

    def broken(*_: object) -> None:
        handled.append(HANDLED.get())
        raise KeyError("a fault of ours")

    async with slow_gateway.client() as client:
        monkeypatch.setattr(ResponseWriter, "closing", broken)
        made = await client.responses.create(model=MODEL, input="hello", max_output_tokens=3, background=True)
        await slow_gateway.app[DETACHED].join(10)
        failed = await client.responses.retrieve(made.id)
    assert (failed.status, failed.error and failed.error.code) == ("failed", "server_error")
    assert [isinstance(one, RequestRecord) and one.background for one in handled] == ["run"], "its lines name the run"
    await slow_gateway.balanced()


@pytest.mark.parametrize("refused", ["events", "end", "output"])
async def test_a_run_of_which_sql_refuses_a_row_fails_once_and_is_free(
    slow_gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, refused: str
) -> None:
    """It was run again and again, whenever its claim had ended."""
    refusal = DataError("INSERT", {}, ValueError("this row is refused"))
    write, finish = runs.write, runs.finish

    async def refused_write(conn: Any, run: Any, packet: Any, *rest: Any) -> Any:
        if refused == "events" and packet is not None:
            raise refusal
        return await write(conn, run, packet, *rest)

    async def refused_finish(conn: Any, run: Any, state: str, body: bytes, packet: Any, *rest: Any) -> Any:
        if state != "failed" or (refused == "output" and len(body) > len(run.response.body) + 400):
            raise refusal
        return await finish(conn, run, state, body, packet, *rest)

    monkeypatch.setattr(runs, "write", refused_write)
    monkeypatch.setattr(runs, "finish", refused_finish)
    async with slow_gateway.client() as client:
        most = 1500 if refused == "events" else 60
        made = await client.responses.create(model=MODEL, input="hello", max_output_tokens=most, background=True)
        await slow_gateway.app[DETACHED].join(10)
        failed = await client.responses.retrieve(made.id)
        assert (failed.status, failed.error and failed.error.code) == ("failed", "server_error")
        events = [event async for event in await client.responses.retrieve(made.id, stream=True)]
    assert events[-1].type == "response.failed"
    rows = await slow_gateway.sql("SELECT state, fence FROM response WHERE id = :r", r=made.id)
    assert [(row.state, row.fence) for row in rows] == [("failed", 1)]
    assert "background_run_failed" in {record.message for record in caplog.records}
    await slow_gateway.settled()
    request_id = failed.model_extra["headgate"]["request_id"]
    rows = await slow_gateway.sql("SELECT charge FROM ledger_entry WHERE request_id = :r AND charge > 0", r=request_id)
    assert not rows
    await slow_gateway.balanced()


async def test_a_response_whose_key_has_ended_fails(slow_gateway: RunningGateway) -> None:
    tenant_id, key = await slow_gateway.new_tenant("leaving", ("chat",))
    async with slow_gateway.client(key) as client:
        made = await client.responses.create(model=MODEL, input="hello", max_output_tokens=1500, background=True)
    async with slow_gateway.session(slow_gateway.keys.admin_key) as session:
        async with session.get("/admin/v1/keys", params={"project_id": tenant_id}) as answer:
            key_id = (await answer.json())["data"][0]["id"]
        async with session.delete(f"/admin/v1/keys/{key_id}") as answer:
            assert answer.status == 200
    await slow_gateway.app[DETACHED].join(15)
    rows = await slow_gateway.sql("SELECT state FROM response WHERE id = :r", r=made.id)
    assert [row.state for row in rows] == ["failed"]


async def test_a_run_that_ends_with_its_key_says_what_was_charged(slow_gateway: RunningGateway) -> None:
    tenant_id, leaving = await slow_gateway.new_tenant("charged", ("chat",))
    async with slow_gateway.session(slow_gateway.keys.admin_key) as session:
        body = {"project_id": tenant_id, "name": "stays", "scopes": ["chat"]}
        async with session.post("/admin/v1/keys", json=body) as answer:
            stays = (await answer.json())["value"]
    async with slow_gateway.client(leaving) as client:
        made = await client.responses.create(model=MODEL, input="hello", max_output_tokens=1500, background=True)
        async for event in await client.responses.retrieve(made.id, stream=True):
            if event.type == "response.output_text.delta":
                break
    async with slow_gateway.session(slow_gateway.keys.admin_key) as session:
        async with session.get("/admin/v1/keys", params={"project_id": tenant_id}) as answer:
            key_id = next(one["id"] for one in (await answer.json())["data"] if one["name"] != "stays")
        async with session.delete(f"/admin/v1/keys/{key_id}") as answer:
            assert answer.status == 200
    async with slow_gateway.client(stays) as client:
        failed = await ended(client, made)
        events = [event async for event in await client.responses.retrieve(made.id, stream=True)]
    assert failed.status == "failed"
    assert failed.usage is not None
    assert failed.usage.output_tokens > 0
    told = failed.model_extra["headgate"]
    await slow_gateway.settled()
    (row,) = await slow_gateway.sql(
        "SELECT uncached + cache_write + cache_read AS input, output, charge, currency FROM ledger_entry "
        "WHERE request_id = :r AND kind = 'settle'",
        r=told["request_id"],
    )
    assert (row.input, row.output) == (failed.usage.input_tokens, failed.usage.output_tokens)
    assert told["charge_micro_units"] == row.charge > 0
    assert told["currency"] == row.currency
    assert events[-1].type == "response.failed"
    assert events[-1].response.usage == failed.usage
    await slow_gateway.balanced()
