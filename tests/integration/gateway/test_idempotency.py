"""A tenant's Idempotency-Key: one run, one charge, one answer, whatever becomes of the client."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from fakes import ScriptedWorker
from gateways import MODEL, PEPPER, RunningGateway, running_gateway, until
from sqlalchemy import text
from sqlalchemy.exc import OperationalError

from accounting.access import api_keys
from accounting.limits import budgets
from accounting.limits.budgets import NewBudget
from accounting.requests import idempotency_store as replies
from gateway.base.app_keys import DATABASE, LIFECYCLE
from gateway.base.lifecycle import Detached
from gateway.base.running import Places
from gateway.books.limiter_truth import limiter_equals_books
from gateway.generation.served.models import MODELS
from gateway.idempotency import idempotency
from gateway.idempotency.claimed_key import ClaimedKey
from gateway.idempotency.idempotency import KEYED
from gateway.idempotency.waits import REPEAT_WAITS
from gateway.metering.metering import METERING

CHAT = "/v1/chat/completions"
Answer = tuple[int, bytes, Mapping[str, str]]


def chat(**more: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 20} | more


async def ask(
    gateway: RunningGateway, key: str = "mine", path: str = CHAT, api_key: str | None = None, **body: Any
) -> Answer:
    body = body or chat()
    async with (
        gateway.session(api_key) as session,
        session.post(path, json=body, headers={"idempotency-key": key}) as answer,
    ):
        return answer.status, await answer.read(), answer.headers.copy()


async def until_answered(gateway: RunningGateway, api_key: str) -> Answer:
    """As a client that repeats what may be repeated."""
    while (answer := await ask(gateway, api_key=api_key))[0] != 200:
        assert answer[0] in {409, 503}, answer
        await asyncio.sleep(0.05)
    return answer


async def code(gateway: RunningGateway, **options: Any) -> tuple[int, str]:
    status, body, _ = await ask(gateway, **options)
    return status, json.loads(body)["error"]["code"]


async def endings(gateway: RunningGateway) -> list[tuple[str, str]]:
    await gateway.settled()
    return await ledger_endings(gateway)


async def ledger_endings(gateway: RunningGateway) -> list[tuple[str, str]]:
    rows = await gateway.sql(
        "SELECT kind, outcome FROM ledger_entry WHERE kind IN ('settle', 'void') ORDER BY request_id"
    )
    return [(row.kind, row.outcome) for row in rows]


async def until_state(gateway: RunningGateway, *states: str) -> None:
    for _ in range(500):
        rows = await gateway.sql("SELECT state FROM idempotent_reply")
        if tuple(row.state for row in rows) == states:
            return
        await asyncio.sleep(0.01)
    raise AssertionError(rows)


@pytest.mark.parametrize(
    "body",
    [chat(), chat(stream=True, stream_options={"include_usage": True}, n=2), chat(stream=True)],
    ids=["body", "stream with usage", "stream"],
)
async def test_the_second_time_is_the_same_answer_free_of_charge(gateway: RunningGateway, body: dict[str, Any]) -> None:
    first = await ask(gateway, **body)
    assert first[0] == 200
    assert "idempotent-replayed" not in first[2]
    for _ in range(2):
        again = await ask(gateway, **body)
        assert again[:2] == first[:2]
        assert again[2]["idempotent-replayed"] == "true"
        assert again[2]["content-type"] == first[2]["content-type"]
        assert again[2]["x-request-id"] != first[2]["x-request-id"]
    assert await endings(gateway) == [("settle", "ok")]
    await gateway.balanced()


@pytest.mark.parametrize("stream", [False, True])
async def test_several_prompts_are_stored_and_paid_together(gateway: RunningGateway, stream: bool) -> None:
    body = {"model": MODEL, "prompt": ["one", "two", "three"], "max_tokens": 5, "stream": stream}
    first = await ask(gateway, path="/v1/completions", **body)
    assert first[0] == 200
    again = await ask(gateway, path="/v1/completions", **body)
    assert again[:2] == first[:2]
    assert await endings(gateway) == [("settle", "ok")] * 3
    assert len(await gateway.sql("SELECT 1 FROM idempotent_posting")) == 2
    await gateway.balanced()


async def test_another_body_or_path_under_the_same_key_is_a_mismatch(gateway: RunningGateway) -> None:
    await ask(gateway)
    assert await code(gateway, **chat(max_tokens=21)) == (422, "idempotency_mismatch")
    completion = {"model": MODEL, "prompt": "hello", "max_tokens": 20}
    assert await code(gateway, path="/v1/completions", **completion) == (422, "idempotency_mismatch")
    # The order of a body's members is no difference.
    assert (await ask(gateway, **dict(reversed(chat().items()))))[2]["idempotent-replayed"] == "true"


async def test_an_answer_is_not_replayed_to_a_key_that_may_not_use_its_model(gateway: RunningGateway) -> None:
    """Whether the model is still served or not."""
    assert (await ask(gateway))[0] == 200
    async with gateway.app[DATABASE].write() as conn:
        narrow = await api_keys.create(
            conn, PEPPER, tenant_id=gateway.keys.tenant_id, now=int(time.time()), models={"another"}
        )
    assert await code(gateway, api_key=narrow.value, **chat()) == (403, "model_not_allowed")
    gateway.app[MODELS].serve({})
    assert (await ask(gateway))[2]["idempotent-replayed"] == "true"
    assert await code(gateway, api_key=narrow.value, **chat()) == (403, "model_not_allowed")


async def test_attack_C15_two_tenants_may_use_the_same_key(gateway: RunningGateway) -> None:
    _, other = await gateway.new_tenant("other", {"chat"})
    first = await ask(gateway)
    second = await ask(gateway, api_key=other, **chat(max_tokens=3))
    assert "idempotent-replayed" not in second[2]
    assert first[1] != second[1]
    assert await endings(gateway) == [("settle", "ok")] * 2


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("key", ["", "x" * 256, "batch:batch_00:1", "ü"])
async def test_attack_D15_a_key_of_no_use_is_refused(shared_gateway: RunningGateway, key: str) -> None:
    assert (await ask(shared_gateway, key=key))[0] == 400
    assert await shared_gateway.sql("SELECT 1 FROM idempotent_reply") == []


async def test_two_keys_in_one_request_are_none(gateway: RunningGateway) -> None:
    headers = [("idempotency-key", "a"), ("idempotency-key", "b")]
    async with gateway.session() as session, session.post(CHAT, json=chat(), headers=headers) as answer:
        assert answer.status == 400


async def test_what_is_refused_or_fails_is_not_kept(gateway: RunningGateway, worker: ScriptedWorker) -> None:
    assert (await ask(gateway, **chat(max_tokens=-1)))[0] == 400
    worker.runner.fail_next = RuntimeError("broken")
    assert (await ask(gateway, **chat()))[0] >= 500
    worker.runner.fail_next = RuntimeError("broken")
    assert (await ask(gateway, **chat(stream=True)))[0] >= 500
    assert await gateway.sql("SELECT 1 FROM idempotent_reply") == []
    assert (await ask(gateway))[0] == 200
    assert await endings(gateway) == [("void", "internal")] * 2 + [("settle", "ok")]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_changes_nothing(
    gateway: RunningGateway, worker: ScriptedWorker, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    monkeypatch.setattr("gateway.idempotency.waits.MOST_S", 0.0)
    worker.runner.hang()
    body = chat(stream=stream, max_tokens=300)
    leaving = asyncio.create_task(ask(gateway, **body))
    await until_state(gateway, "running")
    status, _, headers = await ask(gateway, **body)
    assert (status, headers["retry-after"]) == (409, "1")
    leaving.cancel()
    await asyncio.wait([leaving])
    worker.runner.release()
    await until_state(gateway, "stored")
    status, answer, headers = await ask(gateway, **body)
    assert (status, headers["idempotent-replayed"]) == (200, "true")
    if stream:
        assert answer.endswith(b"data: [DONE]\n\n")
    assert await endings(gateway) == [("settle", "ok")]
    await gateway.balanced()
    assert not gateway.app[KEYED]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_repeat_waits_for_the_answer_of_the_request_that_runs(
    gateway: RunningGateway, worker: ScriptedWorker, stream: bool
) -> None:
    """An SDK was told 409 twice within seconds and gave up; the answer came later, and was charged."""
    worker.runner.hang()
    body = chat(stream=stream)
    first = asyncio.create_task(ask(gateway, **body))
    await until_state(gateway, "running")
    repeats = [asyncio.create_task(ask(gateway, **body)) for _ in range(2)]
    waits = gateway.app[REPEAT_WAITS]
    await until(lambda: waits.num == 2)
    assert await code(gateway, **chat(max_tokens=21)) == (422, "idempotency_mismatch")
    repeats.pop().cancel()
    await until(lambda: waits.num == 1)
    worker.runner.release()
    status, answer, headers = await repeats[0]
    assert (status, answer, headers["idempotent-replayed"]) == (200, (await first)[1], "true")
    assert waits.num == 0
    assert await endings(gateway) == [("settle", "ok")]


async def test_a_repeat_runs_where_the_request_before_it_fails(gateway: RunningGateway, worker: ScriptedWorker) -> None:
    worker.runner.hang()
    first = asyncio.create_task(ask(gateway))
    await until_state(gateway, "running")
    repeat = asyncio.create_task(ask(gateway))
    await until(lambda: gateway.app[REPEAT_WAITS].num == 1)
    worker.runner.fail_next = RuntimeError("a fault of the model")
    worker.runner.release()
    assert (await first)[0] >= 500
    status, _, headers = await repeat
    assert (status, "idempotent-replayed" in headers) == (200, False)
    assert ("settle", "ok") in await endings(gateway)


def test_no_tenant_may_wait_more_often_than_there_is_room_for_others() -> None:
    waits = Places(most=8)
    with ExitStack() as stack:
        found = [stack.enter_context(waits.place("a")) for _ in range(6)]
        assert found == [True] * 4 + [False] * 2
        assert [stack.enter_context(waits.place("b")) for _ in range(3)] == [True, True, False]
        assert waits.num == 6
    assert waits.num == 0


async def test_a_client_that_leaves_in_mid_stream_finds_the_whole_stream_later(
    tmp_path: Path, redis_url: str, bare_gateway: RunningGateway
) -> None:
    async with ScriptedWorker(tmp_path / "w0.sock", redis_url=redis_url, tokens_per_s=100, journal_dir=tmp_path / "w0"):
        await bare_gateway.workers(1)
        body = chat(stream=True, max_tokens=60, ignore_eos=True)
        async with bare_gateway.session() as session:
            answer = await session.post(CHAT, json=body, headers={"idempotency-key": "mine"})
            seen = await answer.content.readuntil(b"\n\n")
            seen += await answer.content.readuntil(b"\n\n")
            answer.close()
        await until_state(bare_gateway, "stored")
        status, whole, _ = await ask(bare_gateway, **body)
        assert status == 200
        assert whole.startswith(seen)
        assert whole.endswith(b"data: [DONE]\n\n")
        assert await endings(bare_gateway) == [("settle", "ok")]


async def test_stored_answers_are_encrypted(gateway: RunningGateway) -> None:
    body = chat(metadata={"mark": "find-me-if-you-can"})
    assert b"find-me-if-you-can" in (await ask(gateway, **body))[1]
    (row,) = await gateway.sql("SELECT body, posting FROM idempotent_reply")
    assert b"find-me" not in row.body
    assert b"find-me" not in row.posting


@pytest.mark.parametrize(("name", "limit", "what"), [("MAX_KEYS", 2, "keys"), ("MAX_BYTES", 70_000, "bytes")])
async def test_attack_D15_beyond_the_bound_a_new_key_is_refused_and_no_answer_is_lost(
    gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch, name: str, limit: int, what: str
) -> None:
    monkeypatch.setattr(replies, name, limit)
    long = chat(metadata={"filler": "x" * 500})
    answers = {}
    for number in range(20):
        status, body, headers = await ask(gateway, key=f"k{number}", **long)
        if status == 429:
            break
        if status == 200:  # a slow machine may be told 503 by the limiter
            answers[f"k{number}"] = body
    assert status == 429
    assert b"idempotency_limit_exceeded" in body
    assert headers["x-should-retry"] == "false"
    assert int(headers["retry-after"]) > 80_000
    assert f"idempotency_{what}".encode() in body
    for key, answer in answers.items():
        assert (await ask(gateway, key=key, **long))[1] == answer
    # The bound is the tenant's own.
    _, other = await gateway.new_tenant("other", {"chat"})
    assert (await ask(gateway, api_key=other))[0] == 200


async def test_after_its_time_a_key_may_run_again_and_the_sweep_forgets_it(gateway: RunningGateway) -> None:
    await ask(gateway)
    await ask(gateway, key="other")
    async with gateway.app[DATABASE].write() as conn:
        await conn.execute(text("UPDATE idempotent_reply SET expires_at = 1"))
    assert "idempotent-replayed" not in (await ask(gateway))[2]
    await idempotency.sweep(gateway.app[DATABASE], 0, gateway.app[KEYED])
    assert [row.key for row in await gateway.sql("SELECT key FROM idempotent_reply")] == ["mine"]


async def test_without_sql_only_requests_with_a_key_are_refused(
    gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (await ask(gateway))[0] == 200

    def away(*_: object, **__: object) -> Any:
        raise OperationalError("away", None, Exception())

    monkeypatch.setattr(gateway.app[DATABASE], "write", away)
    assert await code(gateway) == (503, "database_unavailable")
    async with gateway.session() as session, session.post(CHAT, json=chat()) as answer:
        assert answer.status == 200


async def test_an_answer_that_cannot_be_stored_is_not_given_and_not_charged(
    gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The row was taken away: nothing can be replayed, so nothing is owed."""

    async def closed(*_: object, **__: object) -> bool:
        return False

    monkeypatch.setattr(replies, "store", closed)
    for body in (chat(), chat(stream=True)):
        status, answer, _ = await ask(gateway, **body)
        assert status == 500 or b'"error"' in answer
        assert b"[DONE]" not in answer
    assert await endings(gateway) == [("void", "internal")] * 2
    assert await gateway.sql("SELECT 1 FROM idempotent_reply") == []


