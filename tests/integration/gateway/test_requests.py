"""The request log through a real gateway: who has rows, who may read them, when they are there, and the command."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from fakes import ScriptedWorker
from gateways import MODEL, RunningGateway, prepare_home, running_gateway
from load import stretched
from sqlalchemy.exc import OperationalError

from accounting.database.db import Database
from accounting.requests import request_log, request_volume, sessions
from accounting.requests.request_log import LoggedRequest
from accounting.tenants import tenants
from accounting.values.types import Limits
from gateway.base.app_keys import DATABASE
from gateway.cli.main import main
from gateway.telemetry import request_log as writing

CANARY = "canary in the prompt"
MESSAGES: list[Any] = [{"role": "user", "content": CANARY}]
ADMIN, OWN = "/admin/v1/requests", "/v1/requests"
VISIBLE_S = 2.0


async def read(gateway: RunningGateway, path: str, key: str | None = None, **params: Any) -> tuple[int, dict[str, Any]]:
    async with gateway.session(key or gateway.keys.admin_key) as session, session.get(path, params=params) as answer:
        return answer.status, await answer.json()


async def found(gateway: RunningGateway, path: str = ADMIN, key: str | None = None, **params: Any) -> list[Any]:
    status, page = await read(gateway, path, key, **params)
    assert status == 200, page
    return page["data"]


@pytest.fixture
def rows_are_written_as_often_as_a_server_does() -> Iterator[None]:
    """It is to be asked for before the gateway. Rows are written more often where it is not."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gateway.resources.EVERY_S", writing.EVERY_S)
        yield


async def logged(gateway: RunningGateway, request_id: str, key: str | None = None) -> dict[str, Any]:
    """The request's row with its timeline, which has to be there within 2 s on a quiet machine."""
    deadline = time.monotonic() + stretched(VISIBLE_S)
    while True:
        path = ADMIN if key is None else OWN
        status, one = await read(gateway, f"{path}/{request_id}", key)
        if status == 200:
            return one
        assert time.monotonic() < deadline, "the row is not there after 2 s"
        await asyncio.sleep(0.05)


async def ask(gateway: RunningGateway, key: str | None = None, path: str = "/v1/chat/completions", **more: Any) -> Any:
    """(status, request id, body) of a request that is not streamed."""
    headers = more.pop("headers", {})
    body = {"model": MODEL, "messages": MESSAGES, "max_tokens": 8} | more
    async with (
        gateway.session(key) as session,
        session.post(
            path, json={name: value for name, value in body.items() if value is not None}, headers=headers
        ) as got,
    ):
        return got.status, got.headers["x-request-id"], await got.json()


async def test_a_request_has_a_row_with_all_but_its_text(
    rows_are_written_as_often_as_a_server_does: None, gateway: RunningGateway
) -> None:
    fields = {"safety_identifier": "maria", "metadata": {"team": "crops"}}
    status, request_id, answer = await ask(gateway, **fields, headers={"x-stainless-retry-count": "2"})
    assert status == 200
    one = await logged(gateway, request_id)
    usage, headgate = answer["usage"], answer["headgate"]
    assert one["usage"]["prompt_tokens"] == usage["prompt_tokens"]
    assert one["usage"]["completion_tokens"] == usage["completion_tokens"] == 8
    assert (one["charge_micro_units"], one["currency"]) == (headgate["charge_micro_units"], headgate["currency"])
    assert (one["model"], one["status"], one["outcome"], one["finish_reason"]) == (MODEL, 200, "ok", "length")
    assert (one["end_user"], one["metadata"], one["num_retries"]) == ("maria", {"team": "crops"}, 2)
    assert (one["project_id"], one["service_tier"], one["stream"]) == (gateway.keys.tenant_id, "default", False)
    assert one["worker"]
    assert 0 <= one["ttft_ms"] <= one["duration_ms"]
    assert one["cache"]["miss_reason"] == headgate["cache"]["miss_reason"]
    phases = [phase["name"] for phase in one["timeline"]["phases"]]
    assert [name for name in phases if name != "preempted"][:4] == ["authenticate", "tokenize", "admit", "dispatch"]
    assert {"prefill", "decode", "settle"} <= set(phases)
    rows = await gateway.sql("SELECT * FROM request_log")
    assert CANARY not in str(rows)
    assert answer["choices"][0]["message"]["content"] not in str(rows)


