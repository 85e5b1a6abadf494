"""A gateway reads cost APIs over HTTP: pages, faults, credits and corrections, and where an operator sees them."""

from __future__ import annotations

import asyncio
import gzip
import itertools
import json
import logging
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web
from click.testing import CliRunner
from console_pages import signed_in
from cost_provider import ADMIN_KEY, CostProvider, Line, answering, running_cost_provider
from gateways import RunningGateway, running_gateway
from redis_db import emptied
from sqlalchemy import insert

from accounting.tables.upstream_models import UpstreamCall
from accounting.upstreams import cost_pulls
from accounting.values import clock
from accounting.values.periods import DAY_S, date_of
from accounting.values.types import TOKEN_CLASSES
from gateway.base.app_keys import DATABASE
from gateway.cli.main import main
from gateway.telemetry.metrics import METRICS
from gateway.upstreams import cost_puller
from gateway.upstreams.cost_puller import COST_PULLER, PAGE_BYTES
from gateway.upstreams.wires.cost_pages import MAX_PAGES

TODAY = clock.now_ms() // 1000 // DAY_S * DAY_S
FIRST, OLD, LATE = TODAY - 15 * DAY_S, TODAY - 9 * DAY_S, TODAY - DAY_S
PATH = "/admin/v1/upstreams/mock/costs"


@pytest.fixture(autouse=True)
def days_of_the_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """The days are counted from the day on which a test runs: midnight may pass after this file was imported."""
    passed_s = clock.now_ms() // 1000 // DAY_S * DAY_S - TODAY
    for name in ("TODAY", "FIRST", "OLD", "LATE"):
        monkeypatch.setitem(globals(), name, globals()[name] + passed_s)


