"""Batches under an Idempotency-Key: one is made, whatever comes how often, and a failure leaves nothing."""

from __future__ import annotations

import asyncio
import io
import json
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from gateways import MODEL, RunningGateway, until
from sqlalchemy.exc import OperationalError

from accounting.requests import idempotency_store as replies
from gateway.base import errors
from gateway.base.app_keys import LIFECYCLE
from gateway.routes import batch_results, message_batches

pytestmark = pytest.mark.asyncio(loop_scope="module")

MESSAGES, BATCHES = "/v1/messages/batches", "/v1/batches"
Answer = tuple[int, dict[str, Any], Mapping[str, str]]


def messages(word: str = "hello", *, turned: bool = False) -> dict[str, Any]:
    params = {"model": MODEL, "max_tokens": 4, "messages": [{"role": "user", "content": word}]}
    if turned:
        params = dict(reversed(params.items()))
    return {"requests": [{"custom_id": "a", "params": params}]}


async def uploaded(gateway: RunningGateway) -> dict[str, Any]:
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"model": MODEL, "prompt": "x"}}
    async with gateway.client() as client:
        file = await client.files.create(file=("in.jsonl", io.BytesIO(json.dumps(line).encode())), purpose="batch")
    return {"input_file_id": file.id, "endpoint": "/v1/completions", "completion_window": "24h"}


async def post(gateway: RunningGateway, path: str, body: Any, key: str | None, api_key: str | None = None) -> Answer:
    headers = {} if key is None else {"idempotency-key": key}
    async with gateway.session(api_key) as session, session.post(path, json=body, headers=headers) as answer:
        return answer.status, await answer.json(), answer.headers.copy()


async def batch_ids(gateway: RunningGateway) -> set[str]:
    return {row.id for row in await gateway.sql("SELECT id FROM batch")}


def stored_files(gateway: RunningGateway) -> set[Path]:
    return {path for path in (gateway.settings.home / "files").rglob("*") if path.is_file()}


async def body_for(gateway: RunningGateway, path: str) -> Any:
    return messages() if path == MESSAGES else await uploaded(gateway)


@pytest.mark.parametrize("path", [MESSAGES, BATCHES])
async def test_a_repeat_gets_the_first_ones_batch(shared_gateway: RunningGateway, path: str) -> None:
    body, before = await body_for(shared_gateway, path), await batch_ids(shared_gateway)
    status, first, headers = await post(shared_gateway, path, body, f"mine {path}")
    assert (status, "idempotent-replayed" in headers) == (200, False)
    files = stored_files(shared_gateway)
    status, again, headers = await post(shared_gateway, path, body, f"mine {path}")
    assert (status, again, headers["idempotent-replayed"]) == (200, first, "true")
    assert await batch_ids(shared_gateway) - before == {first["id"]}
    assert stored_files(shared_gateway) == files
    _, other, _ = await post(shared_gateway, path, body, None)
    assert other["id"] != first["id"]
    await shared_gateway.balanced()


@pytest.mark.parametrize("path", [MESSAGES, BATCHES])
async def test_repeats_at_the_same_moment_make_one(shared_gateway: RunningGateway, path: str) -> None:
    body, before = await body_for(shared_gateway, path), await batch_ids(shared_gateway)
    answers = await asyncio.gather(*(post(shared_gateway, path, body, f"at once {path}") for _ in range(6)))
    assert {status for status, _, _ in answers} == {200}
    assert {answer["id"] for _, answer, _ in answers} == await batch_ids(shared_gateway) - before
    assert [headers.get("idempotent-replayed") for _, _, headers in answers].count(None) == 1


async def test_the_body_decides_and_not_the_order_of_its_members(shared_gateway: RunningGateway) -> None:
    _, first, _ = await post(shared_gateway, MESSAGES, messages(), "order")
    status, again, _ = await post(shared_gateway, MESSAGES, messages(turned=True), "order")
    assert (status, again["id"]) == (200, first["id"])
    status, refused, _ = await post(shared_gateway, MESSAGES, messages("else"), "order")
    assert (status, refused["error"]["code"]) == (422, "idempotency_mismatch")
    status, refused, _ = await post(shared_gateway, BATCHES, await uploaded(shared_gateway), "order")
    assert (status, refused["error"]["code"]) == (422, "idempotency_mismatch")


async def test_a_key_is_its_tenants_own(shared_gateway: RunningGateway) -> None:
    _, first, _ = await post(shared_gateway, MESSAGES, messages(), "shared name")
    _, key = await shared_gateway.new_tenant("another", ("chat", "batch"))
    status, other, headers = await post(shared_gateway, MESSAGES, messages(), "shared name", key)
    assert (status, "idempotent-replayed" in headers) == (200, False)
    assert other["id"] != first["id"]