async def test_from_a_ledger_entry_to_its_request(gateway: RunningGateway) -> None:
    status, request_id, _ = await ask(gateway, None, "/v1/completions", messages=None, prompt=["one", "two"])
    assert status == 200
    await logged(gateway, request_id)
    await gateway.settled()
    entries = await gateway.sql("SELECT request_id, trace_id FROM ledger_entry WHERE kind = 'settle'")
    assert len(entries) == 2
    for entry in entries:
        [one] = await found(gateway, trace_id=entry.trace_id)
        assert one["id"] == request_id


async def test_a_stream_has_its_first_byte_and_its_usage(gateway: RunningGateway) -> None:
    async with gateway.client() as client:
        stream = await client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=8, stream=True)
        request_id = stream.response.headers["x-request-id"]
        async for _ in stream:
            pass
    one = await logged(gateway, request_id)
    assert (one["stream"], one["usage"]["completion_tokens"], one["finish_reason"]) == (True, 8, "length")
    assert one["ttft_ms"] <= one["duration_ms"]


async def test_refused_requests_have_rows_and_unknown_keys_have_none(gateway: RunningGateway) -> None:
    tenant_id, key = await gateway.new_tenant("small", ["chat", "usage:read"])
    async with gateway.app[DATABASE].write() as conn:
        await tenants.set_limits(conn, tenant_id, Limits(requests_per_minute=1), now=int(time.time()))
    refusals = [
        await ask(gateway, key, max_tokens=-1),
        await ask(gateway, key, model="nobody serves this"),
        await ask(gateway, key, "/v1/files"),
        await ask(gateway, key),
        await ask(gateway, key),
    ]
    assert [status for status, _, _ in refusals] == [400, 404, 403, 200, 429]
    own = gateway.keys.api_key
    other = own[:-1] + ("1" if own.endswith("0") else "0")
    unknown = [await ask(gateway, bad) for bad in ("hg_live_wrong", other)]
    assert [status for status, _, _ in unknown] == [401, 401]
    for status, request_id, answer in refusals:
        one = await logged(gateway, request_id)
        assert (one["status"], one["project_id"]) == (status, tenant_id)
        if status >= 400:
            assert one["error_code"] == (answer["error"]["code"] or answer["error"]["type"])
            assert one["charge_micro_units"] == 0
    assert one["outcome"] == "refused"
    assert one["usage"]["prompt_tokens"] > 0
    for _, request_id, _ in unknown:
        assert (await read(gateway, f"{ADMIN}/{request_id}"))[0] == 404
    assert len(await found(gateway, project_id=tenant_id, status_class="4xx")) == 4


async def test_a_tenant_sees_its_own_requests_and_nobody_elses(gateway: RunningGateway) -> None:
    mine, my_key = await gateway.new_tenant("mine", ["chat", "usage:read"])
    _, other_key = await gateway.new_tenant("other", ["chat", "usage:read"])
    _, my_request, _ = await ask(gateway, my_key, safety_identifier="maria")
    _, other_request, _ = await ask(gateway, other_key)
    await logged(gateway, other_request, other_key)
    own = await logged(gateway, my_request, my_key)
    assert "worker" not in own
    assert own["timeline"]["phases"]
    assert [one["id"] for one in await found(gateway, OWN, my_key, model=MODEL)] == [my_request]
    # What names others finds nothing of theirs.
    everyone = await found(gateway, OWN, my_key, project_id=gateway.keys.tenant_id)
    assert {one["project_id"] for one in everyone} == {mine}
    assert await found(gateway, OWN, my_key, request_id=other_request) == []
    unknown = await read(gateway, f"{OWN}/req_{'0' * 32}", my_key)
    assert await read(gateway, f"{OWN}/{other_request}", my_key) == unknown
    assert unknown[0] == 404
    _, no_scope = await gateway.new_tenant("third", ["chat"])
    assert (await read(gateway, OWN, no_scope))[0] == 403
    assert (await read(gateway, ADMIN, my_key))[0] == 403
    both = {one["id"] for one in await found(gateway, ADMIN, model=MODEL)}
    assert {my_request, other_request} <= both


