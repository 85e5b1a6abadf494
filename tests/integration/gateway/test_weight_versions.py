"""Two versions of a model's weights linked at once, as in a rollout: the books name the version that answered."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from byte_model import tokenizer_spec
from fakes import ScriptedRunner, ScriptedWorker
from gateways import MODEL, RunningGateway, running_gateway

from gateway.generation.served.models import fingerprint
from gateway.generation.stream import GENERATION
from gateway.journal import journal_records
from gateway.journal.journal import Journal
from gateway.journal.reader import Reader
from gateway.metering.metering import METERING
from workers.process.vocabulary_digest import vocabulary_digest
from workers.protocol.journal import Kind

ROOTS = ("scripted@1", "scripted@2")


@pytest.fixture
async def rollout(tmp_path: Path, redis_url: str) -> AsyncIterator[RunningGateway]:
    async with AsyncExitStack() as stack:
        gateway = await stack.enter_async_context(running_gateway(tmp_path / "home", redis_url))
        for slot, root in enumerate(ROOTS):
            path = tmp_path / f"w{slot}"
            worker = ScriptedWorker(
                path.with_suffix(".sock"),
                redis_url=redis_url,
                slot=slot,
                journal_dir=path,
                runner=ScriptedRunner(root=root),
            )
            await stack.enter_async_context(worker)
        await gateway.workers(2)
        yield gateway


async def test_what_the_books_say_ran_is_what_ran(rollout: RunningGateway) -> None:
    """Prompts of one request go to both versions. The worker's own record is the witness."""
    told: dict[str, str] = {}

    async def ask(number: int) -> None:
        prompts = [f"{number}/{n} are short" for n in range(4)]
        async with rollout.client() as client:
            answer = await client.completions.create(model=MODEL, prompt=prompts, max_tokens=3)
        told[answer.model_extra["headgate"]["request_id"]] = answer.system_fingerprint

    await asyncio.gather(*(ask(number) for number in range(8)))
    await rollout.balanced()
    rows = await rollout.sql(
        "SELECT e.request_id, e.root, r.root FROM ledger_entry e JOIN engine_record r ON r.request_id = e.request_id "
        "WHERE e.kind = 'settle'"
    )
    assert len(rows) == 32
    assert {ran for _, _, ran in rows} == set(ROOTS), "both versions answered"
    assert [(name, said) for name, said, _ in rows] == [(name, ran) for name, _, ran in rows]
    ran = {name: root for name, _, root in rows}
    records = Reader(rollout.app[METERING].journal.directory, rollout.first_seq).read(1 << 60, 1000)
    opened = [journal_records.opened(record.payload) for record in records if record.kind == Kind.OPEN]
    assert {one.request_id: one.root for one in opened} == ran
    assert told == {name: fingerprint(ran[name]) for name in told}
    assert len(told) == 8


async def test_weights_with_another_tokenizer_get_no_prompt_of_this_one(tmp_path: Path, redis_url: str) -> None:
    """As in a rollout whose gateways have not read the new directory yet: its ids mean other tokens."""
    ours = vocabulary_digest(tokenizer_spec())
    async with AsyncExitStack() as stack:
        gateway = await stack.enter_async_context(running_gateway(tmp_path / "home", redis_url))

        def worker(slot: int, vocabulary: str) -> ScriptedWorker:
            path, runner = tmp_path / f"w{slot}.sock", ScriptedRunner(root=f"scripted@{slot}", vocabulary=vocabulary)
            return ScriptedWorker(path, redis_url=redis_url, slot=slot, runner=runner)

        await stack.enter_async_context(worker(1, "of others"))
        async with worker(0, ours), gateway.client() as client:
            await gateway.workers(2)
            for number in range(8):
                answer = await client.completions.create(model=MODEL, prompt=f"prompt {number}", max_tokens=2)
                assert answer.system_fingerprint == fingerprint("scripted@0")
        await gateway.workers(1)
        body = {"model": MODEL, "prompt": "hello", "max_tokens": 3}
        async with gateway.session() as session, session.post("/v1/completions", json=body) as answer:
            assert answer.status == 503
            error = (await answer.json())["error"]
        assert (error["code"], "another tokenizer" in error["message"]) == ("no_worker", True)


async def test_a_worker_that_is_lost_after_its_choice_is_not_replaced_by_other_weights(
    gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OPEN names its weights already. The request fails free of charge, and clients repeat it."""
    gateway.app[GENERATION].capacity.resume_s = 0.3
    write = Journal.open
    [link] = gateway.app[GENERATION].fleet.links

    async def lose(self: Journal, opened: object) -> None:
        await write(self, opened)
        link.hello = None

    monkeypatch.setattr(Journal, "open", lose)
    body = {"model": MODEL, "prompt": "hello", "max_tokens": 3}
    async with gateway.session() as session, session.post("/v1/completions", json=body) as answer:
        assert answer.status == 503
        assert (await answer.json())["error"]["code"] == "upstream_lost"
    await gateway.settled()
    rows = await gateway.sql("SELECT kind, outcome, root, charge FROM ledger_entry")
    assert [tuple(row) for row in rows] == [("void", "worker_lost", ROOTS[0], 0)]
    assert gateway.app[METERING].limiter.num_held == 0


async def test_prompts_that_find_no_worker_give_back_what_was_reserved(
    gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker leaves while limits are asked. No prompt was opened, so the journal and the ledger know of none."""
    services, metered = gateway.app[GENERATION], gateway.app[METERING]
    [link] = services.fleet.links
    reserve = services.admission.reserve

    async def leaving(ask: object) -> object:
        reserved = await reserve(ask)
        link.hello = None
        return reserved

    monkeypatch.setattr(services.admission, "reserve", leaving)
    body = {"model": MODEL, "prompt": ["hello", "there"], "max_tokens": 3}
    async with gateway.session() as session, session.post("/v1/completions", json=body) as answer:
        assert answer.status == 503
        assert (await answer.json())["error"]["code"] == "no_worker"
    await metered.admission.drain()
    assert metered.limiter.num_held == 0
    records = Reader(metered.journal.directory, gateway.first_seq).read(1 << 60, 1000)
    assert not [record for record in records if record.kind in (Kind.OPEN, Kind.VOID, Kind.SETTLE)]