@pytest.fixture
async def provider(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[CostProvider]:
    monkeypatch.setenv("PROVIDER_ADMIN_KEY", ADMIN_KEY)
    async with running_cost_provider() as found:
        yield found


def declared(provider: CostProvider, kind: str = "openai", **costs: Any) -> dict[str, Any]:
    models = {"bought": {"input": 1.0, "output": 2.0}}
    source = {"kind": kind, "url": f"{provider.url}/v1", "models": models}
    return {"mock": source | {"costs": {"key_env": "PROVIDER_ADMIN_KEY", **costs}}}


@pytest.fixture(params=["openai", "anthropic"])
async def gateway(
    request: pytest.FixtureRequest, tmp_path: Path, redis_url: str, provider: CostProvider
) -> AsyncIterator[RunningGateway]:
    upstreams = declared(provider, request.param)
    async with running_gateway(tmp_path / "home", redis_url, upstreams=upstreams) as running:
        await called(running)
        yield running


@pytest.fixture
async def one_gateway(tmp_path: Path, redis_url: str, provider: CostProvider) -> AsyncIterator[RunningGateway]:
    async with running_gateway(tmp_path / "home", redis_url, upstreams=declared(provider)) as running:
        await called(running)
        yield running


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def of_the_module(
    redis_socket: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[tuple[RunningGateway, CostProvider]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PROVIDER_ADMIN_KEY", ADMIN_KEY)
        home, redis_url = tmp_path_factory.mktemp("gateway") / "home", emptied(redis_socket, 3)
        async with (
            running_cost_provider() as provider,
            running_gateway(home, redis_url, upstreams=declared(provider)) as running,
        ):
            await called(running)
            yield running, provider
            await running.balanced()


@pytest.fixture
def shared_gateway(of_the_module: tuple[RunningGateway, CostProvider]) -> RunningGateway:
    """For all tests whose pulls change no more than the lines of one day, and which begin with a pull of their own."""
    return of_the_module[0]


@pytest.fixture
def shared_provider(of_the_module: tuple[RunningGateway, CostProvider]) -> CostProvider:
    """Has nothing left of the test before."""
    provider = of_the_module[1]
    provider.lines, provider.answers, provider.asked = [], [], []
    return provider


async def called(gateway: RunningGateway) -> None:
    """Three calls in the past: of 100, 250 and 70 micro-units."""
    counts = {f"{kind}_{name}": 1 for kind in ("stated", "judged") for name in TOKEN_CLASSES}
    rows = [
        {
            **counts,
            "request_id": f"req_old{number}",
            "attempt": 0,
            "tenant_id": gateway.keys.tenant_id,
            "upstream": "mock",
            "model": "bought",
            "state": "delivered",
            "started_at_ms": day * 1000 + 1,
            "provider_id": f"old-{number}",
            "has_statement": True,
            "drift": "",
            "expected_cost": cost,
            "stated_cost": None,
        }
        for number, (day, cost) in enumerate(((FIRST, 100), (OLD, 250), (LATE, 70)))
    ]
    async with gateway.app[DATABASE].write() as conn:
        await conn.execute(insert(UpstreamCall), rows)


async def admin(gateway: RunningGateway, method: str, path: str, **query: str) -> tuple[int, dict[str, Any]]:
    async with (
        gateway.session(gateway.keys.admin_key) as session,
        session.request(method, path, params=query, json={} if method == "POST" else None) as answer,
    ):
        return answer.status, await answer.json()


async def pull(gateway: RunningGateway) -> dict[str, Any]:
    status, answer = await admin(gateway, "POST", f"{PATH}/pull")
    assert status == 200, answer
    return answer


async def days(gateway: RunningGateway, **query: str) -> dict[str, dict[str, Any]]:
    status, answer = await admin(gateway, "GET", PATH, **query)
    assert status == 200, answer
    return {one["date"]: one for one in answer["days"]}


async def headgate(gateway: RunningGateway, *arguments: str, **env: str) -> tuple[int, str]:
    env = {"HEADGATE_URL": gateway.url, "HEADGATE_API_KEY": gateway.keys.admin_key, **env}
    command = [*arguments, "--home", str(gateway.settings.home)]
    done = await asyncio.to_thread(CliRunner().invoke, main, command, env=env)
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exc_info
    return done.exit_code, done.output


LINES = [
    Line(FIRST, "input", "0.000100"),
    Line(OLD, "input", "0.0002004"),
    Line(OLD, "input", "0.0001004"),
    Line(OLD, "output", "0.00015"),
    Line(OLD, "goodwill", "-0.00005"),
    Line(OLD, "input", "1.5", currency="EUR"),
    Line(LATE, "", "0.00006"),
]


async def test_pages_are_read_and_each_day_is_compared(gateway: RunningGateway, provider: CostProvider) -> None:
    provider.lines = LINES
    assert (await pull(gateway)) == {
        "id": "mock",
        "object": "upstream.cost_pull",
        "ok": True,
        "num_lines": 6,
        "num_changed": 6,
        "fault": None,
    }
    assert len(provider.asked) == 3, "fifteen days are three pages of seven"
    found = await days(gateway)
    assert {
        date: (one["account"], one["billed_micro_units"], one["drift_micro_units"]) for date, one in found.items()
    } == {date_of(FIRST): (None, 100, 0), date_of(OLD): ("over", 451, 201), date_of(LATE): ("late", 60, -10)}
    old = found[date_of(OLD)]
    assert (old["credit_micro_units"], old["other_currencies_micro_units"]) == (-50, {"EUR": 1_500_000})
    await gateway.balanced()


async def test_corrections_and_late_rows_come_with_the_next_pull_and_stay_visible(
    gateway: RunningGateway, provider: CostProvider
) -> None:
    provider.lines = [Line(OLD, "input", "0.0003")]
    await pull(gateway)
    provider.lines = [Line(OLD, "input", "0.00025"), Line(FIRST, "late", "0.0001")]
    assert (await pull(gateway))["num_changed"] == 2
    assert (await pull(gateway))["num_changed"] == 0
    found = await days(gateway)
    assert [found[date_of(day)]["account"] for day in (FIRST, OLD)] == [None, None]
    assert found[date_of(OLD)]["num_corrections"] == 1
    _, answer = await admin(gateway, "GET", PATH, date=date_of(OLD))
    told = [(one["revision"], one["amount_micro_units"], one["is_in_force"]) for one in answer["lines"]]
    assert told == [(1, 300, False), (2, 250, True)]
    await gateway.balanced()


async def test_lines_of_other_projects_do_not_count(tmp_path: Path, redis_url: str, provider: CostProvider) -> None:
    provider.lines = [Line(OLD, "input", "0.00025", project="ours"), Line(OLD, "input", "5", project="theirs")]
    for kind in ("openai", "anthropic"):
        upstreams = declared(provider, kind, project="ours")
        async with running_gateway(tmp_path / kind, redis_url, upstreams=upstreams) as gateway:
            await called(gateway)
            await pull(gateway)
            assert (await days(gateway))[date_of(OLD)]["account"] is None


async def redirect(request: web.Request) -> web.StreamResponse:
    raise web.HTTPFound("/v1/organization/costs?elsewhere")


async def endless(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"content-type": "application/json"})
    await response.prepare(request)
    for _ in range(PAGE_BYTES // 2**20 + 1):
        await response.write(b" " * 2**20)
    return response


async def hung_up(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"content-type": "application/json", "content-length": "100"})
    await response.prepare(request)
    await response.write(b'{"data"')
    assert request.transport is not None
    request.transport.abort()
    return response


def bucket(*values: str) -> str:
    """A day with an amount for each of so many items."""
    lines = (
        f'{{"amount": {{"value": {value}, "currency": "usd"}}, "line_item": "{number}"}}'
        for number, value in enumerate(values)
    )
    return f'{{"start_time": {OLD}, "results": [{", ".join(lines)}]}}'


def page(*buckets: str) -> str:
    return f'{{"data": [{", ".join(buckets)}], "has_more": false}}'


BOMB = gzip.compress(b" " * (64 << 20))
"""64 MiB in 64 KiB."""
FAULTS: list[tuple[str, Callable[[web.Request], Any], str]] = [
    ("a wrong key", answering(401, f'{{"error": "{ADMIN_KEY}"}}'), "credential"),
    ("a key without the right", answering(403), "credential"),
    ("an unknown path", answering(404), "not_found"),
    ("too many requests", answering(429, headers={"retry-after": "3600"}), "rate_limited"),
    ("a fault of the provider", answering(500, "<html>"), "server_error"),
    ("a refusal", answering(400), "refused"),
    ("a redirect", redirect, "redirect"),
    ("a page for people", answering(body="<html>", content_type="text/html"), "content_type"),
    ("packed bytes", answering(headers={"content-encoding": "br"}), "content_type"),
    ("a bomb", answering(body=BOMB, headers={"content-encoding": "gzip"}), "content_type"),
    ("a bomb that is not named", answering(body=BOMB), "garbage"),
    ("garbage", answering(body=b'{"data": ['), "garbage"),
    ("no page", answering(body="[]"), "garbage"),
    ("a page without an end", endless, "garbage"),
    ("a broken connection", hung_up, "disconnected"),
    ("a huge exponent", answering(body=page(bucket("1e999"))), "garbage"),
    ("no number", answering(body=page(bucket('"NaN"'))), "garbage"),
    ("an infinite number", answering(body=page(bucket('"-Infinity"'))), "garbage"),
    ("a number of 400 digits", answering(body=page(bucket("9" * 400))), "garbage"),
    ("billions for each of many items", answering(body=page(bucket(*["9e8"] * 100))), "garbage"),
    ("billions of credit", answering(body=page(bucket(*["-9e8"] * 100))), "garbage"),
    ("a day that is told twice", answering(body=page(bucket("1"), bucket("1"))), "garbage"),
    ("more pages without a token", answering(body='{"data": [], "has_more": true}'), "garbage"),
]


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(("answer", "word"), [fault[1:] for fault in FAULTS], ids=[fault[0] for fault in FAULTS])
async def test_a_failed_pull_writes_nothing_and_says_why(
    shared_gateway: RunningGateway,
    shared_provider: CostProvider,
    caplog: pytest.LogCaptureFixture,
    answer: Callable[[web.Request], Any],
    word: str,
) -> None:
    gateway, provider = shared_gateway, shared_provider
    provider.lines = [Line(OLD, "input", "0.0003")]
    await pull(gateway)
    provider.lines = [Line(OLD, "input", "0.0004")]
    # The fault comes with the second page: what the first one said is not written either.
    provider.answers = [answering(body=f'{{"data": [], "has_more": true, "next_page": "p{TODAY - DAY_S}"}}'), answer]
    provider.asked.clear()
    found = await pull(gateway)
    assert (found["ok"], found["fault"], found["num_changed"]) == (False, word, 0)
    assert len(provider.asked) == 2, "a redirect is not followed"
    assert (await days(gateway))[date_of(OLD)]["billed_micro_units"] == 300
    _, shown = await admin(gateway, "GET", PATH)
    assert (shown["fault"], shown["pulled_at"] is not None) == (word, True)
    [logged] = [one for one in caplog.records if one.message == "upstream_costs_not_pulled"]
    assert (vars(logged)["upstream"], vars(logged)["why"]) == ("mock", word)
    assert ADMIN_KEY not in caplog.text + str([vars(one) for one in caplog.records])
    assert (await pull(gateway))["num_changed"] == 1
    _, shown = await admin(gateway, "GET", PATH)
    assert shown["fault"] is None


@pytest.mark.asyncio(loop_scope="module")
async def test_pages_that_go_in_circles_come_to_an_end(
    shared_gateway: RunningGateway, shared_provider: CostProvider
) -> None:
    circle = answering(body='{"data": [], "has_more": true, "next_page": "p1"}')
    shared_provider.answers = [circle] * 3
    assert (await pull(shared_gateway))["fault"] == "garbage"
    assert len(shared_provider.asked) == 2


@pytest.mark.asyncio(loop_scope="module")
async def test_pages_without_an_end_come_to_an_end(
    shared_gateway: RunningGateway, shared_provider: CostProvider
) -> None:
    tokens = itertools.count()

    async def further(_: web.Request) -> web.StreamResponse:
        return web.json_response({"data": [], "has_more": True, "next_page": f"p{next(tokens)}"})

    shared_provider.answers = [further] * 1000
    assert (await pull(shared_gateway))["fault"] == "garbage"
    assert len(shared_provider.asked) == MAX_PAGES


async def silent(_: web.Request) -> web.StreamResponse:
    await asyncio.sleep(60)
    raise AssertionError("the gateway waits for ever")


async def dripping(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"content-type": "application/json"})
    await response.prepare(request)
    while True:
        await response.write(b" ")
        await asyncio.sleep(0.02)


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("limit", ["PAGE_S", "PULL_S"])
@pytest.mark.parametrize("answer", [silent, dripping])
async def test_a_provider_that_stalls_is_left(
    shared_gateway: RunningGateway,
    shared_provider: CostProvider,
    monkeypatch: pytest.MonkeyPatch,
    answer: Callable[[web.Request], Any],
    limit: str,
) -> None:
    shared_provider.answers = [answer]
    with monkeypatch.context() as patch:
        patch.setattr(cost_puller, limit, 0.2)
        assert (await pull(shared_gateway))["fault"] == "stalled"
    assert (await pull(shared_gateway))["ok"]


async def test_a_provider_that_invents_lines_is_not_read_on(
    one_gateway: RunningGateway, provider: CostProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cost_pulls, "MAX_DAY_ROWS", 5)
    provider.lines = [Line(OLD, name, "0.0001") for name in "abc"]
    assert (await pull(one_gateway))["num_changed"] == 3
    provider.lines = [Line(OLD, name, "0.0001") for name in "def"]
    found = await pull(one_gateway)
    assert (found["ok"], found["fault"], found["num_changed"]) == (False, "too_many_lines", 0)
    assert (await days(one_gateway))[date_of(OLD)]["billed_micro_units"] == 300
    _, shown = await admin(one_gateway, "GET", PATH)
    assert shown["fault"] == "too_many_lines"
    await one_gateway.balanced()


async def test_a_provider_that_cannot_be_reached_fails_the_pull(
    tmp_path: Path, redis_url: str, provider: CostProvider
) -> None:
    upstreams = declared(provider, url="http://127.0.0.1:9/v1")
    async with running_gateway(tmp_path / "home", redis_url, upstreams=upstreams) as gateway:
        await called(gateway)
        assert (await pull(gateway))["fault"] == "connect"


async def test_the_hour_is_kept_and_one_gateway_reads_for_all(
    tmp_path: Path, redis_url: str, provider: CostProvider
) -> None:
    provider.lines, provider.pause_s = LINES, 0.2
    upstreams, url = declared(provider), f"sqlite+aiosqlite:///{tmp_path}/shared.db"
    async with running_gateway(tmp_path / "a", redis_url, url, upstreams=upstreams) as one:
        await called(one)
        async with running_gateway(tmp_path / "b", redis_url, url, upstreams=upstreams, slot=1) as two:
            pullers = [running.app[COST_PULLER] for running in (one, two)]
            await asyncio.gather(*(puller.look() for puller in pullers))
            await asyncio.gather(*(puller.look() for puller in pullers))
            assert (len(provider.asked), provider.most_at_once) == (3, 1)
            answers = await asyncio.gather(*(admin(one, "POST", f"{PATH}/pull") for _ in range(3)))
            assert sorted(status for status, _ in answers) == [200, 409, 409]
            async with one.app[DATABASE].write() as conn:
                await conn.exec_driver_sql("UPDATE upstream_cost_pull SET tried_at_ms = tried_at_ms - 3600000")
            provider.asked.clear()
            await pullers[1].look()
            assert len(provider.asked) == 3, "an hour later it is read again"
            assert pullers[1].figures["mock"].sums.drift["over"] == 201
            value = two.app[METRICS].registry.get_sample_value
            labels = {"upstream": "mock", "account": "over"}
            assert value("headgate_upstream_cost_drift_micro_units", labels) == 201
            assert value("headgate_upstream_billed_micro_units", {"upstream": "mock"}) == 561
            assert value("headgate_upstream_cost_pulls_total", {"upstream": "mock", "end": "pulled"}) >= 1
            pulled_at = value("headgate_upstream_costs_pulled_timestamp_seconds", {"upstream": "mock"})
            assert abs(pulled_at - clock.now_ms() / 1000) < 600


async def test_an_operator_adds_an_upstream_with_an_admin_key_that_is_never_seen(
    tmp_path: Path, redis_url: str, provider: CostProvider, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    provider.lines = LINES
    async with running_gateway(tmp_path / "home", redis_url) as gateway:
        add = ("upstreams", "add", "mock", f"{provider.url}/v1", "--model", "bought", "--costs-key-variable", "ADMIN")
        code, shown = await headgate(gateway, *add, ADMIN=ADMIN_KEY)
        assert code == 0, shown
        await called(gateway)
        for command in (("pull", "mock"), ("costs", "mock"), ("costs", "mock", "--json"), ("show", "mock", "--json")):
            code, output = await headgate(gateway, "upstreams", *command)
            assert code == 0, output
            shown += output
        assert "over" in shown
        code, output = await headgate(gateway, "upstreams", "costs", "mock", "--date", date_of(OLD))
        assert (code, "goodwill" in output, "-0.000050 USD" in output) == (0, True, True), output
        code, output = await headgate(gateway, "upstreams", "costs", "mock", "--json")
        totals = json.loads(output)["totals"]
        assert totals["drift_micro_units"] == {"late": -10, "over": 201}
        async with signed_in(gateway, gateway.keys.admin_key) as operator:
            page = await operator.get("/upstreams/mock")
            assert (page.status, "over" in page.words, date_of(OLD) in page.words) == (200, True, True)
            assert "goodwill" in (await operator.get(f"/upstreams/mock/{date_of(OLD)}")).words
            await operator.get("/upstreams/mock")
            page = await operator.submit("/upstreams/mock/pull")
            assert "The costs have been read" in page.words
            assert (await operator.get(f"/upstreams/{'x' * 40}")).status == 404
            shown += page.text
        async with gateway.session(gateway.keys.admin_key) as session, session.get("/metrics") as metrics:
            shown += await metrics.text()
        audit = str(await gateway.sql("SELECT * FROM audit_log"))
        assert "headgate.upstream.costs_pulled" in audit
        [stored] = await gateway.sql("SELECT declared, sealed_cost_key FROM upstream")
        assert ADMIN_KEY.encode() not in stored.sealed_cost_key
        seen = shown + audit + stored.declared + caplog.text + "".join(str(vars(one)) for one in caplog.records)
        assert ADMIN_KEY not in seen
        assert ADMIN_KEY.encode() not in (gateway.settings.home / "headgate.db").read_bytes()
        await gateway.balanced()


async def test_what_cannot_be_read_is_refused_with_its_reason(one_gateway: RunningGateway) -> None:
    gateway = one_gateway
    for query, param in (({"days": "0"}, "days"), ({"days": "x"}, "days"), ({"date": "2026-13-01"}, "date")):
        status, answer = await admin(gateway, "GET", PATH, **query)
        assert (status, answer["error"]["param"]) == (400, param)
    assert (await admin(gateway, "GET", "/admin/v1/upstreams/nobody/costs"))[0] == 404
    body = {"name": "plain", "url": "https://example.com/v1", "models": {"x": {}}}
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"costs": {"key_env": "MASTER_KEY"}}, "costs.key_env"),
        ({"costs": {"url": "file:///etc/passwd"}}, "costs.url"),
        ({"costs": {"projects": "x"}}, "costs.projects"),
        ({"kind": "azure", "cost_credential": "x"}, "url"),
    ]
    async with gateway.session(gateway.keys.admin_key) as session:
        for change, param in wrong:
            async with session.post("/admin/v1/upstreams", json=body | change) as found:
                answer = await found.json()
            assert (found.status, answer["error"]["param"]) == (400, param), answer
        async with session.post("/admin/v1/upstreams", json=body) as found:
            assert found.status == 200
    status, answer = await admin(gateway, "POST", "/admin/v1/upstreams/plain/costs/pull")
    assert (status, answer["error"]["param"]) == (400, "upstream")
    status, answer = await admin(gateway, "GET", "/admin/v1/upstreams/plain/costs")
    assert (status, answer["is_read"], answer["days"]) == (200, False, [])
    async with gateway.session() as session, session.get(PATH) as found:
        assert found.status in (401, 403)