async def test_how_far_a_page_looks_tells_nothing_of_another_tenant(
    gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With more rows than a page looks at, `last_id` was another tenant's request, and `counted_from_ms` its time."""
    monkeypatch.setattr(request_log, "MAX_SCANNED_ROWS", 1)
    monkeypatch.setattr(sessions, "MAX_SCANNED_ROWS", 1)
    monkeypatch.setattr(request_volume, "MAX_COUNTED_ROWS", 1)
    mine, my_key = await gateway.new_tenant("curious", ["chat", "usage:read"])
    other, _ = await gateway.new_tenant("watched", ["chat", "usage:read"])
    [my_row] = await gateway.sql("SELECT id FROM api_key WHERE tenant_id = :t", t=mine)
    [key_row] = await gateway.sql("SELECT id FROM api_key WHERE tenant_id = :t", t=other)
    now_ms, trace_id = time.time_ns() // 1_000_000, "ab" * 16
    theirs = [entry(now_ms - age, tenant_id=other, key_id=key_row.id, trace_id=trace_id) for age in (1, 3)]
    own = entry(now_ms - 2, tenant_id=mine, key_id=my_row.id, trace_id=trace_id)
    async with gateway.app[DATABASE].write() as conn:
        await request_log.add(conn, [*theirs, own])
    nothing = {"object": "list", "data": [], "first_id": None, "last_id": None, "has_more": False}
    assert (await read(gateway, OWN, my_key, api_key_id=key_row.id)) == (200, nothing)
    assert (await read(gateway, ADMIN, project_id=mine, api_key_id=key_row.id)) == (200, nothing)
    since = int(time.time()) - 3600
    _, counted = await read(gateway, f"{OWN}/volume", my_key, api_key_id=key_row.id, start_time=since)
    assert counted["counted_from_ms"] == since * 1000
    _, found_sessions = await read(gateway, "/v1/sessions", my_key, api_key_id=key_row.id)
    assert (found_sessions["data"], found_sessions["counted_from_ms"]) == ([], None)
    _, page = await read(gateway, OWN, my_key, trace_id=trace_id)
    assert [one["id"] for one in page["data"]] == [own.request_id] == [page["last_id"]]
    assert (await read(gateway, OWN, my_key, trace_id=trace_id, after=own.request_id)) == (200, nothing)
    _, page = await read(gateway, OWN, my_key, api_key_id=my_row.id)
    assert {one["project_id"] for one in page["data"]} == {mine}


async def test_pages_and_filters_over_http(gateway: RunningGateway) -> None:
    ids = [(await ask(gateway, max_tokens=n))[1] for n in (1, 2, 3)]
    await logged(gateway, ids[-1])
    status, first = await read(gateway, ADMIN, model=MODEL, limit=2)
    assert (status, first["object"], first["has_more"]) == (200, "list", True)
    assert [one["id"] for one in first["data"]] == [ids[2], ids[1]] == [first["first_id"], first["last_id"]]
    status, second = await read(gateway, ADMIN, model=MODEL, limit=2, after=first["last_id"])
    assert ([one["id"] for one in second["data"]], second["has_more"]) == ([ids[0]], False)
    assert await found(gateway, model=MODEL, min_duration_ms=10**9) == []
    assert await found(gateway, model=MODEL, end_time=int(time.time()) - 3600) == []
    assert len(await found(gateway, model=MODEL, start_time=int(time.time()) - 3600, outcome="ok")) == 3
    for name, value in (
        ("status_class", "200"),
        ("outcome", "bad"),
        ("start_time", "x"),
        ("start_time", "9" * 18),
        ("min_duration_ms", "-1"),
        ("after", "../x"),
        ("model", "a\0b"),
        ("nothing", "1"),
        ("limit", "101"),
    ):
        status, answer = await read(gateway, ADMIN, **{name: value})
        assert (status, answer["error"]["param"]) == (400, None if name == "nothing" else name), (name, answer)


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("path", [ADMIN, OWN, "/admin/v1/sessions", "/admin/v1/usage/labels", f"{ADMIN}/volume"])
async def test_a_span_that_ends_before_it_begins_is_refused(path: str, shared_gateway: RunningGateway) -> None:
    key = {"key": shared_gateway.keys.api_key} if path == OWN else {}
    for end in (1_790_000_000, 1_790_000_100):
        status, answer = await read(shared_gateway, path, **key, start_time=1_790_000_100, end_time=end)
        assert (status, answer["error"]["code"], answer["error"]["param"]) == (400, "invalid_value", "start_time")
        assert answer["error"]["message"] == "'start_time' must lie before 'end_time'."
    status, _ = await read(shared_gateway, path, **key, start_time=1_790_000_099, end_time=1_790_000_100)
    assert status == 200


async def test_sql_away_costs_rows_their_time_and_requests_nothing(
    gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    await ask(gateway)  # prices and limits are known now
    tried, add = asyncio.Event(), request_log.add

    async def away(*_: Any) -> None:
        tried.set()
        raise OperationalError("away", None, Exception("no answer"))

    monkeypatch.setattr(request_log, "add", away)
    asked = [await ask(gateway) for _ in range(3)]
    assert [status for status, _, _ in asked] == [200] * 3
    await asyncio.wait_for(tried.wait(), stretched(5))
    assert (await read(gateway, f"{ADMIN}/{asked[0][1]}"))[0] == 404
    monkeypatch.setattr(request_log, "add", add)
    await asyncio.sleep(0.3)
    for _, request_id, _ in asked:
        await logged(gateway, request_id)
    await gateway.balanced()


async def test_a_stop_writes_what_waits(tmp_path: Path, redis_url: str, worker: ScriptedWorker) -> None:
    async with running_gateway(tmp_path / "home", redis_url) as gateway:
        await gateway.workers(1)
        ids = [(await ask(gateway))[1] for _ in range(3)]
    database = Database(gateway.settings.sql_url)
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(database.close)
        conn = await stack.enter_async_context(database.read())
        for request_id in ids:
            assert (await request_log.get(conn, request_id)).status == 200


async def test_old_rows_go_without_being_asked(tmp_path: Path, redis_url: str) -> None:
    await prepare_home(tmp_path, f"sqlite+aiosqlite:///{tmp_path / 'headgate.db'}")
    database = Database(f"sqlite+aiosqlite:///{tmp_path / 'headgate.db'}")
    async with database.write() as conn:
        await request_log.add(conn, [entry(1_000), entry(time.time_ns() // 1_000_000)])
    await database.close()
    async with running_gateway(tmp_path, redis_url, request_log_days=1) as gateway:
        for _ in range(100):
            left = await gateway.sql("SELECT started_at_ms FROM request_log WHERE endpoint = 'POST /x'")
            if len(left) == 1:
                break
            await asyncio.sleep(0.05)
    assert [row.started_at_ms > 1_000 for row in left] == [True]


def entry(at_ms: int, **fields: Any) -> LoggedRequest:
    defaults: dict[str, Any] = {
        "request_id": f"req_{at_ms:012x}7{'0' * 19}",
        "is_tail": True,
        "started_at_ms": at_ms,
        "tenant_id": "proj_a",
        "key_id": "key_1",
        "endpoint": "POST /x",
        "status": 500,
        "outcome": "server_error",
    }
    return LoggedRequest(**{**defaults, **fields})


async def test_both_dialects_take_what_a_client_names(
    tmp_path: Path, redis_url: str, database_url: str, worker: ScriptedWorker
) -> None:
    async with running_gateway(tmp_path / "home", redis_url, database_url) as gateway:
        await gateway.workers(1)
        named = {"safety_identifier": "ma\x00ria \u2713", "metadata": {"a\x00": "\x1b[31m"}}
        status, request_id, _ = await ask(gateway, **named)
        assert status == 200
        one = await logged(gateway, request_id)
        assert (one["end_user"], one["metadata"]) == ("ma\\u0000ria \u2713", {"a\\u0000": "\\u001b[31m"})
        assert len(await found(gateway, model=MODEL, status_class="2xx")) == 1


# The command


@pytest.fixture
async def hostile(bare_gateway: RunningGateway) -> RunningGateway:
    """A log with what a client could never have written, as if the gateway had let it through."""
    text = "\x1b[2J\x9b31m\r\nx\u202e[red]=cmd|' /C calc'!A0"
    bad = entry(
        time.time_ns() // 1_000_000,
        tenant_id=bare_gateway.keys.tenant_id,
        model=text,
        end_user=text,
        metadata={text: text},
        error_code=text,
        duration_ms=1500,
        timeline='[[[0,0],["\\u001b[2J",5],[4,1000],[8,1400000],[10,1500000]],[[11,0],[12,2000,1,5],[8,900000]],0]',
    )
    async with bare_gateway.app[DATABASE].write() as conn:
        await request_log.add(conn, [bad])
    return bare_gateway


async def headgate(gateway: RunningGateway, *arguments: str) -> str:
    command = ["requests", *arguments, "--home", str(gateway.settings.home)]
    env = {"HEADGATE_URL": gateway.url, "HEADGATE_API_KEY": gateway.keys.admin_key}
    done = await asyncio.to_thread(CliRunner().invoke, main, command, env=env)
    assert done.exit_code == 0, done.output
    return done.output


async def test_the_command_shows_and_a_client_cannot_speak_to_the_terminal(hostile: RunningGateway) -> None:
    [one] = await found(hostile, status_class="5xx")
    outputs = [
        await headgate(hostile, "list", "--status", "5xx"),
        await headgate(hostile, "list", "--json", "--outcome", "server_error"),
        await headgate(hostile, "show", one["id"]),
        await headgate(hostile, "show", one["id"], "--json"),
    ]
    for output in outputs:
        assert one["id"] in output
        assert all(char == "\n" or " " <= char < "\x7f" for char in output), repr(output)
    listed, as_json, shown, _ = outputs
    assert "[red]" in listed
    assert json.loads(as_json)[0]["model"] == one["model"]
    assert "\\u001b[2J" in shown
    bars = [line for line in shown.splitlines() if "|" in line and "ms" in line]
    assert [line.split("|")[0].strip() for line in bars] == ["queue", "prefill", "wire", "settle"]


async def test_the_command_filters_and_says_what_is_not_there(hostile: RunningGateway) -> None:
    assert "req_" in await headgate(hostile, "list", "--tenant", "default", "--min-duration", "1000")
    assert "req_" not in await headgate(hostile, "list", "--tenant", "default", "--min-duration", "10000")
    for option, value in (
        ("--tier", "batch"),
        ("--batch", "batch_none"),
        ("--end-user", "nobody"),
        ("--error", "none"),
    ):
        assert await headgate(hostile, "list", "--json", option, value) == "[]\n", option
    assert await headgate(hostile, "list", "--json", "--from", "2020-01-01", "--to", "2021-01-01") == "[]\n"
    done = await asyncio.to_thread(
        CliRunner().invoke,
        main,
        ["requests", "show", "req_0", "--home", str(hostile.settings.home)],
        env={"HEADGATE_URL": hostile.url, "HEADGATE_API_KEY": hostile.keys.admin_key},
    )
    assert done.exit_code == 1
    assert "req_0" in done.output