@pytest.mark.parametrize("key", ["batch:x:1", "", "x" * 256])
async def test_a_key_that_cannot_be_one_is_refused(shared_gateway: RunningGateway, key: str) -> None:
    before, files = await batch_ids(shared_gateway), stored_files(shared_gateway)
    status, refused, _ = await post(shared_gateway, MESSAGES, messages(), key)
    assert (status, refused["error"]["type"]) == (400, "invalid_request_error")
    assert (await batch_ids(shared_gateway), stored_files(shared_gateway)) == (before, files)


async def test_a_refusal_leaves_the_key_free(shared_gateway: RunningGateway) -> None:
    good = await uploaded(shared_gateway)
    status, _, _ = await post(shared_gateway, BATCHES, good | {"input_file_id": "file-none"}, "later")
    assert status == 404
    status, _, headers = await post(shared_gateway, BATCHES, good, "later")
    assert (status, "idempotent-replayed" in headers) == (200, False)


async def test_what_cannot_be_stored_is_not_made(
    shared_gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(*_: Any, **__: Any) -> bool:
        raise OperationalError("store", None, OSError("the database is away"))

    before, files = await batch_ids(shared_gateway), stored_files(shared_gateway)
    with monkeypatch.context() as patched:
        patched.setattr(replies, "store", broken)
        status, refused, _ = await post(shared_gateway, MESSAGES, messages(), "broken")
    assert (status, refused["error"]["code"]) == (503, "database_unavailable")
    assert (await batch_ids(shared_gateway), stored_files(shared_gateway)) == (before, files)
    status, _, headers = await post(shared_gateway, MESSAGES, messages(), "broken")
    assert (status, "idempotent-replayed" in headers) == (200, False)


async def test_a_client_that_leaves_leaves_a_file_and_its_batch_or_neither(
    shared_gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored, waits, may_go_on = message_batches._stored, threading.Event(), threading.Event()

    def slow(*args: Any) -> Any:
        found = stored(*args)
        waits.set()
        assert may_go_on.wait(20)
        return found

    before, files = await batch_ids(shared_gateway), stored_files(shared_gateway)
    monkeypatch.setattr(message_batches, "_stored", slow)
    asked = asyncio.create_task(post(shared_gateway, MESSAGES, messages(), None))
    await until(waits.is_set)
    asked.cancel()
    await asyncio.wait([asked])
    await asyncio.sleep(0.3)  # the gateway hears of it
    may_go_on.set()
    await until(lambda: not shared_gateway.app[LIFECYCLE].num_running)
    assert len(stored_files(shared_gateway) - files) == len(await batch_ids(shared_gateway) - before)


async def test_an_answer_that_has_begun_is_cut_and_no_other_one_follows_in_it(
    shared_gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A database that went away between two pages of results put the head of a 503 into the file that a client saved."""

    found = iter([b"{}\n"])

    async def part(_: Any) -> bytes:
        if (one := next(found, None)) is not None:
            return one
        raise errors.unavailable("database_unavailable", "The database is away.")

    _, made, _ = await post(shared_gateway, BATCHES, await uploaded(shared_gateway), None)
    monkeypatch.setattr(batch_results.Results, "part", part)
    reader, writer = await shared_gateway.socket()
    head = f"GET /v1/batches/{made['id']}/results HTTP/1.1\r\nhost: x\r\n"
    writer.write(f"{head}authorization: Bearer {shared_gateway.keys.api_key}\r\n\r\n".encode())
    async with asyncio.timeout(20):
        answer = await reader.read()
    writer.close()
    assert answer.startswith(b"HTTP/1.1 200")
    assert answer.endswith(b"\r\n\r\n3\r\n{}\n\r\n"), "the connection ends in mid-body"


async def test_a_tenant_has_so_many_keys(shared_gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    _, key = await shared_gateway.new_tenant("full", ("chat", "batch"))
    assert (await post(shared_gateway, MESSAGES, messages(), "one", key))[0] == 200
    monkeypatch.setattr(replies, "MAX_KEYS", 1)
    files = stored_files(shared_gateway)
    status, refused, headers = await post(shared_gateway, MESSAGES, messages(), "two", key)
    assert (status, refused["error"]["code"]) == (429, "idempotency_limit_exceeded")
    assert int(headers["retry-after"]) >= 1
    assert stored_files(shared_gateway) == files
