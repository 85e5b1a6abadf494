"""Message Batches as the unmodified `anthropic` client meets them: the real gateway and the real jobs process."""

from __future__ import annotations

import asyncio
import json
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import anthropic
import pytest
from fakes import ScriptedWorker
from gateways import MODEL, PEPPER, RunningGateway, running_gateway
from load import stretched
from lost_replies import lose_the_reply_to_a_files_commit
from redis_db import emptied_broker
from sqlalchemy import text

from accounting.access import api_keys
from accounting.batches.file_store import Reader
from gateway.base.app_keys import DATABASE

pytestmark = pytest.mark.rest


@pytest.fixture
def broker_url(redis_socket: Path) -> str:
    return emptied_broker(redis_socket)


@pytest.fixture
async def gateway(tmp_path: Path, redis_url: str, broker_url: str) -> AsyncIterator[RunningGateway]:
    worker = ScriptedWorker(tmp_path / "w0.sock", redis_url=redis_url, journal_dir=tmp_path / "w0")
    async with worker, running_gateway(tmp_path / "home", redis_url, broker_url=broker_url) as gateway:
        await gateway.workers(1)
        yield gateway


@pytest.fixture
async def client(gateway: RunningGateway) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(base_url=gateway.url, api_key=gateway.keys.api_key, max_retries=0) as client:
        yield client


def request(number: int, **params: Any) -> Any:
    messages = [{"role": "user", "content": f"say {number}"}]
    return {"custom_id": f"line-{number}", "params": {"model": MODEL, "max_tokens": 4, "messages": messages} | params}


async def ended(client: anthropic.AsyncAnthropic, batch_id: str, limit_s: float = 120.0) -> Any:
    deadline = time.monotonic() + stretched(limit_s)
    while (batch := await client.messages.batches.retrieve(batch_id)).processing_status != "ended":
        assert time.monotonic() < deadline, batch
        await asyncio.sleep(0.1)
    return batch


async def test_a_batch_from_its_creation_to_its_deletion(
    gateway: RunningGateway, client: anthropic.AsyncAnthropic, jobs_process: subprocess.Popen[bytes]
) -> None:
    requests = [request(i) for i in range(20)]
    requests[3] = request(3, max_tokens=-1)
    requests[7] = request(7, messages=[{"role": "user", "content": [{"type": "image"}]}])
    made = await client.messages.batches.create(requests=requests)
    assert made.processing_status == "in_progress"
    assert made.request_counts.processing == 20
    with pytest.raises(anthropic.ConflictError):
        await client.messages.batches.delete(made.id)
    batch = await ended(client, made.id)
    counts = batch.request_counts
    assert (counts.succeeded, counts.errored, counts.processing) == (18, 2, 0)
    found = {line.custom_id: line.result async for line in await client.messages.batches.results(made.id)}
    assert len(found) == 20
    assert found["line-3"].type == found["line-7"].type == "errored"
    assert found["line-7"].error.error.type == "invalid_request_error"
    message = found["line-0"].message
    assert message.usage.output_tokens == 4
    assert message.usage.service_tier == "batch"
    assert [one.id async for one in client.messages.batches.list(limit=5)] == [made.id]
    await gateway.balanced()
    [row] = await gateway.sql(
        "SELECT sum(cache_read + cache_write + uncached) AS prompt, sum(output) AS output FROM batch"
    )
    usages = [result.message.usage for result in found.values() if result.type == "succeeded"]
    assert row.output == sum(usage.output_tokens for usage in usages)
    assert row.prompt == sum(
        usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens for usage in usages
    )
    async with gateway.app[DATABASE].write() as conn:
        await conn.execute(text("UPDATE file SET expires_at = 1 WHERE purpose = 'batch_output'"))
    with pytest.raises(anthropic.NotFoundError, match="The output file of this batch is not there any more"):
        await client.messages.batches.results(made.id)
    deleted = await client.messages.batches.delete(made.id)
    assert deleted.type == "message_batch_deleted"
    with pytest.raises(anthropic.NotFoundError):
        await client.messages.batches.retrieve(made.id)
    assert [one.id async for one in client.messages.batches.list()] == []


async def test_a_cancelled_batch_has_a_result_for_every_request(
    gateway: RunningGateway, client: anthropic.AsyncAnthropic, jobs_process: subprocess.Popen[bytes]
) -> None:
    made = await client.messages.batches.create(requests=[request(i, max_tokens=1500) for i in range(200)])
    canceled = await client.messages.batches.cancel(made.id)
    assert canceled.cancel_initiated_at is not None
    batch = await ended(client, made.id)
    counts = batch.request_counts
    assert counts.succeeded + counts.canceled == 200
    assert counts.canceled > 0
    found = [line.result.type async for line in await client.messages.batches.results(made.id)]
    assert found.count("canceled") == counts.canceled
    assert found.count("succeeded") == counts.succeeded