async def test_a_key_whose_drop_did_not_reach_sql_is_dropped_by_the_sweep(
    gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gateway.idempotency import idempotency

    async def fail(self: ClaimedKey) -> None:
        raise OSError

    monkeypatch.setattr(ClaimedKey, "drop", fail)
    monkeypatch.setattr("gateway.idempotency.waits.MOST_S", 0.0)
    assert (await ask(gateway, **chat(max_tokens=-1)))[0] == 400
    assert await code(gateway, **chat(max_tokens=-1)) == (409, "idempotency_in_progress")
    await idempotency.sweep(gateway.app[DATABASE], 0, gateway.app[KEYED])
    assert await code(gateway, **chat(max_tokens=-1)) == (409, "idempotency_in_progress"), "young"
    async with gateway.app[DATABASE].write() as conn:
        await conn.execute(text("UPDATE idempotent_reply SET created_at = 1"))
    await idempotency.sweep(gateway.app[DATABASE], 0, gateway.app[KEYED])
    assert await code(gateway, **chat(max_tokens=-1)) != (409, "idempotency_in_progress")


async def test_one_of_many_at_once_runs_on_two_gateways_and_either_database(
    tmp_path: Path, redis_url: str, database_url: str
) -> None:
    home = tmp_path / "home"
    async with (
        ScriptedWorker(tmp_path / "w0.sock", redis_url=redis_url, journal_dir=tmp_path / "w0"),
        running_gateway(home, redis_url, database_url) as one,
        running_gateway(home, redis_url, database_url, slot=1) as two,
    ):
        await one.workers(1)
        await two.workers(1)
        api_key = one.keys.api_key
        answers = await asyncio.gather(*(until_answered(gateway, api_key) for _ in range(8) for gateway in (one, two)))
        assert sum("idempotent-replayed" not in headers for _, _, headers in answers) == 1
        bodies = {(await ask(gateway, api_key=api_key))[1] for gateway in (one, two)}
        assert len(bodies) == 1
        await until(lambda: not one.app[KEYED] and not two.app[KEYED])
        await one.settled()
        await two.settled()
        assert await endings(one) == [("settle", "ok")]
        await one.balanced()


@pytest.mark.parametrize("committed", [False, True], ids=["not stored", "stored, unknown"])
@pytest.mark.parametrize("stream", [False, True], ids=["body", "stream"])
async def test_when_sql_goes_as_the_answer_is_stored_it_is_paid_once_or_not_at_all(
    gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch, committed: bool, stream: bool
) -> None:
    """The client is told 503. As soon as SQL answers, the request ends as SQL says, and the budget hears the same."""
    real, body = ClaimedKey.store, chat(stream=stream)
    async with gateway.app[DATABASE].write() as conn:
        new = NewBudget(tenant_id=gateway.keys.tenant_id, limit_micro_units=10**9, period="month")
        await budgets.create(conn, new, now=1)

    async def failing(self: ClaimedKey, *args: Any) -> bool:
        if committed:
            await real(self, *args)
        raise OperationalError("away", None, Exception())

    with monkeypatch.context() as patched:
        patched.setattr(ClaimedKey, "store", failing)
        status, answer, _ = await ask(gateway, **body)
        assert b"database_unavailable" in answer
        assert status == (200 if stream else 503)
        assert b"[DONE]" not in answer
    expected = [("settle", "ok")] if committed else [("void", "internal")]
    for _ in range(200):
        if await endings(gateway) == expected:
            break
        await asyncio.sleep(0.05)
    assert await endings(gateway) == expected
    metered = gateway.app[METERING]
    journals = {0: metered.journal.directory}
    truth = await limiter_equals_books(gateway.app[DATABASE], metered.link, journals, drift_s=5)
    assert (truth.failures, truth.num_checked) == ((), 1)
    status, answer, headers = await ask(gateway, **body)
    assert (status, "idempotent-replayed" in headers) == (200, committed)
    assert await endings(gateway) == ([] if committed else expected) + [("settle", "ok")]
    await gateway.balanced()


@pytest.mark.parametrize("committed", [False, True], ids=["not stored", "stored, unknown"])
@pytest.mark.parametrize("is_drained", [False, True], ids=["sql is away", "drained while it stores"])
async def test_if_the_gateway_ends_before_sql_answers_the_next_start_ends_the_request(
    tmp_path: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch, committed: bool, is_drained: bool
) -> None:
    real, forever = ClaimedKey.store, asyncio.Event()

    async def failing(self: ClaimedKey, *args: Any) -> bool:
        if committed:
            await real(self, *args)
        if is_drained:
            await forever.wait()
        raise OperationalError("away", None, Exception())

    async def silent(self: ClaimedKey, _: object) -> Any:
        await forever.wait()

    home, body = tmp_path / "home", chat()
    join = Detached.join
    monkeypatch.setattr(Detached, "join", lambda self, _: join(self, 0.3))
    monkeypatch.setattr("gateway.base.lifecycle.UNINTERRUPTED_S", 1.0)
    async with ScriptedWorker(tmp_path / "w0.sock", redis_url=redis_url, journal_dir=tmp_path / "w0"):
        with monkeypatch.context() as patched:
            patched.setattr(ClaimedKey, "store", failing)
            patched.setattr(ClaimedKey, "decide", silent)
            async with running_gateway(home, redis_url) as gateway:
                monkeypatch.setattr(gateway.app[LIFECYCLE], "idle", lambda _: asyncio.sleep(0))
                await gateway.workers(1)
                asked = asyncio.create_task(ask(gateway, **body))
                if is_drained:
                    await until_state(gateway, "stored" if committed else "running")
                    await asyncio.sleep(0.2)
                else:
                    assert (await asked)[0] == 503
            await asyncio.gather(asked, return_exceptions=True)
        async with running_gateway(home, redis_url) as gateway:
            await gateway.workers(1)
            assert await endings(gateway) == [("settle", "ok") if committed else ("void", "gateway_crash")]
            _, _, headers = await ask(gateway, **body)
            assert ("idempotent-replayed" in headers) == committed
            await gateway.balanced()