async def test_a_batch_whose_commit_lost_its_reply_has_its_requests(
    gateway: RunningGateway, client: anthropic.AsyncAnthropic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its input was deleted. The client's retry got the stored answer of a batch that could never run."""
    keyed = {"idempotency-key": "once"}
    with monkeypatch.context() as patch:
        lose_the_reply_to_a_files_commit(patch, gateway.app[DATABASE])
        with pytest.raises(anthropic.InternalServerError):
            await client.messages.batches.create(requests=[request(1), request(2)], extra_headers=keyed)
    made = await client.messages.batches.create(requests=[request(1), request(2)], extra_headers=keyed)
    assert (await client.messages.batches.retrieve(made.id)).request_counts.processing == 2
    kept = [path for path in gateway.settings.files_dir.rglob("*") if path.is_file()]
    assert len(kept) == len(await gateway.sql("SELECT id FROM file")) == 1


async def test_another_tenants_batch_does_not_exist(gateway: RunningGateway, client: anthropic.AsyncAnthropic) -> None:
    made = await client.messages.batches.create(requests=[request(1)])
    _, key = await gateway.new_tenant("Other")
    async with anthropic.AsyncAnthropic(base_url=gateway.url, api_key=key, max_retries=0) as other:
        for call in (other.messages.batches.retrieve, other.messages.batches.cancel, other.messages.batches.delete):
            with pytest.raises(anthropic.NotFoundError):
                await call(made.id)
        assert [one.id async for one in other.messages.batches.list()] == []
        with pytest.raises(anthropic.BadRequestError):
            await other.messages.batches.create(requests=[request(1), request(1)])
        with pytest.raises(anthropic.NotFoundError):
            await other.messages.batches.create(requests=[request(1, model="none")])


async def test_the_requests_of_a_batch_are_counted_once(
    gateway: RunningGateway, client: anthropic.AsyncAnthropic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each look at a page of batches read all of their files, up to 20 GB, while nobody had read their lines."""
    parts, num_read = Reader.parts, 0

    def counted(reader: Reader) -> Iterator[bytes]:
        nonlocal num_read
        num_read += 1
        return parts(reader)

    monkeypatch.setattr(Reader, "parts", counted)
    for number in range(2):
        await client.messages.batches.create(requests=[request(i) for i in range(3 + number)])
    for _ in range(3):
        page = await client.messages.batches.list()
        assert [batch.request_counts.processing for batch in page.data] == [4, 3]
    assert num_read == 2


async def test_a_batch_whose_input_has_expired_is_listed_with_the_others(
    gateway: RunningGateway, client: anthropic.AsyncAnthropic
) -> None:
    """The whole list was 404, because its requests were counted in a file that is gone."""
    old = await client.messages.batches.create(requests=[request(1)])
    await client.messages.batches.cancel(old.id)
    async with gateway.app[DATABASE].write() as conn:
        await conn.execute(text("UPDATE file SET expires_at = 1"))
    new = await client.messages.batches.create(requests=[request(1)])
    assert [one.id async for one in client.messages.batches.list()] == [new.id, old.id]
    assert (await client.messages.batches.retrieve(old.id)).request_counts.processing == 0


async def from_a_file(gateway: RunningGateway, num_batches: int) -> tuple[str, list[str]]:
    """The ids of an uploaded file, and of batches that were made from it at `/v1/batches`."""
    line = {"custom_id": "a", "method": "POST", "url": "/v1/messages", "body": request(1)["params"]}
    async with gateway.client() as openai:
        file = await openai.files.create(file=("in.jsonl", json.dumps(line).encode()), purpose="batch")
        wanted: Any = {"input_file_id": file.id, "endpoint": "/v1/messages", "completion_window": "24h"}
        made = [await openai.batches.create(**wanted) for _ in range(num_batches)]
    return file.id, [one.id for one in made]


async def test_a_batch_is_not_deleted_with_an_input_that_another_one_has(
    gateway: RunningGateway, client: anthropic.AsyncAnthropic
) -> None:
    """The other one was gone from every page with it, while it ran and was charged."""
    file_id, (first, second) = await from_a_file(gateway, 2)
    async with gateway.app[DATABASE].write() as conn:
        await conn.execute(text("UPDATE batch SET state = 'cancelled' WHERE id = :b"), {"b": first})
    with pytest.raises(anthropic.ConflictError, match="same input file"):
        await client.messages.batches.delete(first)
    assert {one.id async for one in client.messages.batches.list()} == {first, second}
    async with gateway.client() as openai:
        await openai.files.delete(file_id)
    assert [one.id async for one in client.messages.batches.list()] == []


async def test_an_uploaded_input_is_deleted_only_by_a_key_that_may_delete_files(
    gateway: RunningGateway, client: anthropic.AsyncAnthropic
) -> None:
    file_id, [batch_id] = await from_a_file(gateway, 1)
    inline = await client.messages.batches.create(requests=[request(1)])
    async with gateway.app[DATABASE].write() as conn:
        await conn.execute(text("UPDATE batch SET state = 'cancelled'"))
        lesser = await api_keys.create(
            conn, PEPPER, tenant_id=gateway.keys.tenant_id, now=int(time.time()), scopes=["batch", "chat"]
        )
    async with anthropic.AsyncAnthropic(base_url=gateway.url, api_key=lesser.value, max_retries=0) as other:
        with pytest.raises(anthropic.PermissionDeniedError):
            await other.messages.batches.delete(batch_id)
        await other.messages.batches.delete(inline.id)
    async with gateway.client() as openai:
        assert (await openai.files.retrieve(file_id)).id == file_id
    await client.messages.batches.delete(batch_id)
    with pytest.raises(anthropic.NotFoundError):
        await client.messages.batches.retrieve(batch_id)
